// Draws the plots of a report page. The page contains this file, and below each plot its data as JSON.
import {amount, duration, make, ratio} from "./common.js";
import {Axis, curves, lanes} from "./plots.js";

const WORDS = {seconds: duration, share: ratio, number: amount, rate: value => amount(value) + "/s"};
const LETTERS = {prefill: "P", decode: "D", mixed: "M"};
const found = [...document.querySelectorAll("script[type='application/json']")].map(script => [script.previousElementSibling, JSON.parse(script.textContent)]);
const end = Math.max(1e-9, ...found.map(([, plot]) => plot.end_s ?? 0));
const overTime = new Axis({limits: () => [0, end], words: value => `${Number(value.toPrecision(value < 100 ? 3 : 6))} s`, key: "time"});

function drawCurves(element, plot) {
  const axis = plot.end_s != null ? overTime : new Axis({limits: () => [0, plot.x_max], words: WORDS[plot.x_format], label: plot.x_label});
  const columns = uPlot.join(plot.series.map(one => [one.x, one.values]));
  const series = plot.series.map(one => ({...one, isDots: one.is_dots, names: one.names && columns[0].map(x => one.names[one.x.indexOf(x)])}));
  curves(element, axis, {columns: () => columns, series, format: WORDS[plot.format], floor: plot.floor, limits: () => plot.limits, marks: () => plot.marks, label: plot.label});
}

// Rows of workers: bands for their roles, as strong as they were busy, with a line for their running requests.
function workerRows({borders, workers}) {
  const most = Math.max(1e-9, ...workers.flatMap(worker => worker.running));
  return workers.map(({name, roles, busy, running, waiting}) => ({
    name,
    bands: roles.flatMap(([from, to, role, reason]) => busy.flatMap((strength, bin) => {
      const start = Math.max(from, borders[bin]), stop = Math.min(to, borders[bin + 1]);
      if (start >= stop) return [];
      const why = reason ? `, because ${reason}` : "";
      return [{from: start, to: stop, color: `--${role}`, strength, letter: start === from ? LETTERS[role] ?? "?" : "", words: `${role}${why}, ${amount(running[bin])} running, ${amount(waiting[bin])} waiting, busy ${ratio(strength)}`}];
    })),
    line: running.map((value, bin) => [(borders[bin] + borders[bin + 1]) / 2, value / most]),
  }));
}

// Rows of values: the darker, the higher.
function heatRows({borders, rows, most, color, unit}) {
  return rows.map(({name, values}) => ({name, bands: values.flatMap((value, bin) => value ? [{from: borders[bin], to: borders[bin + 1], color, strength: value / most, words: `${amount(value)} ${unit}`}] : [])}));
}

// Rows of requests: until the first token, decoding, or not finished.
function requestRows({requests}) {
  return requests.map(([arrival, first, last, outcome, tokens], number) => {
    const words = `${outcome}, ${first == null ? "no token" : `TTFT ${duration(first - arrival)}, ${tokens} output tokens`}, ${duration(last - arrival)} in all`;
    const band = (from, to, color) => ({from, to, color, words});
    const rest = outcome === "finished" ? "--decode" : "--bad";
    const parts = first == null ? [band(arrival, last, "--bad")] : [band(arrival, first, "--prefill"), band(first, last, rest)];
    return {name: `request ${number + 1}`, bands: parts};
  });
}

const ROWS = {workers: workerRows, heat: heatRows, requests: requestRows};
for (const [element, plot] of found) {
  const name = element.previousElementSibling.textContent;
  if (plot.type === "curves") { drawCurves(element, plot); continue; }
  const canvas = make("canvas", "lanes"), readout = make("p", "muted readout", "\u00a0"), rows = ROWS[plot.type](plot);
  element.replaceChildren(canvas, readout);
  lanes(canvas, readout, overTime, {rows: () => rows, height: plot.row_height, name, hint: () => "Point at a row for its values."});
}
