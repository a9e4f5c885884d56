// Draw the mask, and zoom into it. The data are the bands of the mask and the pieces of the layout, not pixels. Every view
// is computed from them, so that a single pair of a million tokens can be seen.
//
//   band [q0, q1, k0, k1, lo, hi]     queries q0 … q1-1 see the keys k0 … k1-1 with lo <= key - query <= hi
//   piece [owner, start, size, step]  a rank owns the tokens start, start + step, …

const CELLS = 640;       // of a side, at most; in a larger view a cell shows the token in its middle
const LEAST_TOKENS = 8;  // of a side, at the highest zoom
const GRID_TOKENS = 80;  // with fewer, lines between the tokens are drawn
const MASK_LEFT = 24 + 8 * Math.max(4, whole(data.mask.queries).length), MASK_TOP = 24, MASK_RIGHT = 14, STRIP = 8;

const drawn = data.drawings.mask;
const wholeView = [0, data.mask.queries, 0, data.mask.keys];
let view = wholeView;

// Return a function from a token to the rank that owns it.
function ownerFunction(pieces) {
  const striped = pieces.some(([, , size, step]) => size > 1 && step > 1);
  if (striped) {
    return (token) => pieces.find(([, start, size, step]) =>
      token >= start && (token - start) % step === 0 && token < start + size * step)[0];
  }
  const sorted = [...pieces].sort((a, b) => a[1] - b[1]);
  return (token) => {
    let low = 0, high = sorted.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (sorted[middle][1] <= token) low = middle; else high = middle - 1;
    }
    return sorted[low][0];
  };
}
const ownerOfQuery = ownerFunction(drawn.q_pieces), ownerOfKey = ownerFunction(drawn.k_pieces);

// Return the token in the middle of each cell of a side.
function tokensOf(start, stop) {
  const length = stop - start, cells = Math.min(length, CELLS);
  return Array.from({ length: cells }, (_, n) => start + Math.floor(((2 * n + 1) * length) / (2 * cells)));
}

// Return the index of the first of sorted numbers that is at least x.
function firstAtLeast(sorted, x) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle + 1; else high = middle;
  }
  return low;
}

// Call onRun(row, start, stop) for the runs of cells that are visible. A run narrower than a cell is drawn as one cell.
function visibleRuns([, , k0, k1], queries, columns, onRun) {
  const length = k1 - k0;
  for (const [bandQ0, bandQ1, bandK0, bandK1, lo, hi] of drawn.bands) {
    const last = firstAtLeast(queries, bandQ1);
    for (let row = firstAtLeast(queries, bandQ0); row < last; row += 1) {
      const from = Math.max(bandK0, queries[row] + lo, k0), to = Math.min(bandK1 - 1, queries[row] + hi, k1 - 1);
      if (from > to) continue;
      const start = Math.floor(((from - k0) * columns) / length);
      onRun(row, start, Math.max(start + 1, Math.ceil(((to + 1 - k0) * columns) / length)));
    }
  }
}

const rgbOfRank = new Map();
function rgb(rank) {
  if (!rgbOfRank.has(rank)) {
    const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
    pen.fillStyle = rankColour(rank);
    pen.fillRect(0, 0, 1, 1);
    rgbOfRank.set(rank, pen.getImageData(0, 0, 1, 1).data);
  }
  return rgbOfRank.get(rank);
}

// Fill the cells of the view: in the full colour of the query's rank where it owns the key, else pale. Return their number.
function paintCells(cell, queries, q_owner, keys, k_owner) {
  const image = cell.createImageData(keys.length, queries.length), pixels = image.data;
  let cells = 0;
  visibleRuns(view, queries, keys.length, (row, start, stop) => {
    const [r, g, b] = rgb(q_owner[row]);
    for (let column = start; column < stop; column += 1) {
      const at = 4 * (row * keys.length + column);
      if (!pixels[at + 3]) cells += 1;
      pixels[at] = r;
      pixels[at + 1] = g;
      pixels[at + 2] = b;
      pixels[at + 3] = k_owner[column] === q_owner[row] ? 255 : 107;
    }
  });
  cell.putImageData(image, 0, 0);
  return cells;
}

function bandAt(query, key) {
  return drawn.bands.find(([q0, q1, k0, k1, lo, hi]) =>
    q0 <= query && query < q1 && k0 <= key && key < k1 && lo <= key - query && key - query <= hi);
}

function gridLines(pen, side, count, isRow) {
  pen.beginPath();
  for (let n = 1; n < count; n += 1) {
    const at = (n * side) / count;
    pen.moveTo(MASK_LEFT + (isRow ? 0 : at), MASK_TOP + (isRow ? at : 0));
    pen.lineTo(MASK_LEFT + (isRow ? side : at), MASK_TOP + (isRow ? at : side));
  }
  pen.stroke();
}

function maskLabels(pen, side) {
  const [q0, q1, k0, k1] = view, exact = Math.max(q1 - q0, k1 - k0) < 100_000 && view !== wholeView;
  const words = exact ? whole : rounded;
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const q = Math.round(q0 + part * (q1 - q0)), k = Math.round(k0 + part * (k1 - k0));
    label(pen, words(q), MASK_LEFT - STRIP - 6, MASK_TOP + ((q - q0) / (q1 - q0)) * side, "right");
    const at = part === 0 ? "left" : part === 1 ? "right" : "center";
    label(pen, words(k), MASK_LEFT + ((k - k0) / (k1 - k0)) * side, 6, at);
  }
}

function drawMask() {
  const [q0, q1, k0, k1] = view;
  const { element, pen, width } = canvas("mask", (w) => w - MASK_LEFT - MASK_RIGHT + MASK_TOP + 14);
  const side = width - MASK_LEFT - MASK_RIGHT;
  const queries = tokensOf(q0, q1), keys = tokensOf(k0, k1);
  const q_owner = queries.map(ownerOfQuery), k_owner = keys.map(ownerOfKey);
  pen.fillStyle = colour("paper");
  pen.fillRect(MASK_LEFT, MASK_TOP, side, side);
  let cells = 0;
  stretch(pen, keys.length, queries.length, MASK_LEFT, MASK_TOP, side, side, (cell) => {
    cells = paintCells(cell, queries, q_owner, keys, k_owner);
  });
  const paint = (cell, owner, place) => owner.forEach((rank, n) => {
    cell.fillStyle = rankColour(rank);
    cell.fillRect(...place(n), 1, 1);
  });
  stretch(pen, 1, queries.length, MASK_LEFT - STRIP - 2, MASK_TOP, STRIP, side, (cell) => paint(cell, q_owner, (n) => [0, n]));
  stretch(pen, keys.length, 1, MASK_LEFT, MASK_TOP - STRIP - 2, side, STRIP, (cell) => paint(cell, k_owner, (n) => [n, 0]));
  pen.strokeStyle = colour("line");
  if (q1 - q0 <= GRID_TOKENS) gridLines(pen, side, q1 - q0, true);
  if (k1 - k0 <= GRID_TOKENS) gridLines(pen, side, k1 - k0, false);
  pen.strokeRect(MASK_LEFT - 0.5, MASK_TOP - 0.5, side + 1, side + 1);
  maskLabels(pen, side);
  byId("view").textContent = `queries ${whole(q0)}–${whole(q1 - 1)}, keys ${whole(k0)}–${whole(k1 - 1)}`;
  byId("coarse").textContent = drawn.note;
  byId("zoom-in").disabled = Math.max(q1 - q0, k1 - k0) <= LEAST_TOKENS;
  byId("zoom-out").disabled = byId("zoom-whole").disabled = view === wholeView;
  hover(element, (x, y) => {
    const row = Math.floor(((y - MASK_TOP) * queries.length) / side);
    const column = Math.floor(((x - MASK_LEFT) * keys.length) / side);
    return row in queries && column in keys ? describePair(queries[row], keys[column]) : null;
  });
  return cells;
}

// Return the text for a pair: who owns it, the band that contains it, and the work of its rank.
function describePair(query, key) {
  const rank = ownerOfQuery(query), area = drawn.areas[rank], band = bandAt(query, key);
  const words = [`query ${whole(query)} of rank ${rank}, key ${whole(key)} of rank ${ownerOfKey(key)}`];
  if (band) {
    const [q0, q1, k0, k1, lo, hi] = band;
    words.push(`band: queries ${whole(q0)}–${whole(q1 - 1)}, keys ${whole(k0)}–${whole(k1 - 1)}, ` +
      `${whole(lo)} ≤ key − query ≤ ${whole(hi)}`);
  } else words.push("not visible");
  words.push(`rank ${rank}: ${whole(area)} pairs, ${((100 * area) / data.mask.area).toPrecision(3)}% of all`);
  return words.join("\n");
}

// -- zoom ---------------------------------------------------------------------------------------------------------------

// Show a range of queries and keys: whole numbers, inside the mask.
function showView(q0, q1, k0, k1) {
  const side = (start, stop, length) => {
    const size = Math.min(length, Math.max(LEAST_TOKENS, Math.round(stop - start)));
    const first = Math.min(Math.max(0, Math.round(start)), length - size);
    return [first, first + size];
  };
  const next = [...side(q0, q1, data.mask.queries), ...side(k0, k1, data.mask.keys)];
  view = next.every((n, i) => n === wholeView[i]) ? wholeView : next;
  byId("mask").dataset.drawn = drawMask();
}

// Zoom by a factor around a point of the view, given as fractions of its width and height.
function zoom(factor, x = 0.5, y = 0.5) {
  const [q0, q1, k0, k1] = view, q = q0 + y * (q1 - q0), k = k0 + x * (k1 - k0);
  showView(q - (q - q0) / factor, q + (q1 - q) / factor, k - (k - k0) / factor, k + (k1 - k) / factor);
}

function move(right, down) {
  const [q0, q1, k0, k1] = view, dq = down * (q1 - q0), dk = right * (k1 - k0);
  const step = (d) => (d > 0 ? Math.ceil(d) : Math.floor(d));
  showView(q0 + step(dq), q1 + step(dq), k0 + step(dk), k1 + step(dk));
}

function listenToMask() {
  const element = byId("mask");
  const place = (event) => {
    const box = element.getBoundingClientRect(), side = box.width - MASK_LEFT - MASK_RIGHT;
    return [(event.clientX - box.left - MASK_LEFT) / side, (event.clientY - box.top - MASK_TOP) / side];
  };
  const keyActions = {
    "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(0.5),
    0: () => showView(...wholeView), Home: () => showView(...wholeView),
    ArrowLeft: () => move(-0.25, 0), ArrowRight: () => move(0.25, 0),
    ArrowUp: () => move(0, -0.25), ArrowDown: () => move(0, 0.25),
  };
  element.addEventListener("keydown", (event) => {
    if (!(event.key in keyActions) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keyActions[event.key]();
  });
  element.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== element) return;
    event.preventDefault();
    zoom(2 ** (-Math.sign(event.deltaY) / 2), ...place(event));
  }, { passive: false });
  element.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 0.5 : 2, ...place(event)));
  let from = null;
  element.addEventListener("pointerdown", (event) => {
    from = { at: place(event), view };
    element.setPointerCapture(event.pointerId);
  });
  element.addEventListener("pointermove", (event) => {
    if (!from) return;
    const [x, y] = place(event), [q0, q1, k0, k1] = from.view;
    const dq = (from.at[1] - y) * (q1 - q0), dk = (from.at[0] - x) * (k1 - k0);
    showView(q0 + dq, q1 + dq, k0 + dk, k1 + dk);
  });
  for (const end of ["pointerup", "pointercancel"]) element.addEventListener(end, () => { from = null; });
  byId("zoom-in").onclick = () => zoom(2);
  byId("zoom-out").onclick = () => zoom(0.5);
  byId("zoom-whole").onclick = () => showView(...wholeView);
  const showLinkedView = () => {
    const found = /^#mask=(\d+),(\d+),(\d+),(\d+)$/.exec(location.hash);
    if (found) showView(...found.slice(1).map(Number));
  };
  window.addEventListener("hashchange", showLinkedView);
  showLinkedView();
}
