// What the page holds: names and text as JSON, arrays as bytes that are read when first asked for.
const $ = (id) => document.getElementById(id);
const about = JSON.parse($("about").textContent);
const T = about.tokens.length, layers = about.layers, NOBODY = 0xffff;
const KINDS = { uint16: Uint16Array, float32: Float32Array, float16: Uint16Array };
const decoded = new Map();

function bytesOf(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

function halves(bits) {
  const out = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) {
    const b = bits[i], sign = b & 0x8000 ? -1 : 1, exponent = (b >> 10) & 31, part = b & 1023;
    if (exponent === 31) out[i] = part ? NaN : sign * Infinity;
    else if (exponent === 0) out[i] = sign * part * 2 ** -24;
    else out[i] = sign * (1 + part / 1024) * 2 ** (exponent - 15);
  }
  return out;
}

// {shape, data} of an array by its name, or null where the page has none.
function arrayOf(name) {
  if (!(name in about.arrays)) return null;
  if (!decoded.has(name)) {
    const [number, kind, shape] = about.arrays[name];
    let data = new KINDS[kind](bytesOf($("a" + number).textContent).buffer);
    if (kind === "float16") data = halves(data);
    decoded.set(name, { shape, data });
  }
  return decoded.get(name);
}

const state = { layer: 0, head: 0, token: T - 1, before: 0, after: 0, without: false, direction: "to" };
const here = () => layers[state.layer];
const lastMap = (layer) => layer.maps.length - 1;
const ofMap = (map, name, layer = here()) => arrayOf(`${layer.index}/${map}/${name}`);
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// What a row's shares are multiplied with: one, or so that those without the first token add up to as much.
const scaleOf = (left, total) => (!state.without ? 1 : left > 1e-6 ? total / left : 0);

// The largest entries of one row, with the first token or without: {keys, values, rest}.
function row(map, head, token, layer = here()) {
  const keys = ofMap(map, "keys", layer), shares = ofMap(map, "shares", layer), k = keys.shape[2];
  const start = (head * T + token) * k, at = head * T + token;
  const left = ofMap(map, "rest", layer).data[at], total = left + Math.abs(ofMap(map, "first", layer).data[at]);
  const scale = scaleOf(left, total);
  const found = { keys: [], values: [], rest: 0, total };
  let seen = 0;
  for (let i = start; i < start + k; i++) {
    const key = keys.data[i];
    if (key === NOBODY || (state.without && key === 0)) continue;
    found.keys.push(key);
    found.values.push(shares.data[i] * scale);
    seen += Math.abs(shares.data[i] * scale);
  }
  found.rest = total > 0 && scale > 0 ? Math.max(0, 1 - seen / total) : 0;
  return found;
}

// What of every row goes to one token: the same, for a column; only what is among a row's largest.
function column(map, head, token) {
  const keys = ofMap(map, "keys"), shares = ofMap(map, "shares"), k = keys.shape[2];
  const rests = ofMap(map, "rest").data, firsts = ofMap(map, "first").data;
  const found = [];
  for (let i = 0; i < T; i++) {
    const start = (head * T + i) * k, at = head * T + i;
    for (let s = start; s < start + k; s++) {
      if (keys.data[s] !== token || (state.without && token === 0)) continue;
      const scale = scaleOf(rests[at], rests[at] + Math.abs(firsts[at]));
      if (scale) found.push([i, shares.data[s] * scale]);
    }
  }
  found.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
  return { keys: found.map((x) => x[0]), values: found.map((x) => x[1]), rest: 0, total: 1 };
}

const selected = (map) => (state.direction === "to" ? row : column)(map, state.head, state.token);

const GLYPHS = { " ": "␣", "\n": "↵", "\r": "↲", "\t": "⇥" };
function visible(text) {
  return text === "" ? "∅" : text.replace(/[\s\p{C}]/gu, (c) => GLYPHS[c] ?? "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));
}

const percent = (x) => (Math.abs(x) < 0.0005 && x !== 0 ? (x < 0 ? "−" : "") + "<0.1 %" : (100 * x).toFixed(1).replace("-", "−") + " %");

function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// A colour of the style sheet as the browser resolves it, for canvases.
function colour(name) {
  const probe = $("tokens");
  const before = probe.style.color;
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.style.color = before;
  return found;
}
