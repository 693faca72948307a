// The page of a look. Tokens are only ever text nodes, or drawn: nothing here can turn text into HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const T = data.tokens.length;
const EXACT_SIDE = 1024; // Wider windows of heads that are exact by q and k show their picture: it is there at once.
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

const state = { layer: data.chosen[0], head: data.chosen[1], i: T - 1, j: T - 1, top: 0, left: 0, side: T };

// ------------------------------------------------------------------------------------------------ numbers

function bytes(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer;
}

const HALVES = Float32Array.from({ length: 65536 }, (_, bits) => {
  const sign = bits >> 15 ? -1 : 1;
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
});

const heads = new Map();

/** What is known of a head: `log(i, j)`, the ln of an exact weight, or only `picture`, the largest of each block. */
function known(layer, head) {
  const name = `${layer},${head}`;
  if (!heads.has(name)) heads.set(name, { picture: picture(layer, head), ...exact(data.exact[name]) });
  return heads.get(name);
}

function picture(layer, head) {
  const text = data.pictures[layer * data.heads.length + head];
  return text && new Uint8Array(bytes(text));
}

function exact(parts) {
  if (!parts) return {};
  const [logs, v, z] = [parts.logs, parts.v, parts.z].map((text) => new Float32Array(bytes(text)));
  if (parts.weights) {
    const halves = new Uint16Array(bytes(parts.weights));
    return { logs, v, z, cheap: true, log: (i, j) => HALVES[halves[(i * (i + 1)) / 2 + j]] };
  }
  const [q, k] = [parts.q, parts.k].map((text) => new Float32Array(bytes(text)));
  const d = data.size;
  const score = (i, j) => {
    let sum = 0;
    for (let c = 0; c < d; c++) sum += q[i * d + c] * k[j * d + c];
    return sum / Math.sqrt(d);
  };
  return { logs, v, z, log: (i, j) => score(i, j) - logs[i] };
}

/** The weight of a cell, or the largest weight of its block where only that is known. */
function weight(one, i, j) {
  if (j > i) return 0;
  return one.log ? Math.exp(one.log(i, j)) : blockWeight(one, i, j);
}

function blockWeight(one, i, j) {
  const side = Math.ceil(T / data.block);
  return (one.picture[Math.floor(i / data.block) * side + Math.floor(j / data.block)] / 255) ** 2;
}

// ------------------------------------------------------------------------------------------------ all heads

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function numbersOf(layer, head) {
  const of = (name) => data.statistics[name][layer][head].toFixed(2);
  return `entropy ${of("entropy")} nats · on the first token ${of("first")}, the previous ${of("previous")}, itself ${of("itself")}, induction ${of("induction")}`;
}

function buildGrid() {
  const names = element("tr", "");
  names.append(element("th", "layer"), ...data.heads.map((head) => element("th", head, { scope: "col" })));
  const rows = data.layers.map((layer, i) => {
    const row = element("tr", "");
    row.append(element("th", layer, { scope: "row" }), ...data.heads.map((head, j) => gridCell(layer, head, i, j)));
    return row;
  });
  $("grid").append(element("thead", ""), element("tbody", ""));
  $("grid").tHead.append(names);
  $("grid").tBodies[0].append(...rows);
}

function gridCell(layer, head, i, j) {
  const kind = data.kinds[i][j];
  const button = element("button", data.letters[kind], {
    type: "button", "data-at": `${i},${j}`, title: `layer ${layer}, head ${head}: ${numbersOf(i, j)}`,
    "aria-label": `layer ${layer}, head ${head}${kind && `, ${kind}`}`,
  });
  const full = 1 - Math.min(1, data.statistics.share[i][j]);
  button.style.background = `color-mix(in srgb, var(--q) ${Math.round(100 * full)}%, var(--raised))`;
  button.style.color = full > 0.5 ? "var(--paper)" : "var(--ink)";
  button.addEventListener("click", () => choose(i, j));
  const cell = element("td", "");
  cell.append(button);
  return cell;
}

function choose(layer, head) {
  Object.assign(state, { layer: clamp(layer, data.layers.length), head: clamp(head, data.heads.length) });
  show();
}

function showGrid() {
  for (const button of $("grid").querySelectorAll("button")) {
    const here = button.dataset.at === `${state.layer},${state.head}`;
    button.ariaPressed = String(here);
    button.tabIndex = here ? 0 : -1;
  }
}

const clamp = (number, count) => Math.max(0, Math.min(count - 1, number));

// ------------------------------------------------------------------------------------------------ one head's map

const map = $("map");

/** Where the cells are within the canvas, in CSS pixels. */
function frame() {
  const width = map.clientWidth;
  const edge = Math.min(96, width / 4);
  return { edge, size: width - edge, cell: (width - edge) / state.side };
}

function drawMap() {
  const { edge, size, cell } = frame();
  const ratio = window.devicePixelRatio || 1;
  [map.width, map.height] = [Math.round((edge + size) * ratio), Math.round((edge + size) * ratio)];
  map.style.height = `${edge + size}px`;
  map.dataset.edge = edge;
  const pen = map.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => {
    pen.fillStyle = resolved(`--${name}`);
    return pen.fillStyle;
  };
  pen.scale(ratio, ratio);
  pen.fillStyle = colour("raised");
  pen.fillRect(edge, edge, size, size);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(cells(colour("q")), edge, edge, size, size);
  pen.strokeStyle = colour("k");
  pen.lineWidth = 1.5;
  const [x, y] = [edge + (state.j - state.left) * cell, edge + (state.i - state.top) * cell];
  if (inWindow(state.i, state.top)) pen.strokeRect(edge, y, size, Math.max(cell, 2));
  if (inWindow(state.i, state.top) && inWindow(state.j, state.left)) {
    pen.strokeRect(x - 1, y - 1, Math.max(cell, 3) + 2, Math.max(cell, 3) + 2);
  }
  pen.font = `${Math.max(9, Math.min(13, cell))}px ${style.fontFamily}`;
  pen.textBaseline = "middle";
  drawLabels(pen, state.top, state.i, colour);
  pen.translate(0, edge);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "left";
  drawLabels(pen, state.left, state.j, colour, true);
}

const inWindow = (at, first) => at >= first && at < first + state.side;

/** A colour as the canvas takes it: light-dark() is only resolved on an element. */
function resolved(name) {
  map.style.color = `var(${name})`;
  return getComputedStyle(map).color;
}

/** Tokens beside the cells: all of them, or as many as there is room for, and always the chosen one. */
function drawLabels(pen, first, chosen, colour, above = false) {
  const { edge, cell } = frame();
  const every = Math.ceil(11 / cell);
  for (let n = 0; n < state.side; n++) {
    const at = first + n;
    if (at !== chosen && (n % every || Math.abs(at - chosen) * cell < 11)) continue;
    pen.fillStyle = colour(at === chosen ? "k" : at < data.prompt ? "ink" : "v");
    const place = Math.min(edge + (n + 0.5) * cell, edge + state.side * cell - 7);
    const text = fitted(pen, data.tokens[at], edge - 8);
    if (above) pen.fillText(text, 4, place);
    else pen.fillText(text, edge - 4 - pen.measureText(text).width, place);
  }
}

function fitted(pen, text, width) {
  const characters = [...text];
  while (characters.length > 1 && pen.measureText(characters.join("")).width > width) characters.pop();
  return characters.length < [...text].length ? `${characters.slice(0, -1).join("")}…` : text;
}

/** The window as pixels, one a weight, or one a block: a colour whose opacity is √weight. */
function cells(colour) {
  const one = known(state.layer, state.head);
  const rough = !one.log || (!one.cheap && state.side > EXACT_SIDE / 2);
  const step = rough ? data.block : 1;
  const side = Math.ceil(state.side / step);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [side, side];
  const pen = canvas.getContext("2d");
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  const [red, green, blue] = pen.getImageData(0, 0, 1, 1).data;
  const image = pen.createImageData(side, side);
  const value = rough ? blockWeight : weight;
  for (let y = 0; y < side; y++) {
    for (let x = 0; x < side; x++) {
      const [i, j] = [Math.min(T - 1, state.top + y * step), Math.min(T - 1, state.left + x * step)];
      image.data.set([red, green, blue, 255 * Math.sqrt(value(one, i, j))], 4 * (y * side + x));
    }
  }
  pen.putImageData(image, 0, 0);
  return canvas;
}

/** Shows `side` tokens each way, with the chosen cell among them. */
function zoom(side) {
  const width = Math.max(Math.min(8, T), Math.min(T, Math.round(side)));
  const first = (at) => Math.max(0, Math.min(T - width, at - Math.floor(width / 2)));
  Object.assign(state, { side: width, top: first(state.i), left: first(state.j) });
  show();
}

function select(i, j) {
  [state.i, state.j] = [clamp(i, T), clamp(j, T)];
  const moved = (first, at) => Math.max(Math.min(first, at), at - state.side + 1);
  Object.assign(state, { top: moved(state.top, state.i), left: moved(state.left, state.j) });
  show();
}

/** The key that the row's token takes most from. */
function selectStrongest() {
  const one = known(state.layer, state.head);
  const weights = Array.from({ length: state.i + 1 }, (_, j) => weight(one, state.i, j));
  state.j = weights.indexOf(Math.max(...weights));
}

function pointed(event) {
  const { edge, cell } = frame();
  const box = map.getBoundingClientRect();
  const at = (distance, first) => first + clamp(Math.floor((distance - edge) / cell), state.side);
  select(at(event.clientY - box.top, state.top), at(event.clientX - box.left, state.left));
}

// ------------------------------------------------------------------------------------------------ one cell's numbers

const digits = (number) => (Math.abs(number) >= 1e-3 || number === 0 ? number.toFixed(4) : number.toExponential(2));
const quoted = (at) => `“${data.tokens[at]}”`;

function showCell() {
  const { i, j } = state;
  const one = known(state.layer, state.head);
  $("cell").textContent = `${quoted(i)} (${i}) takes from ${quoted(j)} (${j})`;
  $("formula").replaceChildren(...formula(one, i, j).flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
  const found = one.log ? Array.from({ length: i + 1 }, (_, at) => [weight(one, i, at), at]) : [];
  found.sort((a, b) => b[0] - a[0]);
  $("taken").textContent = found.length ? `What ${quoted(i)} takes most from` : "";
  $("top").replaceChildren(...found.slice(0, 10).map(topRow));
}

function topRow([share, at]) {
  const row = element("li", "");
  row.append(element("b", share.toFixed(4)), element("span", `${data.tokens[at]} (${at})`));
  row.append(element("meter", "", { value: share, "aria-label": `weight of position ${at}` }));
  return row;
}

function formula(one, i, j) {
  if (!one.log) return roughly(one, i, j);
  if (j > i) return [["mask", `position ${j} comes after ${i}: its score is −∞, its weight 0`]];
  const log = one.log(i, j);
  const score = log + one.logs[i];
  const share = Math.exp(log);
  return [
    ["score ⟨q, k⟩ / √d", `${digits(score * Math.sqrt(data.size))} / √${data.size} = ${digits(score)}`],
    ["mask", `${j} ≤ ${i}: stays`],
    ["softmax e^s / Σ e^s", `e^(${digits(score)} − ${digits(one.logs[i])}) = ${digits(share)}; ${digits(one.logs[i])} is ln Σ e^s over the ${i + 1} positions up to ${i}`],
    ["weight · v", `${digits(share)} · ‖v‖ ${digits(one.v[j])} = ${digits(share * one.v[j])} is this cell's part of the sum`],
    ["z = Σ weight · v", `‖z‖ = ${digits(one.z[i])}`],
  ];
}

function roughly(one, i, j) {
  const first = (at) => at - (at % data.block);
  const span = (at) => `${first(at)} to ${Math.min(T, first(at) + data.block) - 1}`;
  const exact = Object.keys(data.exact).map((name) => name.split(",").map(Number));
  return [
    ["largest weight nearby", `${blockWeight(one, i, j).toFixed(2)}: rows ${span(i)}, columns ${span(j)}`],
    ["exact numbers", `for so long a text they are in this file for: ${exact.map(([at, head]) => `layer ${data.layers[at]} head ${data.heads[head]}`).join(", ")}. Others: qkv look --layer --head`],
  ];
}

// ------------------------------------------------------------------------------------------------ all together

function show() {
  const { layer, head, i, top, left, side } = state;
  $("head-title").textContent = `Layer ${data.layers[layer]}, head ${data.heads[head]}${data.kinds[layer][head] && `: ${data.kinds[layer][head]}`}`;
  $("head-numbers").textContent = numbersOf(layer, head);
  $("window").textContent = side < T ? `rows ${top} to ${top + side - 1}, columns ${left} to ${left + side - 1}` : `${T} tokens`;
  $("row").value = i;
  const made = i < data.prompt ? `prompt, ${i + 1} of ${data.prompt}` : `generated, ${i + 1 - data.prompt} of ${T - data.prompt}`;
  $("row-name").textContent = `${quoted(i)} · ${made}`;
  map.setAttribute("aria-label", `weights of layer ${data.layers[layer]}, head ${data.heads[head]}`);
  showGrid();
  showCell();
  drawMap();
}

function onMapKey(event) {
  const step = STEPS[event.key];
  if (step) select(state.i + step[0], state.j + step[1]);
  else if (event.key === "+" || event.key === "=") zoom(state.side / 2);
  else if (event.key === "-") zoom(state.side * 2);
  else return;
  event.preventDefault();
}

function onGridKey(event) {
  const step = STEPS[event.key];
  if (!step) return;
  event.preventDefault();
  choose(state.layer + step[0], state.head + step[1]);
  $("grid").querySelector("[tabindex='0']").focus();
}

buildGrid();
selectStrongest();
const generated = T - data.prompt;
$("about").textContent = `${T} tokens${generated ? `, ${generated} of them generated` : ""}` +
  (data.block > 1 ? ` · in wide views a cell is the largest weight of ${data.block} × ${data.block}` : "");
$("row").max = T - 1;
$("row").addEventListener("input", () => select(Number($("row").value), state.j));
$("closer").addEventListener("click", () => zoom(state.side / 2));
$("wider").addEventListener("click", () => zoom(state.side * 2));
$("whole").addEventListener("click", () => zoom(T));
$("grid").addEventListener("keydown", onGridKey);
map.addEventListener("keydown", onMapKey);
map.addEventListener("pointermove", pointed);
map.addEventListener("pointerdown", pointed);
map.addEventListener("dblclick", () => zoom(state.side / 2));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
new ResizeObserver(drawMap).observe(map.parentElement);
show();
