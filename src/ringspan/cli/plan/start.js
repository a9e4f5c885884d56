// The drawn data is stored where tests can read it.
function drawAll() {
  const drawn = { mask: drawMask(), traffic: drawTraffic(), load: drawLoad(), timeline: drawTimeline() };
  for (const [name, count] of Object.entries(drawn)) byId(name).dataset.drawn = count;
}

summary();
tables();
drawAll();
listenToMask();
let resizing;
window.addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(drawAll, 100); });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
