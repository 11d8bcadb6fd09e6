// The text, and beside it the row of the selected token.
const spans = [];
let shaded = [];

function makeText() {
  const place = $("tokens");
  about.tokens.forEach((token, i) => {
    const shown = element("span");
    shown.dataset.at = i;
    // White space as it is read; but a token of nothing else has to be seen.
    if (/^ +$/.test(token)) shown.append(token);
    else if (token.trim() === "") shown.append(element("span", { className: "ws" }, visible(token)));
    else shown.append(token.replace(/[^\S ]|\p{C}/gu, visible));
    spans.push(shown);
    place.append(shown);
    if (token.includes("\n")) place.append(document.createElement("br"));
  });
  place.addEventListener("click", (event) => {
    const found = event.target.closest("[data-at]");
    if (found) choose({ token: Number(found.dataset.at) });
  });
}

// Of each token: hidden so far (0 to 4), out of the cache, start of a group, in the token's group.
function marks() {
  const index = here().index, t = state.token;
  const since = arrayOf(`${index}/since`), gone = arrayOf(`${index}/gone`), groups = arrayOf(`${index}/groups`);
  const made = new Array(T).fill("");
  const selector = since ? Math.min(state.head, since.shape[1] - 1) : 0;
  for (let j = 0; j < T; j++) {
    const found = [];
    // Those on the other side can have nothing to do with it.
    if (about.causal && (state.direction === "to" ? j > t : j < t)) found.push("apart");
    if (!about.causal || j <= t) {
      if (since) {
        let level = 0;
        for (let l = 0; l < since.shape[0]; l++) {
          if (since.data[(l * since.shape[1] + selector) * T + j] <= t) level = l + 1;
        }
        if (level) found.push("h" + level);
      }
      if (gone && gone.data[j] <= t) found.push("out");
    }
    made[j] = found;
  }
  for (let g = 0; groups && g < groups.shape[0]; g++) {
    const start = groups.data[2 * g], end = groups.data[2 * g + 1];
    made[start].push("start");
    if (start <= t && t <= end) for (let j = start; j <= end; j++) made[j].push("mine");
  }
  return made;
}

function drawText() {
  const found = selected(state.after);
  const most = Math.max(1e-9, ...found.values.map(Math.abs));
  const classes = marks();
  for (const j of shaded) spans[j].style.removeProperty("--p");
  shaded = found.keys;
  found.keys.forEach((j, i) => {
    const value = found.values[i];
    spans[j].style.setProperty("--p", (8 + 72 * Math.sqrt(Math.abs(value) / most)).toFixed(0));
    classes[j].push(value < 0 ? "n" : "w");
  });
  classes[state.token].push("here");
  for (let j = 0; j < T; j++) {
    const text = classes[j].join(" ");
    if (spans[j].className !== text) spans[j].className = text;
  }
  const place = $("tokens"), box = spans[state.token].getBoundingClientRect(), frame = place.getBoundingClientRect();
  if (box.top < frame.top || box.bottom > frame.bottom) {
    place.scrollTop += box.top - frame.top - frame.height / 2;
  }
  drawLegend();
  drawRow();
}

function drawLegend() {
  const index = here().index, items = [["var(--blue)", state.direction === "to" ? "attended to" : "attends to it"]];
  if (selected(state.after).values.some((x) => x < 0)) items.push(["var(--orange)", "with a negative weight"]);
  const place = $("text-legend");
  place.replaceChildren(...items.map(([fill, text]) => {
    const made = element("i");
    made.style.background = fill;
    return element("span", {}, made, text);
  }));
  const sign = (name, text) => {
    const made = element("span", { className: name }, "abc");
    return element("span", {}, made, " " + text);
  };
  if (arrayOf(`${index}/since`)) place.append(sign("key-hidden", "partly masked by now"), sign("key-gone", "at most 1 % left"));
  if (arrayOf(`${index}/gone`)) place.append(sign("key-out", "no longer in the cache"));
  if (arrayOf(`${index}/groups`)) place.append(sign("key-group", "a group begins; underlined: this token's"));
}

function drawRow() {
  const layer = here(), t = state.token, to = state.direction === "to";
  const after = selected(state.after), pair = layer.maps.length > 1 && state.before !== state.after;
  const before = pair ? selected(state.before) : null;
  $("row-title").replaceChildren(`Token ${t} `, element("code", {}, visible(about.tokens[t])), to ? " attends to" : " is attended to by");
  const values = new Map(after.keys.map((key, i) => [key, [0, after.values[i]]]));
  const shown = after.keys.slice(0, 12);
  before?.keys.forEach((key, i) => {
    if (!values.has(key)) values.set(key, [0, null]);
    values.get(key)[0] = before.values[i];
  });
  // Also what was among the largest before, and no longer is.
  before?.keys.slice(0, 4).forEach((key) => { if (!shown.includes(key)) shown.push(key); });
  const most = Math.max(1e-9, ...shown.map((key) => Math.max(...values.get(key).map((x) => Math.abs(x ?? 0)))));
  const bar = (value, name) => {
    const made = element("i", { className: name + (value < 0 ? " minus" : "") });
    made.style.width = (100 * Math.abs(value ?? 0)) / most + "%";
    return made;
  };
  const head = element("tr", {}, element("th", {}, to ? "key" : "query"), element("th"), ...(pair ? [element("th", { className: "n" }, "before")] : []), element("th", { className: "n" }, pair ? "after" : "share"), element("th"));
  const lines = shown.map((key) => {
    const [was, is] = values.get(key);
    const line = element("tr", { title: "go to this token" },
      element("td", { className: "n" }, String(key)),
      element("td", { className: "tok" }, visible(about.tokens[key])),
      ...(pair ? [element("td", { className: "n" }, was ? percent(was) : "–")] : []),
      element("td", { className: "n" }, is === null ? "–" : percent(is)),
      element("td", { className: "two" }, ...(pair ? [bar(was, "was")] : []), ...(is === null ? [] : [bar(is, "")])));
    line.addEventListener("click", () => choose({ token: key }));
    return line;
  });
  $("row").replaceChildren(head, ...lines);
  const others = after.keys.length - after.keys.slice(0, 12).length;
  let text = "";
  if (!after.keys.length) text = state.without ? "Nothing but the first token." : "Nothing.";
  else if (to) text = `${others ? `${others} more are shaded in the text. ` : ""}What is not in this page holds ${percent(after.rest)} of the row.`;
  else text = `Of rows that have it among their ${about.keys} largest.`;
  if (pair) text += ` Grey: ${layer.maps[state.before]}, “–”: not among its largest.`;
  if (layer.logits[state.after] || (pair && layer.logits[state.before])) text += " Shares of logits are their softmax.";
  $("rest").textContent = text;
  drawFacts();
}

function drawFacts() {
  const index = here().index, t = state.token, lines = [];
  const fact = (name, ...text) => lines.push(element("p", {}, element("span", { className: "tag" }, name), element("span", {}, ...text)));
  const since = arrayOf(`${index}/since`);
  if (since) {
    const selector = Math.min(state.head, since.shape[1] - 1);
    const at = (l) => (l >= about.left.length ? -1 : since.data[(l * since.shape[1] + selector) * T + t]);
    const f = arrayOf(`${index}/hidden`).data[selector * T + t];
    // Of several bounds that are passed at once, the last says it all.
    const times = about.left.map((left, l) => [left, at(l)]).filter((x, l) => x[1] < T && x[1] !== at(l + 1));
    const left = percent(Math.exp(-f));
    if (!times.length) fact("hidden", f > 0 ? `hardly: ${left} of it is left at the end (F = ${f.toFixed(2)})` : "never");
    else fact("hidden", times.map(([left, from]) => `at most ${Math.round(100 * left)} % left since token ${from}`).join(", ") + `; at the end ${left} (F = ${f.toFixed(2)})`);
    const keys = arrayOf(`${index}/masks/keys`), amounts = arrayOf(`${index}/masks/amounts`), k = keys.shape[2];
    const masks = [];
    for (let i = (selector * T + t) * k; i < (selector * T + t + 1) * k; i++) {
      if (keys.data[i] !== NOBODY && amounts.data[i] > 0.005 && masks.length < 5) masks.push([keys.data[i], amounts.data[i]]);
    }
    fact("it masks", masks.length ? masks.map(([j, x]) => `${j} ${visible(about.tokens[j])} (+${x.toFixed(2)})`).join(", ") : "nothing");
  }
  const gone = arrayOf(`${index}/gone`);
  if (gone) {
    let count = 0;
    for (let j = 0; j <= t; j++) count += gone.data[j] > t;
    fact("cache", gone.data[t] < T ? `this token leaves with token ${gone.data[t]}` : "this token stays to the end", `; after it ${count} of ${t + 1} are cached`);
  }
  const groups = arrayOf(`${index}/groups`);
  if (groups) {
    const own = [];
    for (let g = 0; g < groups.shape[0]; g++) {
      if (groups.data[2 * g] <= t && t <= groups.data[2 * g + 1]) own.push(`${groups.data[2 * g]} to ${groups.data[2 * g + 1]}`);
    }
    fact("group", own.length ? `tokens ${own.slice(0, 6).join("; ")}` : "none", ` (${groups.shape[0]} groups)`);
  }
  $("facts").replaceChildren(...lines);
}
