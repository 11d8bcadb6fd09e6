// All heads at once: a scatter, and a grid of bars.
const FILLS = { first: "var(--does-first)", self: "var(--does-self)", previous: "var(--does-previous)", near: "var(--does-near)", far: "var(--does-far)" };
const MEANING = { first: "the first token", self: "itself", previous: "the token before", near: `up to ${about.near} tokens away`, far: "farther" };
const AXES = {
  local: [`local: itself, before, up to ${about.near} away`, ["self", "previous", "near"]],
  previous: ["the token before", ["previous"]],
  near: [`near: 2 to ${about.near} away`, ["near"]],
  self: ["itself", ["self"]],
  first: ["the first token", ["first"]],
  far: [`farther than ${about.near} away`, ["far"]],
};

// Where a head's attention goes, by kind.
function does(layer, head) {
  const { data, shape } = arrayOf(`${layer.index}/does`);
  const start = ((state.without ? 1 : 0) * shape[1] + head) * shape[2];
  return Object.fromEntries(about.does.map((name, i) => [name, data[start + i]]));
}

function shareOf(layer, head, axis) {
  const shares = does(layer, head);
  return axis[1].reduce((total, name) => total + shares[name], 0);
}

function svg(tag, options, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(options)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

const layerColour = (i) => `hsl(${250 - (200 * i) / Math.max(1, layers.length - 1)} 70% ${38 + (22 * i) / Math.max(1, layers.length - 1)}%)`;
const told = (layer, head) => `layer ${layer.index}, ${layer.unit} ${head}: ` + Object.entries(does(layer, head)).map(([name, x]) => `${MEANING[name]} ${percent(x)}`).join(", ");

function drawScatter() {
  const place = $("scatter"), left = 64, right = 456, top = 10, bottom = 320;
  const [xs, ys] = ["x-axis", "y-axis"].map((id) => AXES[$(id).value]);
  const most = (axis) => {
    const found = Math.max(...layers.flatMap((layer) => Array.from({ length: layer.heads }, (_, head) => shareOf(layer, head, axis))));
    return [0.04, 0.1, 0.2, 0.4, 0.6, 0.8].find((x) => found <= x) ?? 1;
  };
  const across = most(xs), up = most(ys);
  const parts = [svg("rect", { class: "frame", x: left, y: top, width: right - left, height: bottom - top })];
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const x = left + part * (right - left), y = bottom - part * (bottom - top);
    parts.push(svg("text", { x, y: bottom + 16, "text-anchor": "middle" }, `${+(100 * part * across).toFixed(1)} %`));
    parts.push(svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, `${+(100 * part * up).toFixed(1)} %`));
    parts.push(svg("line", { class: "frame", x1: x, x2: x, y1: top, y2: bottom, opacity: 0.5 }));
    parts.push(svg("line", { class: "frame", x1: left, x2: right, y1: y, y2: y, opacity: 0.5 }));
  }
  parts.push(svg("text", { x: (left + right) / 2, y: 352, "text-anchor": "middle" }, `share of attention to ${xs[0]} →`));
  parts.push(svg("text", { x: -(top + bottom) / 2, y: 12, transform: "rotate(-90)", "text-anchor": "middle" }, `to ${ys[0]} →`));
  let chosen = null;
  layers.forEach((layer, i) => {
    for (let head = 0; head < layer.heads; head++) {
      const dot = svg("circle", { cx: left + (shareOf(layer, head, xs) / across) * (right - left), cy: bottom - (shareOf(layer, head, ys) / up) * (bottom - top), r: layers.length * layer.heads > 300 ? 4 : 6.5, fill: layerColour(i), tabindex: -1 });
      dot.append(svg("title", {}, told(layer, head)));
      dot.dataset.layer = i;
      dot.dataset.head = head;
      if (i === state.layer && head === state.head) { dot.classList.add("here"); chosen = dot; }
      parts.push(dot);
    }
  });
  if (chosen) parts.push(chosen); // above the others
  place.replaceChildren(...parts);
}

function drawHeads() {
  const most = Math.max(...layers.map((layer) => layer.heads)), place = $("heads");
  place.style.gridTemplateColumns = `auto repeat(${most}, minmax(1.1rem, 1fr))`;
  const cells = [element("span"), ...Array.from({ length: most }, (_, head) => element("span", { className: "name" }, String(head)))];
  layers.forEach((layer, i) => {
    cells.push(element("span", { className: "name" }, `layer ${layer.index}`));
    for (let head = 0; head < most; head++) {
      if (head >= layer.heads) { cells.push(element("span")); continue; }
      const made = element("button", { title: told(layer, head), className: i === state.layer && head === state.head ? "here" : "" });
      made.dataset.layer = i;
      made.dataset.head = head;
      for (const [name, x] of Object.entries(does(layer, head))) {
        const part = element("i");
        part.style.cssText = `width:${100 * x}%;background:${FILLS[name]}`;
        made.append(part);
      }
      cells.push(made);
    }
  });
  place.replaceChildren(...cells);
}

// The selected token in every layer and head: its largest key.
function drawEverywhere() {
  const most = Math.max(...layers.map((layer) => layer.heads)), place = $("everywhere");
  place.style.gridTemplateColumns = `auto repeat(${most}, minmax(2.2rem, 1fr))`;
  const cells = [element("span"), ...Array.from({ length: most }, (_, head) => element("span", { className: "name" }, String(head)))];
  layers.forEach((layer, i) => {
    cells.push(element("span", { className: "name" }, `layer ${layer.index}`));
    for (let head = 0; head < most; head++) {
      if (head >= layer.heads) { cells.push(element("span")); continue; }
      const found = row(lastMap(layer), head, state.token, layer), key = found.keys[0], value = found.values[0] ?? 0;
      const text = key === undefined ? "–" : visible(about.tokens[key]);
      const made = element("button", { title: key === undefined ? "nothing" : `layer ${layer.index}, ${layer.unit} ${head}: token ${key} ${text}, ${percent(value)}`, className: (value < 0 ? "n" : "w") + (i === state.layer && head === state.head ? " here" : "") }, text);
      made.style.setProperty("--p", (70 * Math.min(1, Math.abs(value))).toFixed(0));
      made.dataset.layer = i;
      made.dataset.head = head;
      cells.push(made);
    }
  });
  place.replaceChildren(...cells);
  $("everywhere-title").replaceChildren(`Token ${state.token} `, element("code", {}, visible(about.tokens[state.token])), " in every head");
}

let overviewDrawn = "";
function drawOverview() {
  const key = [state.without, $("x-axis").value, $("y-axis").value].join();
  if (key !== overviewDrawn) {
    drawScatter();
    drawHeads();
    overviewDrawn = key;
  }
  for (const dot of document.querySelectorAll("#scatter circle, #heads button")) {
    const chosen = Number(dot.dataset.layer) === state.layer && Number(dot.dataset.head) === state.head;
    if (chosen !== dot.classList.contains("here")) {
      dot.classList.toggle("here", chosen);
      if (chosen && dot.tagName === "circle") dot.parentNode.append(dot);
    }
  }
  $("overview-note").textContent = (state.without ? "Where attention goes that does not go to the first token" : "Where attention goes") + ", mean over all queries but the first. Click a head to see it at work below.";
}

function makeOverview() {
  for (const [id, value] of [["x-axis", "previous"], ["y-axis", "far"]]) {
    $(id).replaceChildren(...Object.entries(AXES).map(([name, [text]]) => element("option", { value: name }, text)));
    $(id).value = value;
    $(id).addEventListener("change", drawOverview);
  }
  $("does-legend").replaceChildren(...about.does.map((name) => {
    const made = element("i");
    made.style.background = FILLS[name];
    return element("span", {}, made, MEANING[name]);
  }));
  for (const id of ["scatter", "heads", "everywhere"]) {
    $(id).addEventListener("click", (event) => {
      const found = event.target.closest("[data-layer]");
      if (found) choose({ layer: Number(found.dataset.layer), head: Number(found.dataset.head) });
    });
  }
}
