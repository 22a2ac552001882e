// Markdown as elements of the document. The text of a model never becomes HTML: `lexer` splits it, and every part is set as text.
import {make} from "./common.js";
import {lexer} from "./marked.js";

const CHARACTERS_MAX = 200000;  // a longer text is shown as it is, because each new token parses the whole text again
const SAFE_LINK = /^(https?:|mailto:)/i;

// Show a growing text. Only the blocks that changed since the last call are made again.
export class MarkdownView {
  constructor(element) { this.element = element; this.shown = []; }

  show(text) {
    const blocks = parse(text); let same = 0;
    while (same < blocks.length && blocks[same].raw === this.shown[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const block of blocks.slice(same)) this.element.append(blockElement(block));
    this.shown = blocks.map(block => block.raw);
  }
}

// A text that is nested too deeply for the parser is one block of plain text.
function parse(text) {
  const plain = [{type: "plain", raw: text, text}];
  if (text.length > CHARACTERS_MAX) return plain;
  try { return lexer(text).filter(block => block.type !== "space" && block.type !== "def"); } catch (error) { return plain; }
}

// Every block has one element, even if its content is nested too deeply for this browser.
function blockElement(block) {
  try { return element(block); } catch (error) { return make("p", "plain", block.raw); }
}

const elements = tokens => tokens.map(element);

function element(token) {
  switch (token.type) {
    case "heading": return make(`h${Math.min(token.depth + 2, 6)}`, "", elements(token.tokens));
    case "paragraph": return make("p", "", elements(token.tokens));
    case "blockquote": return make("blockquote", "", elements(token.tokens));
    case "code": return codeBlock(token);
    case "list": return list(token);
    case "table": return table(token);
    case "hr": return make("hr");
    case "br": return make("br");
    case "strong": case "em": case "del": return make(token.type, "", elements(token.tokens));
    case "codespan": return make("code", "", token.text);
    case "link": return link(token.href, elements(token.tokens));
    case "image": return link(token.href, [token.text || token.href]);  // the page loads nothing from elsewhere
    case "checkbox": return token.checked ? "☑ " : "☐ ";
    case "text": return token.tokens ? make("span", "", elements(token.tokens)) : withEntities(token.text);
    case "escape": return token.text;
    case "space": case "def": return "";
    default: return make("span", "plain", token.raw);  // HTML, among others
  }
}

// Markdown has HTML's names of characters, such as &amp;.
function withEntities(text) {
  return text.replace(/&(#\d{1,7}|#x[0-9a-f]{1,6}|[a-z][a-z0-9]{1,31});/gi, name => new DOMParser().parseFromString(name, "text/html").documentElement.textContent);
}

function link(href, content) {
  if (!SAFE_LINK.test(href)) return make("span", "", content);
  const found = make("a", "", content);
  found.href = href; found.target = "_blank"; found.rel = "noopener noreferrer";
  return found;
}

function list(token) {
  const found = make(token.ordered ? "ol" : "ul", "", token.items.map(item => make("li", "", elements(item.tokens))));
  if (token.ordered && Number.isInteger(token.start)) found.start = token.start;
  return found;
}

function table(token) {
  const row = (cells, name) => make("tr", "", cells.map(cell => make(name, cell.align === "right" ? "n" : "", elements(cell.tokens))));
  return make("div", "scroll", [make("table", "", [make("thead", "", [row(token.header, "th")]), make("tbody", "", token.rows.map(cells => row(cells, "td")))])]);
}

function codeBlock(token) {
  const code = make("code", "", token.text);
  const head = make("div", "code-head", [make("span", "", (token.lang ?? "").split(" ")[0]), copyButton("Copy code", () => token.text)]);
  const body = make("pre", "", code);
  body.tabIndex = 0;  // the keyboard scrolls a long line
  return make("div", "code", [head, body]);
}

// A button that copies a text, and says whether it did.
export function copyButton(name, text) {
  const button = make("button", "act", "copy");
  button.type = "button"; button.setAttribute("aria-label", name);
  button.addEventListener("click", async () => {
    button.textContent = await copy(text()) ? "copied" : "not allowed";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  return button;
}

// Browsers have a clipboard only for pages from https or from this machine. The older way works for all.
async function copy(text) {
  if (navigator.clipboard) {
    try { await navigator.clipboard.writeText(text); return true; } catch (error) { /* not allowed: go on with the older way */ }
  }
  const area = make("textarea");
  area.value = text; document.body.append(area); area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
