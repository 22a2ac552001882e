// The dashboard: reads /cluster/events, and shows each sample once it has arrived.
import {running, scaleFields} from "./actions.js";
import {$, amount, duration, events, headers, keepKey, ofModel, ratio, showModels, time} from "./common.js";
import {ROLES, cache, flow, marks, mostRunning, refusals, requests, shares, tiles, workerLanes, workers} from "./panels.js";
import {Axis, curves, lanes} from "./plots.js";
import {Store} from "./store.js";

const RETRY_MS = 2000;
export const store = new Store();
let reading = null;

const latency = (name, part) => sample => sample.latencies[name]?.[part] ?? null;
const rate = name => sample => (sample.counts[name] ?? 0) / sample.elapsed_s;
const total = counts => Object.values(counts).reduce((sum, count) => sum + count, 0);
const percentiles = name => [
  {label: "p50", color: "--p50", values: latency(name, "p50"), dash: [2, 2]},
  {label: "p90", color: "--p90", values: latency(name, "p90"), dash: [6, 4]},
  {label: "p99", color: "--p99", values: latency(name, "p99"), width: 2},
];

const ofWorkers = field => sample => sample.workers.reduce((sum, worker) => sum + worker[field], 0);
const ofBlocks = field => sample => {
  const sum = name => sample.hosts.reduce((total, host) => total + host[name], 0), whole = sum("used") + sum("cached") + sum("free");
  return whole ? sum(field) / whole : null;
};

const LEAST_SECONDS = 60;
// The shown seconds: the latest ones, as far as there are samples.
function latest() {
  const now = store.times.at(-1) ?? 0, seconds = Number($("window").value);
  return [Math.max(now - seconds, Math.min(store.times[0] ?? now, now - LEAST_SECONDS)), now];
}
const axis = new Axis({limits: latest, words: time, isClock: true, key: "baton"});
const timePlot = (name, options) => curves($(name), axis, {
  marks: () => store.marks, columns: () => [store.times, ...options.series.map(one => store.column(one.values))], ...options,
});
const perSecond = value => amount(value) + "/s";

function build() {
  lanes($("lanes"), $("lane-value"), axis, {
    name: "Role and load of each worker over time; the table below has the present values",
    rows: () => workerLanes(store, axis.span()), marks: () => store.marks,
    hint: () => `Point at a lane for its values. Highest line: ${amount(mostRunning(store, axis.span()))} running requests.`,
  });
  timePlot("ttft", {format: duration, series: percentiles("ttft"), limits: () => store.slo ? [store.slo.ttft_s] : []});
  timePlot("itl", {format: duration, series: percentiles("itl"), limits: () => store.slo ? [store.slo.tpot_s] : []});
  timePlot("tokens", {format: perSecond, series: [
    {label: "output", color: "--decode", values: rate("output_tokens"), width: 2},
    {label: "prompt", color: "--prefill", values: rate("prompt_tokens")},
    {label: "cached", color: "--mixed", values: rate("cached_tokens"), dash: [6, 4]},
  ]});
  timePlot("load", {format: amount, floor: 2, series: [
    {label: "running", color: "--decode", values: ofWorkers("running"), width: 2},
    {label: "waiting", color: "--prefill", values: ofWorkers("waiting"), dash: [6, 4]},
  ]});
  timePlot("kv", {format: ratio, floor: 0.1, series: [
    {label: "used", color: "--decode", values: ofBlocks("used"), width: 2},
    {label: "cached", color: "--mixed", values: ofBlocks("cached"), dash: [6, 4]},
  ]});
  timePlot("phases", {format: duration, series: [
    {label: "prefill queue", color: "--other", values: latency("queue", "p50"), dash: [2, 2]},
    {label: "prefill", color: "--prefill", values: latency("prefill", "p50"), width: 2},
    {label: "handoff", color: "--mixed", values: latency("handoff", "p50"), dash: [6, 4]},
    {label: "decode queue (in handoff)", color: "--decode", values: latency("decode_queue", "p50")},
  ]});
  timePlot("outcomes", {format: perSecond, series: [
    {label: "finished", color: "--mixed", values: rate("finished"), width: 2},
    {label: "in SLO", color: "--decode", values: rate("in_slo"), dash: [6, 4]},
    {label: "refused", color: "--prefill", values: sample => total(sample.rejected) / sample.elapsed_s},
    {label: "failed", color: "--bad", values: rate("failed"), dash: [2, 2]},
  ]});
  timePlot("predictions", {format: value => value.toFixed(2), floor: 1.5, limits: () => [1], series: [
    {label: "TTFT", color: "--prefill", values: latency("ttft_ratio", "p50"), width: 2},
    {label: "TPOT", color: "--decode", values: latency("tpot_ratio", "p50"), dash: [6, 4]},
  ]});
}

// Show the state of the server, as an error if it serves no requests.
function say(text, isWell) { $("state").textContent = text; $("state").className = isWell ? "pill well" : "pill error"; }

function show() {
  const now = store.samples.at(-1);
  if (!now || document.hidden) return;
  say(now.state, now.state === "ready");
  for (const [place, name] of [["ttft", "ttft_s"], ["itl", "tpot_s"]]) {
    $(place).previousElementSibling.querySelector(".slo").textContent = store.slo ? `dashed: SLO, ${duration(store.slo[name])}` : "no SLO is set";
  }
  for (const draw of [tiles, workers, cache, flow, shares, refusals, marks, requests]) draw(store);
  axis.refresh();
  running().catch(() => {});  // the stream tells whether the server answers
}

async function read() {
  reading?.abort();
  const current = reading = new AbortController();
  try {
    const models = await fetch("/v1/models", {headers: headers(), signal: current.signal});
    if (models.ok) showModels((await models.json()).data.map(model => model.id));
    const response = await fetch(ofModel("/cluster/events"), {headers: headers(), signal: current.signal});
    if (!response.ok) throw new Error((await response.json()).error.message);
    let due = false;
    for await (const message of events(response)) {
      if (message.kept_samples) {
        store.clear(); store.kept = message.kept_samples; store.slo = message.slo; store.hasLog = message.has_log; if (!$("model").value) showModels([message.model]);
        continue;
      }
      store.add(message);
      if (!due) { due = true; setTimeout(() => { due = false; show(); }, 0); }  // the kept samples arrive at once: one drawing
    }
    say("the server has ended the stream", false);
  } catch (error) {
    if (current.signal.aborted) return;
    say(error instanceof TypeError ? "no answer from the server" : error.message, false);
  }
  if (reading === current) setTimeout(() => { if (reading === current) read(); }, RETRY_MS);
}

build();
scaleFields($("scale"), ROLES);
keepKey(read);
$("model").addEventListener("change", read);
$("window").addEventListener("change", () => axis.setZoom(null));
document.addEventListener("visibilitychange", show);
read();
