// The panels that are no plots over time: tiles, tables, KV bars, flow, shares, events and recent requests.
import {explain, post, sureButton} from "./actions.js";
import {$, amount, bytes, duration, make, ratio, time} from "./common.js";

export const ROLES = ["prefill", "decode", "mixed"];
const LETTERS = {prefill: "P", decode: "D", mixed: "M"};
const LANES_MAX = 32;
const MINUTE = 60;
const count = value => value.toLocaleString("en");

export function tiles(store) {
  const now = store.samples.at(-1), recent = store.last(10), seconds = recent.reduce((sum, sample) => sum + sample.elapsed_s, 0) || 1;
  const rate = name => recent.reduce((sum, sample) => sum + (sample.counts[name] ?? 0), 0) / seconds;
  const worst = (name, part) => store.last(MINUTE).reduce((most, sample) => Math.max(most, sample.latencies[name]?.[part] ?? 0), 0) || null;
  const withSlo = store.sum("with_slo", MINUTE), asked = store.sum("prompt_tokens", MINUTE);
  const sum = field => now.workers.reduce((total, worker) => total + worker[field], 0), [ttft, itl] = [worst("ttft", "p99"), worst("itl", "p99")];
  const shown = [
    [amount(rate("output_tokens")), "output tokens/s", "mean of 10 s"],
    [amount(rate("prompt_tokens")), "prompt tokens/s", "mean of 10 s"],
    [sum("running"), "running requests", "now"],
    [sum("waiting"), "waiting requests", "now"],
    [duration(ttft), "TTFT p99", "highest of 1 minute", store.slo && ttft > store.slo.ttft_s && "above the SLO"],
    [duration(itl), "ITL p99", "highest of 1 minute", store.slo && itl > store.slo.tpot_s && "above the SLO"],
    [withSlo ? ratio(store.sum("in_slo", MINUTE) / withSlo) : "-", "SLO attainment", withSlo ? "of 1 minute" : "no SLO", withSlo && store.sum("in_slo", MINUTE) / withSlo < 0.9 && "below 90 %"],
    [asked ? ratio(store.sum("cached_tokens", MINUTE) / asked) : "-", "prefix hit ratio", "of 1 minute"],
  ];
  $("tiles").replaceChildren(...shown.map(([value, label, span, missed]) => make("div", missed ? "tile missed" : "tile", [
    make("b", "", String(value)), make("span", "", label), make("small", "", missed ? `${span}: ${missed}` : span),
  ])));
}

async function setRole(worker, select) {
  await post(`/cluster/workers/${encodeURIComponent(worker)}/role`, {role: select.value});
  select.blur();
}

export function workers(store) {
  const now = store.samples.at(-1), table = $("workers");
  if (table.contains(document.activeElement)) return;  // a role is being chosen, or a button pressed
  table.replaceChildren(...now.workers.map(worker => {
    const select = make("select", "", ROLES.map(role => { const option = make("option", "", role); option.selected = role === worker.role; return option; }));
    select.setAttribute("aria-label", `Role of ${worker.id}`);
    select.addEventListener("change", () => setRole(worker.id, select));
    const role = make("td", "", [make("span", `role ${worker.role}`), select]);
    const numbers = [worker.running, worker.waiting, amount(worker.steps / now.elapsed_s), worker.steps ? amount(worker.step_requests) : "-", ratio(worker.busy_ratio)].map(value => make("td", "n", String(value)));
    const restart = sureButton("restart", `Restart ${worker.id}`, () => post("/cluster/restart", {workers: [worker.id]}));
    return make("tr", "", [make("td", "", worker.id), role, make("td", "", worker.state), ...numbers, make("td", "", [restart])]);
  }));
}

const within = (store, [from, to]) => store.samples.filter(sample => sample.unix_s >= from && sample.unix_s <= to + 2);
// The most running requests of one worker, to which the lines of all lanes are scaled.
export const mostRunning = (store, span) => within(store, span).flatMap(sample => sample.workers).reduce((most, worker) => Math.max(most, worker.running), 1);

// One lane for each worker: a band in the colour of its role, as strong as it was busy, with a line for its running requests.
export function workerLanes(store, span) {
  const seen = within(store, span), most = mostRunning(store, span);
  return store.workerNames().slice(0, LANES_MAX).map(name => {
    const bands = [], line = []; let role = null;
    for (const sample of seen) {
      const worker = sample.workers.find(each => each.id === name);
      if (!worker || worker.state !== "ready") { role = null; continue; }
      const batch = worker.steps ? `, ${amount(worker.step_requests)} requests a step` : "";
      bands.push({
        from: sample.unix_s - sample.elapsed_s, to: sample.unix_s, color: `--${worker.role}`, strength: worker.busy_ratio, letter: worker.role === role ? "" : LETTERS[worker.role] ?? "?",
        words: `${worker.role}, ${worker.running} running, ${worker.waiting} waiting, ${worker.steps} steps${batch}, busy ${ratio(worker.busy_ratio)}`,
      });
      line.push([sample.unix_s, worker.running / most]); role = worker.role;
    }
    return {name, bands, line};
  });
}

function part(className, share) { const piece = make("i", className); piece.style.width = `${100 * share}%`; return piece; }

const drain = host => sureButton("drain", `Drain ${host}`, () => post(`/cluster/hosts/${encodeURIComponent(host)}/drain`, {}));

export function cache(store) {
  const recent = store.last(MINUTE), now = recent.at(-1), first = recent[0];
  if ($("cache").contains(document.activeElement)) return;  // a button is being pressed
  $("cache").replaceChildren(...now.hosts.flatMap(host => {
    const total = host.used + host.cached + host.free || 1;
    const size = bytes(total * host.block_bytes), before = first.hosts.find(each => each.id === host.id);
    const rows = [
      make("div", "host", [`${host.id}: ${size}`, ...(now.hosts.length > 1 ? [drain(host.id)] : [])]),
      make("div", "bar", [part("used", host.used / total), part("cached", host.cached / total)]),
      make("div", "muted key", [make("i", "used"), `${count(host.used)} used`, make("i", "cached"), `${count(host.cached)} cached`, make("i", "free"), `${count(host.free)} free`]),
    ];
    for (const tier of host.tiers) {
      rows.push(make("div", "host", `${host.id}, tier ${tier.name}${tier.state === "used" ? "" : ": " + tier.state}`));
      rows.push(make("div", "bar", [part("cached", tier.kv_blocks_cached / (tier.kv_blocks_total || 1))]));
      rows.push(make("div", "muted", `${count(tier.kv_blocks_cached)} of ${count(tier.kv_blocks_total)} blocks; ${tierRates(tier, before, host.block_bytes, now.unix_s - first.unix_s)}`));
    }
    return rows;
  }));
}

// The read rate and the hit ratio of a tier since an earlier sample. Its counters start again with its host.
function tierRates(tier, before, blockBytes, seconds) {
  const old = before?.tiers.find(each => each.name === tier.name);
  const since = name => Math.max(0, tier[name] - (old?.[name] ?? 0)), loaded = since("loaded_blocks"), asked = loaded + since("missed_blocks");
  return asked ? `${bytes(loaded * blockBytes / (seconds || 1))}/s read, ${ratio(loaded / asked)} of the wanted blocks found` : "nothing was read in the last minute";
}

function drawn(name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

// Workers of prefill on the left, of decode on the right, and a line as wide as the number of handoffs between them.
export function flow(store) {
  const ways = new Map();
  for (const sample of store.last(MINUTE)) for (const {source, target, requests} of sample.handoffs) {
    const key = JSON.stringify([source, target]); ways.set(key, (ways.get(key) ?? 0) + requests);
  }
  if (!ways.size) { $("flow").replaceChildren(make("p", "muted", "No request was handed from one worker to another.")); return; }
  const links = [...ways].map(([key, requests]) => [...JSON.parse(key), requests]).sort();
  const sides = [0, 1].map(side => [...new Set(links.map(link => link[side]))].sort());
  const height = 34 * Math.max(sides[0].length, sides[1].length) + 10, from = new Map(), most = Math.max(...links.map(link => link[2]));
  const svg = drawn("svg", {class: "flow", viewBox: `0 0 420 ${height}`, role: "img", "aria-label": links.map(([a, b, count]) => `${a} to ${b}: ${count} requests`).join(", ")});
  const y = (side, name) => 34 * sides[side].indexOf(name) + 22;
  for (const [source, target, requests] of links) {
    const [start, end] = [y(0, source), y(1, target)];
    const line = drawn("path", {d: `M110 ${start} C200 ${start} 220 ${end} 310 ${end}`, fill: "none", stroke: "currentColor", "stroke-opacity": "0.35", "stroke-width": 1.5 + 12 * requests / most});
    line.append(drawn("title", {}, `${source} to ${target}: ${requests} requests`));
    svg.append(line); from.set(source, (from.get(source) ?? 0) + requests);
  }
  const perSecond = requests => `${(requests / MINUTE).toFixed(2)}/s`, into = name => links.reduce((sum, link) => sum + (link[1] === name ? link[2] : 0), 0);
  sides[0].forEach(name => svg.append(drawn("text", {x: 104, y: y(0, name) + 4, "text-anchor": "end"}, `${name} ${perSecond(from.get(name))}`)));
  sides[1].forEach(name => svg.append(drawn("text", {x: 316, y: y(1, name) + 4}, `${name} ${perSecond(into(name))}`)));
  $("flow").replaceChildren(svg, ...copies(store));
}

// Bytes between hosts, and the share of the copying time in which the prompt was still computed.
function copies(store) {
  const ways = new Map();
  for (const sample of store.last(MINUTE)) for (const copy of sample.copies) {
    const key = JSON.stringify([copy.source, copy.target]), sum = ways.get(key) ?? {bytes: 0, copy_s: 0, overlap_s: 0};
    for (const name of Object.keys(sum)) sum[name] += copy[name];
    ways.set(key, sum);
  }
  if (!ways.size) return [make("p", "muted", "No bytes were copied: the workers share their host's memory.")];
  return [...ways].sort().map(([key, sum]) => make("p", "muted", `${JSON.parse(key).join(" → ")}: ${bytes(sum.bytes / MINUTE)}/s copied, ${ratio(sum.copy_s ? sum.overlap_s / sum.copy_s : 0)} of the time during prefill`));
}

function summed(store, name) {
  const sums = new Map();
  for (const sample of store.last(MINUTE)) for (const [key, amount] of Object.entries(sample[name])) sums.set(key, (sums.get(key) ?? 0) + amount);
  return [...sums].sort((a, b) => b[1] - a[1]);
}

export function shares(store) {
  const rows = [["tenants", "tenant"], ["classes", "class"]].flatMap(([name, kind]) => {
    const sums = summed(store, name), total = sums.reduce((sum, [, tokens]) => sum + tokens, 0);
    return sums.map(([key, tokens]) => make("div", "share", [
      make("span", key ? "" : "muted", key ? `${kind} ${key}` : `no ${kind}`), make("div", "bar", [part("used", tokens / total)]),
      make("span", "n", `${amount(tokens)} tokens, ${ratio(tokens / total)}`),
    ]));
  });
  $("shares").replaceChildren(...(rows.length ? rows : [make("p", "muted", "No output in the last minute.")]));
}

const REASONS = {
  queue_full: "the queue was full", queue_deadline: "the wait was too long", no_worker: "there was no worker", too_long: "they were too long",
  slo: "they would have missed their SLO", share: "the client used its share", shutdown: "the server was ending", retries: "their workers died",
};
export function refusals(store) {
  const rows = summed(store, "rejected").map(([reason, requests]) => `${requests}, as ${REASONS[reason] ?? reason}`);
  $("refusals").textContent = rows.length ? `refused in the last minute: ${rows.join("; ")}` : "no request was refused in the last minute";
}

export function marks(store) {
  const rows = store.marks.slice(-50).reverse().map(mark => make("li", "", [make("time", "", time(mark.at)), mark.text]));
  $("marks").replaceChildren(...(rows.length ? rows : [make("li", "muted", "No worker or host changed.")]));
}

const rowOf = new Map();
// Rows are kept as they are, so that an open one stays open.
export function requests(store) {
  const longest = Math.max(1e-3, ...store.requests.map(request => request.timings.e2e_s ?? 0));
  for (const id of rowOf.keys()) if (!store.requests.some(request => request.id === id)) rowOf.delete(id);
  $("requests").replaceChildren(...[...store.requests].reverse().map(request => {
    if (!rowOf.has(request.id)) rowOf.set(request.id, requestRow(request, store));
    const row = rowOf.get(request.id);
    row.querySelector(".bar").style.width = `${100 * Math.max(0.01, (request.timings.e2e_s ?? 0) / longest)}%`;
    return row;
  }));
  if (!store.requests.length) $("requests").replaceChildren(make("p", "muted", "No request has ended yet. Ask something on the chat page."));
}

function requestRow(request, store) {
  const times = request.timings, whole = times.e2e_s || 1;
  const queue = times.queue_s ?? 0, prefill = times.prefill_s ?? 0, handoff = times.handoff_s ?? 0;
  const pieces = [["queue", queue], ["prefill-time", prefill], ["handoff", handoff], ["decode-time", Math.max(0, whole - queue - prefill - handoff)]];
  const bar = make("div", "bar", times.e2e_s ? pieces.map(([name, spent]) => part(name, Math.min(1, spent / whole))) : []);
  const row = make("details", "", [
    make("summary", "", [make("span", "", time(request.unix_s)), make("div", "", [bar]), make("span", request.outcome === "finished" ? "" : "error", request.outcome === "finished" ? duration(times.e2e_s) : request.outcome)]),
    details(request),
  ]);
  const why = make("div", "why");
  row.append(why);
  row.addEventListener("toggle", () => { if (row.open && !why.childElementCount) explain(request.id, why, store.hasLog); });
  row.dataset.id = request.id;
  return row;
}

function details(request) {
  const times = request.timings, shown = [
    ["request", request.id], ["outcome", request.message ? `${request.outcome}: ${request.message}` : request.outcome],
    ["class, tenant", [request.service, request.tenant].filter(Boolean).join(", ") || "-"],
    ["tokens", `${request.prompt_tokens} in (${times.cached_tokens} cached), ${request.output_tokens} out`],
    ["queue, prefill, handoff", [times.queue_s, times.prefill_s, times.handoff_s].map(duration).join(", ")],
    ["TTFT", duration(times.ttft_s) + (request.predicted_ttft_s ? ` (predicted ${duration(request.predicted_ttft_s)})` : "")],
    ["TPOT", duration(times.tpot_s)], ["workers", [times.prefill_worker, times.decode_worker].filter(Boolean).join(" → ") || "-"],
    ["attempts", String(times.attempts)], ["why these workers", `baton explain ${request.id} --url ${location.origin}`],
  ];
  return make("dl", "", shown.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
}
