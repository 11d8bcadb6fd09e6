// Whole maps on canvases: queries downwards, keys across.
const figures = () => [...document.querySelectorAll("#maps figure")];
const PIXELS = 720;

function drawMap(canvas, map) {
  const side = Math.min(T, PIXELS), context = canvas.getContext("2d");
  canvas.width = canvas.height = side;
  const keys = ofMap(map, "keys"), shares = ofMap(map, "shares"), k = keys.shape[2];
  const rests = ofMap(map, "rest").data, firsts = ofMap(map, "first").data;
  const image = context.createImageData(side, side), best = new Float32Array(side * side);
  for (let i = 0; i < T; i++) {
    const at = state.head * T + i, y = Math.floor((i * side) / T);
    const scale = scaleOf(rests[at], rests[at] + Math.abs(firsts[at]));
    for (let s = at * k; s < (at + 1) * k; s++) {
      const key = keys.data[s];
      if (key === NOBODY || (state.without && key === 0)) continue;
      const place = y * side + Math.floor((key * side) / T), value = shares.data[s] * scale;
      if (Math.abs(value) > Math.abs(best[place])) best[place] = value; // the largest of a pixel
    }
  }
  const plus = colour("blue"), minus = colour("orange"), later = colour("dim");
  for (let p = 0; p < best.length; p++) {
    const value = best[p], from = value < 0 ? minus : plus;
    if (value) image.data.set([...from, 255 * Math.min(1, Math.sqrt(Math.abs(value)))], 4 * p);
    else if (about.causal && p % side > Math.floor(p / side)) image.data.set([...later, 28], 4 * p);
  }
  context.putImageData(image, 0, 0);
}

function drawCross(canvas) {
  const size = canvas.clientWidth * (window.devicePixelRatio || 1) || 400, context = canvas.getContext("2d");
  canvas.width = canvas.height = size;
  const step = size / T, at = (state.token + 0.5) * step, width = Math.max(1.5, step);
  context.strokeStyle = `rgb(${colour("ink").join(" ")} / .85)`;
  context.lineWidth = 1;
  if (state.direction === "to") context.strokeRect(-2, at - width / 2, size + 4, width);
  else context.strokeRect(at - width / 2, -2, width, size + 4);
}

let drawn = "";
function drawMaps() {
  const several = here().maps.length > 1, [before, after] = figures();
  $("before-figure").hidden = !several;
  $("after-label").textContent = several ? "after:" : "map:";
  const key = [state.layer, state.head, state.before, state.after, state.without, theme()].join();
  for (const [figure, map] of [[before, state.before], [after, state.after]]) {
    if (figure.hidden) continue;
    if (key !== drawn) drawMap(figure.querySelector("canvas"), map);
    drawCross(figure.querySelector(".over"));
  }
  drawn = key;
  $("map-note").textContent = `Queries downwards, keys across; colours by the root of a share, of the ${about.keys} largest of every row. Click a place to take its query.`;
}

function fillMapChoices() {
  for (const name of ["before", "after"]) {
    $(name).replaceChildren(...here().maps.map((text, i) => element("option", { value: i }, text)));
    $(name).value = state[name];
  }
}

function listenToMaps() {
  for (const figure of figures()) {
    figure.querySelector(".map").addEventListener("click", (event) => {
      const box = event.currentTarget.getBoundingClientRect();
      const part = state.direction === "to" ? (event.clientY - box.top) / box.height : (event.clientX - box.left) / box.width;
      choose({ token: clamp(Math.floor(part * T), 0, T - 1) });
    });
  }
  for (const name of ["before", "after"]) $(name).addEventListener("change", () => choose({ [name]: Number($(name).value) }));
}
