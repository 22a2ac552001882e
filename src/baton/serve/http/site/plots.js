// Plots over time. All share one time axis: the same seconds are shown, a zoom into one zooms all, and so does hovering.
/* global uPlot */
import {time} from "./common.js";

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const resolved = new Map();
// Canvases know no CSS functions, so colours are resolved by an element. The cache is emptied when the scheme changes.
function canvasColor(name) {
  if (!resolved.has(name)) {
    const probe = document.createElement("span");
    probe.style.color = name.startsWith("--") ? color(name) : name;
    document.body.append(probe);
    resolved.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return resolved.get(name);
}

const plots = [];
const redraws = [];
const LEAST_SECONDS = 60;
export const view = {seconds: 300, zoom: null, now: 0, since: 0};
// The shown seconds: those zoomed into, or the latest ones as far as there are samples.
export const span = () => view.zoom ?? [Math.max(view.now - view.seconds, Math.min(view.since, view.now - LEAST_SECONDS)), view.now];

export function setWindow(seconds) { view.seconds = seconds; setZoom(null); }
function setZoom(zoom) { view.zoom = zoom; for (const plot of plots) plot.refresh(); for (const redraw of redraws) redraw(); }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { resolved.clear(); setZoom(view.zoom); });

// options: series [{label, color, dash, width, values}], format, limits() -> values with a dashed line, floor of the axis
export function timePlot(element, store, options) {
  const size = () => ({width: Math.max(200, element.clientWidth), height: 180});
  const axis = {stroke: () => canvasColor("CanvasText"), grid: {stroke: () => canvasColor("--line"), width: 1}, ticks: {stroke: () => canvasColor("--line"), width: 1}};
  const plot = new uPlot({
    ...size(),
    cursor: {sync: {key: "baton"}, drag: {x: true, y: false, setScale: false}},
    legend: {live: true},
    scales: {x: {time: true, range: () => span()}, y: {range: (_, low, high) => [0, Math.max(options.floor ?? 0, ...(options.limits?.() ?? []), high ?? 0) * 1.1 || 1]}},
    axes: [axis, {...axis, size: 62, values: (_, values) => values.map(options.format)}],
    series: [
      {label: "", value: (_, value) => value == null ? "" : time(value)},
      ...options.series.map(one => ({
        label: one.label, stroke: () => canvasColor(one.color), width: one.width ?? 1.5, dash: one.dash,
        spanGaps: true, points: {size: 4}, value: (_, value) => value == null ? "-" : options.format(value),
      })),
    ],
    hooks: {
      setSelect: [self => {
        if (self.select.width > 4) setZoom([self.posToVal(self.select.left, "x"), self.posToVal(self.select.left + self.select.width, "x")]);
        self.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
      }],
      draw: [self => { drawLimits(self, options.limits?.() ?? []); drawMarks(self, store.marks); }],
    },
  }, [store.times, ...options.series.map(one => store.column(one.values))], element);
  plot.over.addEventListener("dblclick", () => setZoom(null));
  new ResizeObserver(() => plot.setSize(size())).observe(element);
  plots.push({refresh: () => plot.setData([store.times, ...options.series.map(one => store.column(one.values))])});
}
export function refreshPlots() { for (const plot of plots) plot.refresh(); for (const redraw of redraws) redraw(); }

function drawLimits(plot, limits) {
  const {ctx, bbox} = plot;
  ctx.save(); ctx.strokeStyle = canvasColor("--bad"); ctx.setLineDash([6, 4]); ctx.lineWidth = devicePixelRatio;
  for (const limit of limits) {
    const y = plot.valToPos(limit, "y", true);
    ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
  }
  ctx.restore();
}
function drawMarks(plot, marks) {
  const {ctx, bbox} = plot, [from, to] = span();
  ctx.save(); ctx.strokeStyle = canvasColor("--muted"); ctx.setLineDash([2, 3]); ctx.lineWidth = devicePixelRatio;
  for (const mark of marks) if (mark.at >= from && mark.at <= to) {
    const x = plot.valToPos(mark.at, "x", true);
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
  }
  ctx.restore();
}

const LANES_MAX = 32, LANE = 30, LEFT = 110;
const LETTERS = {prefill: "P", decode: "D", mixed: "M"};
// One lane for each worker: a band in the colour of its role, as strong as it was busy, with a line for its batch.
export function lanes(canvas, readout, store) {
  const draw = () => {
    const names = store.workerNames().slice(0, LANES_MAX), width = canvas.clientWidth, height = names.length * LANE + 18, scale = devicePixelRatio;
    canvas.style.height = height + "px";
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) { canvas.width = width * scale; canvas.height = height * scale; }
    const ctx = canvas.getContext("2d"), [from, to] = span(), x = at => LEFT + (at - from) / (to - from) * (width - LEFT);
    ctx.setTransform(scale, 0, 0, scale, 0, 0); ctx.clearRect(0, 0, width, height);
    ctx.font = "12px system-ui, sans-serif"; ctx.textBaseline = "middle";
    const seen = store.samples.filter(sample => sample.unix_s >= from - 2 && sample.unix_s <= to + 2);
    const most = Math.max(1, ...seen.flatMap(sample => sample.workers.map(worker => worker.running)));
    names.forEach((name, row) => {
      const top = row * LANE + 2, band = LANE - 6;
      ctx.fillStyle = canvasColor("CanvasText"); ctx.fillText(name, 0, top + band / 2, LEFT - 22);
      let role = null; const line = [];
      for (const sample of seen) {
        const worker = sample.workers.find(each => each.id === name);
        if (!worker || worker.state !== "ready") { role = null; continue; }
        const end = x(sample.unix_s), start = Math.max(LEFT, x(sample.unix_s - sample.elapsed_s) - 0.5);
        if (end <= LEFT) continue;
        ctx.globalAlpha = 0.2 + 0.8 * worker.busy_ratio; ctx.fillStyle = canvasColor(`--${worker.role}`);
        ctx.fillRect(start, top, Math.max(1, end - start), band); ctx.globalAlpha = 1;
        if (worker.role !== role) { ctx.fillStyle = canvasColor("CanvasText"); ctx.fillText(LETTERS[worker.role] ?? "?", start + 3, top + band / 2); role = worker.role; }
        line.push([Math.min(end, width), top + band - worker.running / most * (band - 2) - 1]);
      }
      ctx.strokeStyle = canvasColor("CanvasText"); ctx.lineWidth = 1; ctx.beginPath();
      line.forEach(([px, py], place) => place ? ctx.lineTo(px, py) : ctx.moveTo(px, py)); ctx.stroke();
    });
    ctx.strokeStyle = canvasColor("--muted"); ctx.setLineDash([2, 3]); ctx.fillStyle = canvasColor("--muted");
    for (const mark of store.marks) if (mark.at >= from && mark.at <= to) { const px = x(mark.at); ctx.beginPath(); ctx.moveTo(px, 0); ctx.lineTo(px, height - 16); ctx.stroke(); }
    ctx.setLineDash([]); ctx.fillText(time(from), LEFT, height - 8); const last = time(to); ctx.fillText(last, width - ctx.measureText(last).width, height - 8);
  };
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect(), [from, to] = span();
    const at = from + (event.clientX - box.left - LEFT) / (box.width - LEFT) * (to - from);
    const sample = store.nearest(at), name = store.workerNames()[Math.floor((event.clientY - box.top) / LANE)], worker = sample?.workers.find(each => each.id === name);
    readout.textContent = worker ? `${time(sample.unix_s)}  ${name}: ${worker.role}, ${worker.state}, ${worker.running} running, ${worker.waiting} waiting, ${worker.steps} steps, busy ${Math.round(worker.busy_ratio * 100)} %` : "\u00a0";
  });
  new ResizeObserver(draw).observe(canvas.parentElement);
  redraws.push(draw);
}
