// The chat page: one conversation at a time, kept in this browser.
import {deleteChat, loadChats, loadSettings, newChat, saveChat, saveSettings, titleOf} from "./chats.js";
import {$, amount, duration, events, headers, keepKey, make, showModels} from "./common.js";
import {MarkdownView, copyButton} from "./markdown.js";

const REFRESH_MS = 5000, NARROW = "(max-width: 44rem)";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
let chat = newChat();
let running = null;

// ---- the server: its state, its models, its key

async function refresh() {
  try {
    const health = await fetch("/health");
    const models = await fetch("/v1/models", {headers: headers()});
    const failed = [models, health].find(response => !response.ok);
    if (models.ok) showModels((await models.json()).data.map(model => model.id), $("model").value || loadSettings().model);
    if (models.status === 401) $("key").hidden = false;
    $("state").textContent = failed ? (await failed.json()).error.message : "ready";
  } catch (error) { $("state").textContent = "no answer from the server"; }
}

// ---- the conversation on the page

// Follow the end of the text, unless the reader has scrolled away from it.
function following(change) {
  const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  const made = change();
  if (atEnd) log.scrollTop = log.scrollHeight;
  return made;
}

function add(element) { following(() => $("log").append(element)); return element; }

function showMessage(message) {
  if (message.role === "user") { add(make("div", "turn user", message.content)); return; }
  const turn = new Turn();
  turn.show(message);
  turn.end(message);
}

// The answer of the model, while it grows and afterwards.
class Turn {
  constructor() {
    this.reasoning = make("details", "reasoning", [make("summary", "", "Reasoning"), make("div")]);
    this.reasoning.hidden = true;
    this.body = make("div", "turn");
    this.view = new MarkdownView(this.body);
    add(this.reasoning); add(this.body);
  }

  show(message) {
    following(() => {
      this.reasoning.hidden = !message.reasoning;
      this.reasoning.lastChild.textContent = message.reasoning ?? "";
      this.view.show(message.content);
    });
  }

  end(message) {
    const words = [...timingWords(message), message.ending].filter(Boolean).join(", ");
    add(make("div", "timings", [make("span", "", words), copyButton("Copy answer", () => message.content)]));
  }

  remove() { this.reasoning.remove(); this.body.remove(); }
}

function timingWords({timings, tokens}) {
  if (!timings) return [];
  const way = `${timings.prefill_worker ?? "?"} → ${timings.decode_worker ?? timings.prefill_worker ?? "?"}`;
  const speed = timings.tpot_s ? [`${amount(1 / timings.tpot_s)} tokens/s`] : [];
  return [`first token ${duration(timings.ttft_s)}`, `per token ${duration(timings.tpot_s)}`, `${tokens ?? "?"} tokens`, ...speed,
    `handoff ${duration(timings.handoff_s)}`, `cached ${timings.cached_tokens} tokens`, way];
}

function showError(text) { const line = make("div", "turn error", text); line.setAttribute("role", "alert"); add(line); }

// ---- asking

function requestBody() {
  const system = $("system").value.trim();
  const messages = [...(system ? [{role: "system", content: system}] : []), ...chat.messages.map(({role, content}) => ({role, content}))];
  const numbers = NUMBERS.filter(name => $(name).value !== "").map(name => [name, $(name).valueAsNumber]);
  return JSON.stringify({model: $("model").value || undefined, messages, stream: true, stream_options: {include_usage: true}, ...Object.fromEntries(numbers)});
}

async function answer() {
  const own = chat, message = {role: "assistant", content: ""}, turn = new Turn();
  let drawing = 0, failure = "";
  const draw = () => { drawing = 0; turn.show(message); };
  running = new AbortController();
  setBusy(true);
  try {
    const response = await fetch("/v1/chat/completions", {method: "POST", headers: headers(), signal: running.signal, body: requestBody()});
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      read(event, message);
      drawing ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    if (error.name === "AbortError") message.ending = "stopped"; else failure = error.message;
  }
  cancelAnimationFrame(drawing); turn.show(message);
  if (message.content || message.reasoning) { own.messages.push(message); turn.end(message); keep(own); } else { turn.remove(); takeBack(own); }
  if (failure) showError(failure);
  running = null;
  setBusy(false);
}

function read(event, message) {
  const choice = event.choices[0];
  message.content += choice?.delta?.content ?? "";
  if (choice?.delta?.reasoning_content) message.reasoning = (message.reasoning ?? "") + choice.delta.reasoning_content;
  if (choice?.finish_reason === "length") message.ending = "cut off at the limit of tokens";
  if (event.timings) message.timings = event.timings;
  if (event.usage) message.tokens = event.usage.completion_tokens;
}

// A question without an answer returns to its field, so that it can be sent again.
function takeBack(own) {
  const question = own.messages.pop();
  [...document.querySelectorAll(".turn.user")].at(-1)?.remove();
  if (!$("text").value) $("text").value = question.content;
  if (own.messages.length) keep(own); else { deleteChat(own.id); listChats(); }
}

function setBusy(isBusy) {
  $("send").disabled = isBusy; $("stop").disabled = !isBusy; $("log").setAttribute("aria-busy", isBusy);
  for (const button of [$("new"), ...$("chats").querySelectorAll("button")]) button.disabled = isBusy;
  if (!isBusy) $("text").focus();
}

// ---- the kept conversations

function keep(own) {
  if (!saveChat(own)) $("state").textContent = "this browser has no room for the conversation";
  listChats();
}

function listChats() {
  $("chats").replaceChildren(...loadChats().map(each => {
    const open = make("button", "", each.title || "untitled"), drop = make("button", "", "×");
    open.type = drop.type = "button"; open.title = each.title;
    if (each.id === chat.id) open.setAttribute("aria-current", "true");
    drop.setAttribute("aria-label", `Delete ${each.title}`);
    open.addEventListener("click", () => openChat(each));
    drop.addEventListener("click", () => { deleteChat(each.id); if (each.id === chat.id) openChat(newChat()); else listChats(); });
    open.disabled = drop.disabled = running !== null;
    return make("li", "", [open, drop]);
  }));
}

function openChat(opened) {
  chat = opened;
  $("log").replaceChildren();
  for (const message of chat.messages) showMessage(message);
  listChats();
  if (matchMedia(NARROW).matches) $("history").open = false;
  $("text").focus();
}

// ---- settings

function showSettings() {
  const kept = loadSettings();
  for (const name of ["system", ...NUMBERS]) if (kept[name] !== undefined) $(name).value = kept[name];
}

function keepSettings() {
  saveSettings(Object.fromEntries(["model", "system", ...NUMBERS].map(name => [name, $(name).value])));
}

$("ask").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  chat.title ||= titleOf(text);
  chat.messages.push({role: "user", content: text});
  showMessage(chat.messages.at(-1)); keep(chat); answer();
});
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
addEventListener("keydown", event => { if (event.key === "Escape") running?.abort(); });
addEventListener("storage", listChats);
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => openChat(newChat()));
$("model").addEventListener("change", keepSettings);
$("settings").addEventListener("change", keepSettings);
keepKey(refresh);
if ($("key").value) $("key").hidden = false;
if (matchMedia(NARROW).matches) $("history").open = false;
showSettings();
listChats();
setInterval(refresh, REFRESH_MS);
refresh();
