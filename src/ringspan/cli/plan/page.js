"use strict";
// Draws the report from the JSON beside it. Every drawing takes its colours from the style sheet and is drawn anew when the
// window or the scheme changes; all words go into the page as text, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const LABEL = "12px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const whole = (n) => n.toLocaleString("en-US");

function short(x) { return x >= 100 ? whole(Math.round(x)) : String(Number(x.toPrecision(3))); }
function seconds(x) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) if (x >= size) return short(x / size) + " " + unit;
  return x ? (x / 1e-6).toPrecision(2) + " µs" : "0 s";
}
function bytes(x) {
  for (const [unit, power] of [["TiB", 40], ["GiB", 30], ["MiB", 20], ["KiB", 10]])
    if (x >= 2 ** power) return short(x / 2 ** power) + " " + unit;
  return x + " B";
}
function ranks([start, stop]) { return stop - start === 1 ? "rank " + start : "ranks " + start + "–" + (stop - 1); }

// -- words and tables ---------------------------------------------------------------------------------------------------

function put(parent, tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  parent.append(made);
  return made;
}

function summary() {
  const { chosen, mask, shape, hardware } = data, share = Math.round(100 * chosen.share_of_kernel_speed);
  byId("title").textContent = `${chosen.strategy} on ${chosen.layout}`;
  byId("basis").textContent = "Figures are " + data.basis + ".";
  const facts = [
    ["forward and backward", seconds(chosen.seconds)],
    ["largest exposed time of a rank", seconds(chosen.exposed_s)],
    ["buffers, fullest rank", bytes(chosen.peak_bytes)],
    ["balance, busiest ÷ mean", chosen.balance.toFixed(3)],
    ["tokens/s through one layer's attention", short(chosen.tokens_per_s)],
    ["FLOP/s of a rank", `${short(chosen.flops_per_s_of_rank / 1e12)} T, ${share}% of the kernel's best`, "words"],
    ["speed-up over one rank", chosen.speedup === null ? "–" : short(chosen.speedup)],
    ["ranks", `${whole(data.world)} × ${hardware.name}, ${hardware.per_node} a node`, "words"],
    ["tokens", mask.queries === mask.keys ? whole(mask.queries) : `${whole(mask.queries)} × ${whole(mask.keys)}`],
    ["visible pairs", `${(100 * mask.share).toPrecision(3)}% of all`],
    ["mask", mask.name, "words"],
    ["tensors", `${shape.heads} heads, ${shape.kv_heads} key heads, head dim ${shape.head_dim}, ${shape.dtype}`, "words"],
  ];
  for (const [name, value, kind] of facts) {
    const box = put(byId("summary"), "div");
    put(box, "dt", name);
    put(box, "dd", value, kind);
  }
  for (const note of data.notes) put(byId("notes"), "li", note);
  byId("made").textContent = `ringspan ${data.ringspan}, plan ${chosen.digest}. The machine: ${hardware.source}.`;
}

function table(id, columns, rows, kindOf) {
  const head = put(put(byId(id), "thead"), "tr");
  for (const [name, , kind] of columns) put(head, "th", name, kind);
  const body = put(byId(id), "tbody");
  for (const row of rows) {
    const line = put(body, "tr", undefined, kindOf(row));
    for (const [, value, kind] of columns) put(line, "td", value(row), kind);
  }
}

function tables() {
  const known = (show, key) => (row) => (row[key] === null ? "–" : show(row[key]));
  table("candidates", [
    ["strategy", (c) => c.strategy, "words"], ["layout", (c) => c.layout, "words"],
    ["forward", known(seconds, "forward_s")], ["backward", known(seconds, "backward_s")],
    ["exposed", known(seconds, "exposed_s")], ["buffers", known(bytes, "peak_bytes")],
    ["figures", (c) => (c.exact === null ? "–" : c.exact ? "exact" : "sampled")],
    ["why not", (c) => c.rejected || "", "words reason"],
  ], data.candidates, (c) => (c === data.candidates[0] ? "chosen" : c.rejected ? "rejected" : ""));
  byId("fewer-title").textContent = `${whole(data.world)} ranks compared with fewer`;
  byId("fewer-section").hidden = !data.fewer_ranks.length;
  table("fewer", [
    ["ranks", (f) => whole(f.world)], ["forward and backward", known(seconds, "seconds")],
    [`speed-up of ${whole(data.world)}`, known(short, "speedup")], ["buffers", known(bytes, "peak_bytes")],
    ["fastest plan", (f) => f.rejected || `${f.strategy} on ${f.layout}`, "words"],
  ], data.fewer_ranks, (f) => (f.rejected ? "rejected" : ""));
  table("ranks", [
    ["rank", (r) => r.rank], ["queries", (r) => whole(r.queries)], ["keys", (r) => whole(r.keys)],
    ["work ÷ mean", (r) => r.work.toFixed(3)],
    ["computing", (r) => seconds(r.forward_computing_s + r.backward_computing_s)],
    ["exposed", (r) => seconds(r.exposed_s)],
    ["sent", (r) => bytes(r.sent_bytes)], ["received", (r) => bytes(r.received_bytes)], ["buffers", (r) => bytes(r.peak_bytes)],
  ], data.ranks, () => "");
}

// -- drawing ------------------------------------------------------------------------------------------------------------

function canvas(id, heightFor) {
  const element = byId(id), width = Math.max(280, element.clientWidth), height = heightFor(width);
  const ratio = window.devicePixelRatio || 1;
  element.width = Math.round(width * ratio);
  element.height = Math.round(height * ratio);
  element.style.height = height + "px";
  const pen = element.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = LABEL;
  pen.textBaseline = "middle";
  return { element, pen, width, height };
}

function hover(element, words) {
  const tip = byId("tip");
  element.onmousemove = (event) => {
    const box = element.getBoundingClientRect();
    const said = words(event.clientX - box.left, event.clientY - box.top);
    tip.hidden = !said;
    if (!said) return;
    tip.textContent = said;
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
  };
  element.onmouseleave = () => { tip.hidden = true; };
}

function label(pen, text, x, y, align, name) {
  pen.fillStyle = colour(name || "quiet");
  pen.textAlign = align;
  pen.fillText(text, x, y);
}

// Distinct for colour-blind readers. More ranks take colours of the colour wheel, alternately light and dark.
const BRIGHT = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377"];
function rankColour(rank) {
  return data.world <= BRIGHT.length ? BRIGHT[rank] : `hsl(${(360 * rank) / data.world} 60% ${42 + 16 * (rank % 2)}%)`;
}

// Draw cells of one pixel each into a small canvas and scale it to its size, so that there are no gaps between cells.
function stretch(pen, columns, rows, x, y, width, height, draw) {
  if (!columns || !rows) return;
  const small = document.createElement("canvas");
  small.width = columns;
  small.height = rows;
  draw(small.getContext("2d"));
  const grows = columns * 2 < width || rows * 2 < height;
  pen.imageSmoothingEnabled = !grows;
  pen.drawImage(small, x, y, width, height);
}

function rounded(n) { return n >= 1e6 ? short(n / 2 ** 20) + "Mi" : n >= 1e4 ? short(n / 2 ** 10) + "Ki" : whole(n); }

function drawTraffic() {
  const { from, to, bytes: sent } = data.drawings.traffic;
  const most = Math.max(1, ...sent.flat());
  const grouped = to[0][1] - to[0][0] > 1;
  byId("traffic-words").textContent = "Forward and backward together; a row sends to a column. " +
    (data.exact ? (grouped ? "Neighbouring ranks are drawn together. " : "") : "Rows are the ranks of the sample, columns all ranks. ") +
    (data.exact ? "Exact. " : "Exact for these rows. ") + `Darkest: ${bytes(most)}.`;
  const left = 56, top = 24, right = 14;
  const { element, pen, width } = canvas("traffic", (w) => w - left - right + top + 14);
  const side = width - left - right, cellW = side / to.length, cellH = side / from.length;
  pen.fillStyle = colour("paper");
  pen.fillRect(left, top, side, side);
  let cells = 0;
  sent.forEach((row, i) => row.forEach((value, j) => {
    if (!value) return;
    cells += 1;
    pen.fillStyle = `rgba(${colour("traffic")}, ${0.12 + 0.88 * Math.sqrt(value / most)})`;
    const gap = cellW > 6 ? 1 : 0;
    pen.fillRect(left + j * cellW, top + i * cellH, cellW - gap, cellH - gap);
  }));
  pen.strokeStyle = colour("line");
  pen.strokeRect(left - 0.5, top - 0.5, side + 1, side + 1);
  every(from.length, side).forEach((i) => label(pen, String(from[i][0]), left - 6, top + (i + 0.5) * cellH, "right"));
  every(to.length, side, 36).forEach((j) => label(pen, String(to[j][0]), left + (j + 0.5) * cellW, 12, "center"));
  hover(element, (x, y) => {
    const i = Math.floor((y - top) / cellH), j = Math.floor((x - left) / cellW);
    return i in from && j in to ? `${ranks(from[i])} → ${ranks(to[j])}: ${bytes(sent[i][j])}` : null;
  });
  return cells;
}

// The indices of the rows or columns that are labelled, so that labels are at least this many pixels apart.
function every(count, pixels, least = 16) {
  const step = Math.max(1, Math.ceil((count * least) / pixels));
  return Array.from({ length: Math.ceil(count / step) }, (_, n) => n * step);
}

function rowsOf() {
  const { rows, of_ranks } = data.drawings.timeline;
  const chosen = rows.map((row) => data.ranks[row]);
  const words = rows.length < of_ranks ? `Of every ${Math.round(of_ranks / rows.length)} neighbours, the one that finishes last. ` : "";
  return { chosen, words: words + (data.exact ? "" : "Ranks of the sample only. ") };
}

function timeAxis(pen, left, side, y, total) {
  pen.strokeStyle = colour("line");
  const rough = total / 6, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= rough);
  for (let t = 0; t <= total * 1.0001; t += step) {
    const x = left + (t / total) * side;
    label(pen, seconds(Number(t.toPrecision(6))), x, y + 12, x > left + side - 30 ? "right" : "center");
    pen.beginPath(); pen.moveTo(x, y); pen.lineTo(x, y + 4); pen.stroke();
  }
}

function drawLoad() {
  const { chosen, words } = rowsOf();
  const total = data.chosen.seconds, left = 78, tall = chosen.length > 32 ? 9 : 16, right = 14;
  byId("load-words").textContent = words + "One bar for each rank. All bars are as long as the time of the slowest rank.";
  const { element, pen, width } = canvas("load", () => chosen.length * tall + 30);
  const side = width - left - right;
  chosen.forEach((rank, n) => {
    let x = left;
    const part = (name, value) => {
      const size = (value / total) * side;
      pen.fillStyle = colour(name);
      pen.fillRect(x, n * tall + 1, size, tall - 2);
      x += size;
    };
    part("forward", rank.forward_computing_s);
    part("backward", rank.backward_computing_s);
    part("exposed", rank.exposed_s);
    part("idle", Math.max(0, ((left + side - x) / side) * total));
  });
  every(chosen.length, chosen.length * tall).forEach((n) =>
    label(pen, "rank " + chosen[n].rank, left - 6, (n + 0.5) * tall, "right"));
  timeAxis(pen, left, side, chosen.length * tall + 2, total);
  hover(element, (x, y) => {
    const rank = chosen[Math.floor(y / tall)];
    return rank ? `rank ${rank.rank}\ncomputing ${seconds(rank.forward_computing_s)} forward, ` +
      `${seconds(rank.backward_computing_s)} backward\nexposed ${seconds(rank.exposed_s)}\n` +
      `sent ${bytes(rank.sent_bytes)}, received ${bytes(rank.received_bytes)}` : null;
  });
  return chosen.length;
}

function drawTimeline() {
  const { forward, backward } = data.drawings.timeline, { chosen } = rowsOf();
  const total = data.chosen.seconds, left = 78, right = 14, tall = chosen.length > 32 ? 9 : 18;
  const { element, pen, width } = canvas("timeline", () => chosen.length * tall + 30);
  const side = width - left - right, at = (t) => left + (t / total) * side;
  const phases = [["forward", forward, 0], ["backward", backward, data.chosen.forward_s]];
  let steps = 0;
  for (const [name, rows, from] of phases) {
    rows.forEach((segments, n) => segments.forEach(([begin, computed, end]) => {
      if (end <= begin) return;
      steps += 1;
      pen.fillStyle = colour(name);
      const x = at(from + begin), middle = at(from + computed), gap = at(from + end) - x > 12 ? 1 : 0;
      pen.fillRect(x, n * tall + 1, Math.max(0, middle - x - gap), tall - 2);
      pen.fillStyle = colour("exposed");
      pen.fillRect(middle - gap, n * tall + 1, at(from + end) - middle, tall - 2);
    }));
  }
  pen.strokeStyle = colour("ink");
  pen.setLineDash([4, 3]);
  pen.beginPath(); pen.moveTo(at(data.chosen.forward_s), 0); pen.lineTo(at(data.chosen.forward_s), chosen.length * tall); pen.stroke();
  pen.setLineDash([]);
  every(chosen.length, chosen.length * tall).forEach((n) =>
    label(pen, "rank " + chosen[n].rank, left - 6, (n + 0.5) * tall, "right"));
  timeAxis(pen, left, side, chosen.length * tall + 2, total);
  hover(element, (x, y) => {
    const n = Math.floor(y / tall), t = ((x - left) / side) * total;
    if (!chosen[n] || t < 0) return null;
    for (const [name, rows, from] of phases) {
      const step = rows[n].findIndex(([begin, , end]) => from + begin <= t && t < from + end);
      if (step < 0) continue;
      const [begin, computed, end] = rows[n][step];
      return `rank ${chosen[n].rank}, ${name}, part ${step + 1} of ${rows[n].length}\nfrom ${seconds(from + begin)}: computing ` +
        `${seconds(computed - begin)}, then exposed ${seconds(end - computed)}`;
    }
    return `rank ${chosen[n].rank} is done`;
  });
  return steps;
}

