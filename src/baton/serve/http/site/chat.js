import {$, duration, events, headers, keepKey} from "./common.js";

const messages = [];
let running = null;

function line(kind, text) {
  const element = document.createElement("div");
  element.className = kind; element.textContent = text;
  $("log").append(element); $("log").scrollTop = $("log").scrollHeight;
  return element;
}

async function refresh() {
  try {
    const health = await fetch("/health");
    $("state").textContent = health.ok ? "ready" : (await health.json()).error.message;
    const models = await fetch("/v1/models", {headers: headers()});
    if (models.ok) $("model").textContent = (await models.json()).data[0].id;
    else $("state").textContent = (await models.json()).error.message;
  } catch (error) { $("state").textContent = "no answer from the server"; }
  setTimeout(refresh, 2000);
}

function show(timings) {
  const way = `${timings.prefill_worker ?? "?"} → ${timings.decode_worker ?? timings.prefill_worker ?? "?"}`;
  line("timings", `first token ${duration(timings.ttft_s)}, per token ${duration(timings.tpot_s)}, handoff ${duration(timings.handoff_s)}, cached ${timings.cached_tokens} tokens, ${way}`);
}

async function answer() {
  running = new AbortController();
  $("send").disabled = true; $("stop").disabled = false;
  const turn = line("turn", ""); let text = "";
  try {
    const body = JSON.stringify({messages, stream: true, temperature: $("temperature").valueAsNumber || 0});
    const response = await fetch("/v1/chat/completions", {method: "POST", headers: headers(), signal: running.signal, body});
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      text += event.choices[0]?.delta?.content ?? ""; turn.textContent = text; $("log").scrollTop = $("log").scrollHeight;
      if (event.timings) show(event.timings);
    }
  } catch (error) { if (error.name !== "AbortError") line("turn error", error.message); }
  if (text) messages.push({role: "assistant", content: text}); else { messages.pop(); turn.remove(); }
  running = null; $("send").disabled = false; $("stop").disabled = true; $("text").focus();
}

$("ask").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = ""; messages.push({role: "user", content: text}); line("turn user", text); answer();
});
$("text").addEventListener("keydown", event => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("ask").requestSubmit(); } });
$("stop").addEventListener("click", () => running?.abort());
keepKey();
refresh();
