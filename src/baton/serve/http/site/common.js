// What both pages need: elements, the API key, server-sent events, and durations in words.

export const $ = id => document.getElementById(id);

const KEY = "baton.key";
export function headers() {
  const key = $("key").value;
  return Object.assign({"Content-Type": "application/json"}, key ? {"Authorization": "Bearer " + key} : {});
}
// The key is kept for this tab only, so that both pages have it.
export function keepKey(changed) {
  $("key").value = sessionStorage.getItem(KEY) ?? "";
  $("key").addEventListener("change", () => { sessionStorage.setItem(KEY, $("key").value); changed?.(); });
}

// Offer the served models in the field for one. The wanted one stays chosen.
export function showModels(names, wanted = $("model").value) {
  const select = $("model");
  if (names.join("\n") === [...select.options].map(option => option.value).join("\n")) return;
  select.replaceChildren(...names.map(name => new Option(name, name)));
  if (names.includes(wanted)) select.value = wanted;
}
// The path of a route, for the chosen model.
export const ofModel = path => $("model").value ? `${path}?model=${encodeURIComponent($("model").value)}` : path;

// Yield the data of each event of a response, parsed.
export async function* events(response) {
  const decoder = new TextDecoder(); const reader = response.body.getReader(); let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    rest += decoder.decode(value, {stream: true});
    const parts = rest.split("\n\n"); rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

export function duration(seconds) {
  if (seconds == null) return "-";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return Math.round(seconds * 1e6) + " µs";
  if (seconds < 0.01) return (seconds * 1000).toFixed(1) + " ms";
  return seconds < 1 ? Math.round(seconds * 1000) + " ms" : seconds.toFixed(2) + " s";
}
export function amount(value) {
  if (value == null) return "-";
  if (value >= 1e6) return (value / 1e6).toFixed(1) + " M";
  if (value >= 1e5) return Math.round(value / 1e3) + " k";
  if (value >= 1e4) return (value / 1e3).toFixed(1) + " k";
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(value < 10 ? 2 : 1);
}
export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"]; let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}
export const ratio = value => value == null ? "-" : Math.round(value * 100) + " %";
export const time = unix_s => new Date(unix_s * 1000).toLocaleTimeString([], {hourCycle: "h23"});

// Make an element with a class, a text or children.
export function make(name, className = "", content = []) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...(Array.isArray(content) ? content : [content]));
  return element;
}
