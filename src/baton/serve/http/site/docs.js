// The API's documentation: every operation of /openapi.json with its fields, and a form that sends a request.
import {$, headers, keepKey, make} from "./common.js";

const EXAMPLES = {
  CompletionRequest: {prompt: "Once upon a time", max_tokens: 16},
  ChatRequest: {messages: [{role: "user", content: "Hello"}], max_tokens: 16},
  ResponsesRequest: {input: "Hello", max_output_tokens: 16},
  MessagesRequest: {messages: [{role: "user", content: "Hello"}], max_tokens: 16},
  CountTokensRequest: {messages: [{role: "user", content: "Hello"}]},
  EmbeddingRequest: {input: "Hello"},
  TokenizeRequest: {prompt: "Hello"},
  DetokenizeRequest: {tokens: [1, 2, 3]},
};
const SHOWN_CHARACTERS_MAX = 20000;
let components = {};

async function load() {
  try {
    const response = await fetch("/openapi.json", {headers: headers()});
    const found = await response.json();
    if (!response.ok) { $("state").textContent = found.error.message; return; }
    components = found.components.schemas;
    $("state").textContent = `version ${found.info.version}`;
    $("operations").replaceChildren(...Object.entries(found.paths).flatMap(([path, operations]) =>
      ["get", "post", "delete"].filter(method => operations[method]).map(method => operation(method, path, operations))));
  } catch (error) { $("state").textContent = "no answer from the server"; }
}

function operation(method, path, operations) {
  const described = operations[method], parameters = described.parameters ?? operations.parameters ?? [];
  const body = nameOf(described.requestBody?.content["application/json"]?.schema);
  const details = make("details", "panel", [make("summary", "", [make("b", "", method.toUpperCase()), ` ${path} `, make("span", "muted", described.summary)])]);
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(...contents(method, path, described, parameters, body));
  });
  return details;
}

function contents(method, path, described, parameters, body) {
  const statuses = Object.keys(described.responses).join(", ");
  return [form(method, path, parameters, body), make("p", "muted", `Answers with status ${statuses}.`), ...(body ? [fields(components[body])] : [])];
}

function fields(schema) {
  const required = new Set(schema.required ?? []);
  const inOrder = Object.entries(schema.properties ?? {}).sort(([one], [other]) => required.has(other) - required.has(one));
  const rows = inOrder.map(([name, field]) =>
    make("tr", "", [make("td", "", make("code", "", name)), make("td", "", typeOf(field)), make("td", "", required.has(name) ? "required" : "")]));
  return make("div", "scroll", [make("table", "", [make("tbody", "", rows)])]);
}

const nameOf = schema => schema?.$ref?.split("/").at(-1);

// The accepted values of a field in words. A named object is one word, so that the text ends.
function typeOf(schema, depth = 0) {
  if (schema.$ref) return nameOf(schema);
  if (schema.enum) return schema.enum.filter(value => value !== null).map(value => JSON.stringify(value)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.filter(choice => choice.type !== "null").map(choice => typeOf(choice, depth + 1)).join(" or ");
  if (schema.type === "array") return schema.items && depth < 4 ? `list of ${typeOf(schema.items, depth + 1)}` : "list";
  const range = [schema.minimum ?? (schema.exclusiveMinimum !== undefined ? `above ${schema.exclusiveMinimum}` : undefined), schema.maximum].map(value => value ?? "");
  return (schema.type ?? "anything") + (range.some(value => value !== "") ? ` (${range.join(" to ")})` : "");
}

function form(method, path, parameters, body) {
  const inputs = parameters.map(parameter => { const input = make("input"); input.placeholder = parameter.name; input.setAttribute("aria-label", parameter.name); return input; });
  const text = make("textarea");
  text.rows = 4; text.value = JSON.stringify(EXAMPLES[body] ?? {}); text.setAttribute("aria-label", "Body");
  const button = make("button", "", "Send"), answer = make("pre", "answer");
  button.type = "button";
  button.addEventListener("click", async () => {
    const address = parameters.reduce((made, parameter, index) => made.replace(`{${parameter.name}}`, encodeURIComponent(inputs[index].value)), path);
    button.disabled = true;
    try {
      const response = await fetch(address, {method: method.toUpperCase(), headers: headers(), body: method === "post" ? text.value : undefined});
      answer.textContent = `${response.status}\n${(await response.text()).slice(0, SHOWN_CHARACTERS_MAX)}`;
    } catch (error) { answer.textContent = "no answer from the server"; }
    button.disabled = false;
  });
  const hasNoForm = path === "/cluster/events" || (path === "/v1/files" && method === "post");  // endless; an upload
  return make("div", "", hasNoForm ? [] : [...inputs, ...(method === "post" ? [text] : []), button, answer]);
}

keepKey(load);
load();
