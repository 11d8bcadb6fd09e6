// Learned kernels and mixing matrices of all layers, with the names of their patterns.
const TITLES = { conv: "kernels before the softmax", post_conv: "kernels after the softmax", mix: "mixing before the softmax", post_mix: "mixing after the softmax" };
const pictures = [];
let filter = "";

function makeGallery() {
  const place = $("gallery"), counts = new Map();
  layers.forEach((layer, i) => {
    const blocks = element("div", { className: "blocks" });
    for (const [name, title] of Object.entries(TITLES)) {
      const found = arrayOf(`${layer.index}/${name}`);
      if (!found) continue;
      const [count, rows, columns] = found.shape, kernel = name.endsWith("conv");
      const most = found.data.reduce((a, x) => Math.max(a, Math.abs(x)), 1e-12);
      const inside = element("div", { className: "kernels" });
      for (let one = 0; one < count; one++) {
        const data = found.data.subarray(one * rows * columns, (one + 1) * rows * columns);
        const pattern = layer.patterns[name][one];
        counts.set(pattern, (counts.get(pattern) ?? 0) + 1);
        const canvas = element("canvas"), cell = kernel ? 9 : clamp(Math.floor(150 / rows), 4, 14);
        canvas.width = columns;
        canvas.height = rows;
        canvas.style.width = `${columns * cell}px`;
        canvas.style.height = `${rows * cell}px`;
        const first = kernel ? one : one * rows, last = kernel ? one : first + rows - 1;
        const where = kernel ? `head ${one}` : `heads ${first} to ${last}`;
        const made = element("button", { title: `layer ${layer.index}, ${title}, ${where}: ${pattern}; largest entry ${Math.max(...data.map(Math.abs)).toPrecision(3)}` }, canvas, element("small", {}, element("b", {}, where), element("br"), element("span", {}, pattern)));
        made.dataset.pattern = pattern;
        // A pair of differential attention has no kernels: heads are heads of the map here.
        made.addEventListener("click", () => { choose({ layer: i, head: clamp(first, 0, layer.heads - 1) }); $("text-title").scrollIntoView({ behavior: "smooth" }); });
        pictures.push({ canvas, data, rows, columns, most, made, layer: i, first, last });
        inside.append(made);
      }
      if (name === "mix" || (name === "post_mix" && !blocks.querySelector(".turn"))) blocks.append(element("span", { className: "turn" }));
      blocks.append(element("div", {}, element("h4", {}, title), inside));
    }
    if (blocks.children.length) place.append(element("div", { className: "layer" }, element("h3", {}, `layer ${layer.index}`), blocks));
  });
  $("gallery-section").hidden = !pictures.length;
  const names = [["", pictures.length], ...[...counts].sort((a, b) => b[1] - a[1])];
  $("filters").replaceChildren(...names.map(([name, count]) => {
    const made = element("button", { "aria-pressed": String(name === filter) }, `${name || "all"} ${count}`);
    made.addEventListener("click", () => {
      filter = name;
      for (const other of $("filters").children) other.setAttribute("aria-pressed", String(other === made));
      for (const picture of pictures) picture.made.hidden = filter !== "" && picture.made.dataset.pattern !== filter;
      for (const box of $("gallery").querySelectorAll(".layer, .blocks > div")) box.hidden = [...box.querySelectorAll("button")].every((x) => x.hidden);
    });
    return made;
  }));
}

let galleryColours = "";
function drawGallery() {
  if (galleryColours !== theme()) {
    galleryColours = theme();
    const plus = colour("blue"), minus = colour("orange");
    for (const { canvas, data, rows, columns, most } of pictures) {
      const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
      data.forEach((x, i) => image.data.set([...(x < 0 ? minus : plus), 255 * Math.sqrt(Math.abs(x) / most)], 4 * i));
      context.putImageData(image, 0, 0);
    }
  }
  for (const { made, layer, first, last } of pictures) made.classList.toggle("here", layer === state.layer && first <= state.head && state.head <= last);
}
