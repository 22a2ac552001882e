// Plots with zoom and hover. The dashboard loads this file; the pages of `baton sim`, `bench`, `replay` and `plan` contain it.
/* global uPlot */

const resolved = new Map();
// Canvases know no CSS functions, so colours are resolved by an element. The cache is emptied when the scheme changes.
function canvasColor(name) {
  if (!resolved.has(name)) {
    const probe = document.createElement("span");
    probe.style.color = name.startsWith("--") ? getComputedStyle(document.documentElement).getPropertyValue(name).trim() : name;
    document.body.append(probe);
    resolved.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return resolved.get(name);
}

// The horizontal axis of one or several plots: they show the same values, and a zoom into one zooms all.
// limits() -> the shown values without a zoom. words(value) -> text. isClock: values are Unix times. key: hovering is shared too.
export class Axis {
  constructor({limits, words, isClock = false, key = "", label = ""}) {
    Object.assign(this, {limits, words, isClock, key, label});
    this.zoom = null; this.plots = [];
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { resolved.clear(); this.refresh(); });
  }
  span() { return this.zoom ?? this.limits(); }
  refresh() { for (const plot of this.plots) plot(); }
  setZoom(zoom) { this.zoom = zoom; this.refresh(); }
  // Show a multiple of the shown range around a value, at most everything.
  scale(factor, around) {
    const [from, to] = this.span(), [first, last] = this.limits();
    const zoom = [around - (around - from) * factor, around + (to - around) * factor];
    this.setZoom(zoom[0] <= first && zoom[1] >= last ? null : [Math.max(first, zoom[0]), Math.min(last, zoom[1])]);
  }
  // Zoom by keys: + and -, and Escape for everything. at() -> the selected value. Returns whether the key was one of them.
  zoomByKey(key, at) {
    if (key === "+" || key === "=") this.scale(0.5, at()); else if (key === "-") this.scale(2, at()); else if (key === "Escape") this.setZoom(null); else return false;
    return true;
  }
}

const HINT = "; arrow keys move, + and - zoom, Escape shows everything";
function focusable(element, name) { element.tabIndex = 0; element.setAttribute("role", "group"); element.setAttribute("aria-label", name + HINT); element.title = "drag: zoom; double click: everything"; }

// Draw curves. columns() -> [xs, ...values of each series]. series: [{label, color, dash, width, isDots, names}]; names: texts of points.
// format(value) -> text. floor: least top of the vertical axis. limits() -> values with a dashed line across; marks() -> [{at, label}], with one down.
export function curves(element, axis, {columns, series, format, floor = 0, limits = () => [], marks = () => [], label = ""}) {
  const size = () => ({width: Math.max(200, element.clientWidth), height: 180});
  const look = {stroke: () => canvasColor("CanvasText"), grid: {stroke: () => canvasColor("--line"), width: 1}, ticks: {stroke: () => canvasColor("--line"), width: 1}, labelSize: 18, labelFont: "12px system-ui, sans-serif"};
  const plot = new uPlot({
    ...size(),
    padding: [8, 26, 0, 0],  // room for half of the last time
    cursor: {sync: axis.key ? {key: axis.key} : undefined, drag: {x: true, y: false, setScale: false}},
    legend: {live: true, markers: {stroke: (_, number) => series[number - 1] ? `var(${series[number - 1].color})` : null, dash: (_, number) => ({6: "dashed", 2: "dotted"})[series[number - 1]?.dash?.[0]] ?? "solid"}},
    scales: {x: {time: axis.isClock, range: () => axis.span()}, y: {range: (_, low, high) => [0, Math.max(floor, ...limits(), high ?? 0) * 1.1 || 1]}},
    axes: [
      {...look, ...(axis.label ? {label: axis.label} : {}), size: 32, space: 90, values: (_, values) => values.map(axis.words)},
      {...look, ...(label ? {label} : {}), size: 62, values: (_, values) => values.map(format)},
    ],
    series: [
      {label: axis.label || "at", value: (_, value) => value == null ? "" : axis.words(value)},
      ...series.map(one => ({
        label: one.label, stroke: () => canvasColor(one.color), width: one.width ?? 1.5, dash: one.dash,
        spanGaps: !axis.isClock, gaps: (self, _number, _from, _to, gaps) => gaps.filter(([from, to]) => self.posToVal(to, "x", true) - self.posToVal(from, "x", true) > GAP_S),
        ...(one.isDots ? {paths: () => null, points: {show: true, size: 8, fill: () => canvasColor(one.color)}} : {points: {size: 4, ...(axis.isClock ? {filter: lonePoints} : {})}}),
        value: (_, value, _series, place) => value == null ? "-" : format(value) + (one.names ? " " + one.names[place] : ""),
      })),
    ],
    hooks: {
      setSelect: [self => {
        if (self.select.width > 4) axis.setZoom([self.posToVal(self.select.left, "x"), self.posToVal(self.select.left + self.select.width, "x")]);
        self.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
      }],
      draw: [self => { drawLimits(self, limits()); drawMarks(self, marks(), axis.span()); }],
    },
  }, columns(), element);
  plot.over.addEventListener("dblclick", () => axis.setZoom(null));
  focusable(element, series.map(one => one.label).join(", "));
  element.addEventListener("keydown", event => {
    const xs = plot.data[0], [from, to] = axis.span(), place = plot.cursor.idx, step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (step) {
      const next = place == null ? xs.findLastIndex(x => x <= to) : place + step;
      if (xs[next] >= from && xs[next] <= to) plot.setCursor({left: plot.valToPos(xs[next], "x"), top: 1}, true, true);
    } else if (!axis.zoomByKey(event.key, () => xs[place] ?? (from + to) / 2)) return;
    event.preventDefault();
  });
  new ResizeObserver(() => plot.setSize(size())).observe(element);
  const show = () => { plot.setData(columns()); if (axis.isClock) queueMicrotask(() => showLast(plot)); element.dataset.span = axis.span().join(" "); };
  axis.plots.push(show); show();
}

const GAP_S = 15;
// The points that no line reaches, because no other value is near in time.
function lonePoints(plot, number, areShown) {
  if (areShown) return null;
  const xs = plot.data[0], known = [];
  plot.data[number].forEach((value, place) => { if (value != null) known.push(place); });
  const isFar = (one, other) => one === undefined || other === undefined || xs[other] - xs[one] > GAP_S;
  return known.filter((place, index) => isFar(known[index - 1], place) && isFar(place, known[index + 1]));
}
// Let the legend show the latest values while nothing is pointed at.
function showLast(plot) {
  if (plot.cursor.idx != null) return;
  const [xs, ...values] = plot.data, last = xs.findLastIndex((_, place) => values.some(column => column[place] != null));
  if (last >= 0) plot.setLegend({idxs: plot.data.map(() => last)});
}

function drawLimits(plot, limits) {
  const {ctx, bbox} = plot;
  ctx.save(); ctx.strokeStyle = canvasColor("--bad"); ctx.setLineDash([6, 4]); ctx.lineWidth = devicePixelRatio;
  for (const limit of limits) {
    const y = plot.valToPos(limit, "y", true);
    ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
  }
  ctx.restore();
}
function drawMarks(plot, marks, [from, to]) {
  const {ctx, bbox} = plot;
  ctx.save(); ctx.strokeStyle = ctx.fillStyle = canvasColor("--muted"); ctx.setLineDash([2, 3]); ctx.lineWidth = devicePixelRatio;
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`; ctx.textBaseline = "top";
  marks.filter(mark => mark.at >= from && mark.at <= to).forEach((mark, row) => {
    const x = plot.valToPos(mark.at, "x", true);
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    if (!mark.label) return;
    ctx.textAlign = x > bbox.left + bbox.width * 0.7 ? "right" : "left";
    ctx.fillText(mark.label, x + (ctx.textAlign === "left" ? 4 : -4) * devicePixelRatio, bbox.top + bbox.height - (14 * (row % 3) + 16) * devicePixelRatio);
  });
  ctx.restore();
}

const LEFT = 110, BOTTOM = 18, NAMED_HEIGHT = 12;
// Draw a lane for each row: bands over time, and a line. rows() -> [{name, bands, line}].
// bands: [{from, to, color, strength (0..1), letter, words}]; line: [[at, share of the height]]. readout: element for the words of the band below the pointer.
// hint() -> what it says while nothing is pointed at.
export function lanes(canvas, readout, axis, {rows, marks = () => [], height = 30, name, hint = () => "\u00a0"}) {
  let shown = [], chosen = null, dragged = null;
  const place = () => { const [from, to] = axis.span(), width = canvas.clientWidth - LEFT; return {x: at => LEFT + (at - from) / (to - from) * width, at: x => from + (x - LEFT) / width * (to - from), from, to}; };
  const draw = () => {
    shown = rows();
    const {x, from, to} = place(), width = canvas.clientWidth, whole = shown.length * height + BOTTOM, scale = devicePixelRatio;
    canvas.style.height = whole + "px";
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(whole * scale)) { canvas.width = width * scale; canvas.height = whole * scale; }
    const ctx = canvas.getContext("2d"), gap = Math.min(6, height / 4), band = height - gap;
    ctx.setTransform(scale, 0, 0, scale, 0, 0); ctx.clearRect(0, 0, width, whole);
    ctx.font = "12px system-ui, sans-serif"; ctx.textBaseline = "middle";
    shown.forEach((row, number) => {
      const top = number * height + gap / 3;
      ctx.fillStyle = canvasColor("CanvasText");
      if (height >= NAMED_HEIGHT) ctx.fillText(row.name, 0, top + band / 2, LEFT - 22);
      for (const each of row.bands) {
        const start = Math.max(LEFT, Math.round(x(each.from))), end = Math.min(width, Math.round(x(each.to)));
        if (end < LEFT || start >= width) continue;
        ctx.globalAlpha = 0.2 + 0.8 * (each.strength ?? 1); ctx.fillStyle = canvasColor(each.color);
        ctx.fillRect(start, top, Math.max(1, end - start), band); ctx.globalAlpha = 1;
      }
      ctx.save(); ctx.beginPath(); ctx.rect(LEFT, top, width - LEFT, band); ctx.clip();
      ctx.beginPath();
      (row.line ?? []).forEach(([at, share], point) => { const y = top + band - share * (band - 2) - 1; if (point) ctx.lineTo(x(at), y); else ctx.moveTo(x(at), y); });
      for (const [color, thick] of [["Canvas", 3], ["CanvasText", 1]]) { ctx.strokeStyle = canvasColor(color); ctx.lineWidth = thick; ctx.stroke(); }  // readable on every colour
      ctx.restore();
      for (const each of row.bands.filter(each => each.letter && each.to > from && each.from < to)) {  // above the bands, which may be narrower
        const start = Math.max(LEFT, Math.round(x(each.from)));
        ctx.fillStyle = canvasColor("Canvas"); ctx.fillRect(start + 1, top + 1, 15, band - 2);
        ctx.fillStyle = canvasColor("CanvasText"); ctx.fillText(each.letter, start + 4, top + band / 2);
      }
    });
    say();
    ctx.strokeStyle = ctx.fillStyle = canvasColor("--muted"); ctx.setLineDash([2, 3]);
    for (const mark of marks()) if (mark.at >= from && mark.at <= to) { const px = x(mark.at); ctx.beginPath(); ctx.moveTo(px, 0); ctx.lineTo(px, whole - BOTTOM + 2); ctx.stroke(); }
    ctx.setLineDash([]); ctx.fillText(axis.words(from), LEFT, whole - 8); const last = axis.words(to); ctx.fillText(last, width - ctx.measureText(last).width, whole - 8);
  };
  const say = () => {
    const row = chosen && shown[chosen.row], found = row?.bands.findLast(each => each.from <= chosen.at && chosen.at <= each.to);
    const {from, to} = place(), event = chosen && marks().find(mark => Math.abs(mark.at - chosen.at) < (to - from) / 100);
    readout.textContent = found || event ? [found && `${axis.words(chosen.at)}  ${row.name}: ${found.words}`, event?.text ?? event?.label].filter(Boolean).join("; ") : hint();
  };
  const pointed = event => { const box = canvas.getBoundingClientRect(); return {at: place().at(event.clientX - box.left), row: Math.floor((event.clientY - box.top) / height)}; };
  canvas.addEventListener("pointermove", event => { chosen = pointed(event); say(); });
  canvas.addEventListener("pointerleave", () => { chosen = null; say(); });
  canvas.addEventListener("pointerdown", event => { dragged = event.clientX; });
  canvas.addEventListener("pointerup", event => {
    const left = canvas.getBoundingClientRect().left, ends = [dragged - left, event.clientX - left].sort((a, b) => a - b);
    if (dragged != null && ends[1] - ends[0] > 4) { const {at, from} = place(); axis.setZoom([Math.max(from, at(ends[0])), at(ends[1])]); }
    dragged = null;
  });
  canvas.addEventListener("dblclick", () => axis.setZoom(null));
  focusable(canvas, name);
  canvas.addEventListener("keydown", event => {
    const {from, to} = place(), step = (to - from) / 60;
    chosen ??= {at: (from + to) / 2, row: 0};
    const [right, down] = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key] ?? [0, 0];
    if (right || down) {
      chosen = {at: Math.min(to, Math.max(from, chosen.at + right * step)), row: Math.min(shown.length - 1, Math.max(0, chosen.row + down))};
      say();
    } else if (!axis.zoomByKey(event.key, () => chosen.at)) return;
    event.preventDefault();
  });
  new ResizeObserver(draw).observe(canvas.parentElement);
  axis.plots.push(draw);
}
