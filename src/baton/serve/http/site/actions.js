// What an operator does on the dashboard: cancel a request, restart a worker, drain a host, ask why a request went where it did.
import {$, amount, duration, headers, make, ofModel} from "./common.js";

const SURE_MS = 4000, SHOWN_MS = 15000;
let hide = 0;

// Send an action. An error appears below the header.
export async function post(path, body) {
  let refusal = "";
  try {
    const response = await fetch(ofModel(path), {method: "POST", headers: headers(), body: JSON.stringify(body)});
    if (!response.ok) refusal = (await response.json()).error.message;
  } catch { refusal = "no answer from the server"; }
  $("refused").textContent = refusal; $("refused").hidden = !refusal;
  clearTimeout(hide); hide = setTimeout(() => { $("refused").hidden = true; }, SHOWN_MS);
}

// A button that acts at the second press, so that one slip of the hand ends nothing.
export function sureButton(label, name, act) {
  const button = make("button", "act", label);
  button.type = "button"; button.setAttribute("aria-label", name);
  let armed = 0;
  const disarm = () => { clearTimeout(armed); armed = 0; button.textContent = label; };
  button.addEventListener("click", async () => {
    if (!armed) { button.textContent = "sure?"; armed = setTimeout(() => { disarm(); button.blur(); }, SURE_MS); return; }
    disarm(); button.disabled = true;
    await act();
    button.disabled = false; button.blur();
  });
  return button;
}

// Fill a place with the fields that set the number of workers of a role.
export function scaleFields(place, roles) {
  const role = make("select", "", roles.map(name => make("option", "", name))), count = make("input");
  role.setAttribute("aria-label", "Role to scale"); count.setAttribute("aria-label", "Workers of this role; empty: as the policy decides");
  count.type = "number"; count.min = "1"; count.placeholder = "policy";
  const scale = sureButton("scale", "Scale this role", () => post("/cluster/scale", {role: role.value, workers: count.value ? Number(count.value) : null}));
  place.append("scale ", role, " to ", count, " workers ", scale);
}

export async function running() {
  const table = $("running");
  if (table.contains(document.activeElement)) return;  // a button is being pressed
  const response = await fetch(ofModel("/cluster/requests"), {headers: headers()});
  if (!response.ok) return;
  const {total, requests} = await response.json();
  $("running-table").hidden = !total; $("no-running").hidden = total > 0;
  $("running-total").textContent = total > requests.length ? `the oldest ${requests.length} of ${total}` : String(total);
  if (table.contains(document.activeElement)) return;
  const cell = (text, kind = "") => make("td", kind, text);
  table.replaceChildren(...requests.map(request => make("tr", "", [
    cell(request.id), cell(request.phase), cell(request.worker || "-"), cell(duration(request.age_s), "n"),
    cell(`${amount(request.prompt_tokens)} in, ${amount(request.output_tokens)} of ${amount(request.output_tokens_max)} out`, "n"),
    make("td", "", [sureButton("cancel", `Cancel ${request.id}`, () => post("/cluster/cancel", {id: request.id}))]),
  ])));
}

// Fill an opened row of the waterfall with the decisions about its request.
export async function explain(id, place, hasLog) {
  if (!hasLog) { place.replaceChildren(make("p", "muted", "The server keeps no decision log; start it with --log FILE to see why a request went where it did.")); return; }
  place.replaceChildren(make("p", "muted", "reading the decision log"));
  try {
    const response = await fetch(ofModel(`/cluster/explain/${encodeURIComponent(id)}`), {headers: headers()});
    const found = await response.json();
    place.replaceChildren(...(response.ok ? found.moments.map(moment) : [make("p", "muted", found.error.message)]));
  } catch (error) { place.replaceChildren(make("p", "error", "no answer from the server")); }
}

function moment({at_s, what, questions}) {
  const asked = questions.filter(question => question.subject !== "admit" || question.refusal);
  return make("div", "moment", [make("p", "", [make("b", "", duration(at_s)), ` ${what}`]), ...asked.flatMap(question)]);
}

function question(asked) {
  const answer = asked.refusal || (asked.chosen ? `chose ${asked.chosen} for ${asked.subject}` : `chose no worker for ${asked.subject}`);
  const said = make("p", "muted", `${asked.policy} ${answer}`);
  if (!asked.options.length) return [said];
  const head = make("tr", "", ["worker", "running", "waiting", "queued tokens", "cached tokens", "predicted", "rank"].map(name => make("th", name === "worker" ? "" : "n", name)));
  const rows = asked.options.map(option => make("tr", option.worker === asked.chosen ? "chosen" : "", [make("td", "", option.worker), ...[
    option.running_requests, option.waiting_requests, amount(option.queued_tokens), amount(option.hit_tokens),
    duration(option.ttft_s ?? (option.step_s ?? 0) + (option.handoff_s ?? 0)), option.rank ?? "-",
  ].map(value => make("td", "n", String(value)))]));
  return [said, make("div", "scroll", [make("table", "", [head, ...rows])])];
}
