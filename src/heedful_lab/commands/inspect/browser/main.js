// What is selected, in the address and on the page.
const theme = () => getComputedStyle(document.documentElement).colorScheme + matchMedia("(prefers-color-scheme: dark)").matches;
const chosenTheme = () => document.querySelector("[name=theme]:checked").id;

function choose(change) {
  if ("layer" in change) {
    state.layer = clamp(change.layer, 0, layers.length - 1);
    // Maps have other names in other layers: first and last are what most people compare.
    if (!("before" in change)) state.before = 0;
    if (!("after" in change)) state.after = lastMap(here());
  }
  for (const name of ["token", "head", "before", "after", "without", "direction"]) if (name in change) state[name] = change[name];
  state.head = clamp(state.head, 0, here().heads - 1);
  state.token = clamp(state.token, 0, T - 1);
  state.before = clamp(state.before, 0, lastMap(here()));
  state.after = clamp(state.after, 0, lastMap(here()));
  show();
}

function show() {
  const layer = here();
  $("at-token").textContent = state.token;
  $("at-layer").textContent = layer.index;
  $("at-head").textContent = state.head;
  $("unit").textContent = layer.unit;
  $("without").checked = state.without;
  $("direction").value = state.direction;
  $("text-title").textContent = `The text in layer ${layer.index}, ${layer.unit} ${state.head}`;
  fillMapChoices();
  drawOverview();
  drawText();
  drawEverywhere();
  drawMaps();
  drawGallery();
  const parts = { token: state.token, layer: layer.index, head: state.head, before: state.before, after: state.after };
  if (state.without) parts.without = 1;
  if (state.direction === "from") parts.from = 1;
  if (chosenTheme() !== "auto") parts.theme = chosenTheme();
  history.replaceState(null, "", "#" + new URLSearchParams(parts));
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), change = {};
  const whole = (name) => (/^\d+$/.test(given.get(name) ?? "") ? Number(given.get(name)) : null);
  const layer = layers.findIndex((x) => x.index === whole("layer"));
  change.layer = layer < 0 ? state.layer : layer;
  for (const name of ["token", "head", "before", "after"]) if (whole(name) !== null) change[name] = whole(name);
  change.without = given.has("without");
  change.direction = given.has("from") ? "from" : "to";
  if (["light", "dark"].includes(given.get("theme"))) $(given.get("theme")).checked = true;
  choose(change);
}

const MOVES = { ArrowLeft: ["token", -1], ArrowRight: ["token", 1], ArrowUp: ["layer", -1], ArrowDown: ["layer", 1] };
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.target.matches("select, input:not([type=checkbox])")) return;
  const move = MOVES[event.key];
  if (move) {
    const name = event.shiftKey && move[0] === "token" ? "head" : move[0];
    choose({ [name]: state[name] + move[1] });
  } else if (event.key === "Home") choose({ token: 0 });
  else if (event.key === "End") choose({ token: T - 1 });
  else if (event.key === "f") choose({ without: !state.without });
  else if (event.key === "d") choose({ direction: state.direction === "to" ? "from" : "to" });
  else if (event.key === "s") choose({ after: (state.after + 1) % here().maps.length });
  else if (event.key === "t") {
    const names = ["auto", "light", "dark"];
    $(names[(names.indexOf(chosenTheme()) + 1) % 3]).checked = true;
    show();
  } else if (event.key === "?") $("help").showModal();
  else return;
  event.preventDefault();
}

makeText();
makeOverview();
makeGallery();
listenToMaps();
for (const button of document.querySelectorAll("[data-move]")) {
  button.addEventListener("click", () => choose({ [button.dataset.move]: state[button.dataset.move] + Number(button.dataset.by) }));
}
$("without").addEventListener("change", () => choose({ without: $("without").checked }));
$("direction").addEventListener("change", () => choose({ direction: $("direction").value }));
$("help-button").addEventListener("click", () => $("help").showModal());
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", readAddress);
window.addEventListener("resize", drawMaps);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
for (const radio of document.querySelectorAll("[name=theme]")) radio.addEventListener("change", show);
window.heedful = { about, state, choose, row, column, does, arrayOf };
readAddress();
