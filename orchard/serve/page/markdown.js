// The part of Markdown that models write: paragraphs, headings, lists, quotes, code, bold, italic. Made of nodes and text
// only. Links and images stay the text they are: an answer must not be able to send anyone, or any data, anywhere.

import { button, copy, make } from "./dom.js";

const FENCE = /^\s{0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)(?:[-*+•]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*|__[^_\n]+__|\*[^*\s][^*\n]*\*)/;

const sources = new WeakMap(); // node → the block it was made from

/** Show `text` in `target`. Called again as text grows: blocks that did not change keep their nodes (and selections). */
export function render(target, text) {
  const blocks = parse(text);
  blocks.forEach((block, index) => {
    const source = JSON.stringify(block);
    const old = target.children[index];
    if (old && sources.get(old) === source) return;
    const node = nodeOf(block);
    sources.set(node, source);
    if (old) old.replaceWith(node);
    else target.append(node);
  });
  while (target.children.length > blocks.length) target.lastElementChild.remove();
}

/** Blocks: {kind, …}. One pass over the lines. */
export function parse(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      let end = at + 1;
      while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
      blocks.push({ kind: "code", language: /^[\w+#.-]*/.exec(fence[2].trim())[0], text: lines.slice(at + 1, end).join("\n") });
      at = end + 1;
    } else if (line.trim() === "") {
      at += 1;
    } else if (RULE.test(line)) {
      blocks.push({ kind: "rule" });
      at += 1;
    } else if (HEADING.test(line)) {
      const [, marks, words] = HEADING.exec(line);
      blocks.push({ kind: "heading", level: marks.length, text: words });
      at += 1;
    } else {
      const kind = ITEM.test(line) ? "list" : QUOTE.test(line) ? "quote" : "paragraph";
      let end = at + 1;
      while (end < lines.length && GOES_ON[kind](lines[end], lines[end + 1])) end += 1;
      const own = lines.slice(at, end);
      if (kind === "list") blocks.push({ kind, items: items(own) });
      else blocks.push({ kind, text: own.map((each) => (kind === "quote" ? QUOTE.exec(each)[1] : each)).join("\n").trim() });
      at = end;
    }
  }
  return blocks;
}

const closes = (line, marks) => line.trim().startsWith(marks) && line.trim().replaceAll(marks[0], "") === "";
const belongsToItem = (line) => ITEM.test(line) || (/^\s{2,}\S/.test(line) && !FENCE.test(line));

/** Whether a line goes on with a block of this kind, given the line after it. */
const GOES_ON = {
  list: (line, next) => belongsToItem(line) || (line.trim() === "" && next !== undefined && ITEM.test(next)),
  quote: (line) => QUOTE.test(line),
  paragraph: (line) => line.trim() !== "" && ![FENCE, HEADING, ITEM, QUOTE, RULE].some((kind) => kind.test(line)),
};

/** Items of a list with how deep they are: 0, 1, 2 … whatever width the text is indented by. */
function items(lines) {
  const found = [];
  const widths = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (!item) {
      if (line.trim()) found.at(-1).text += `\n${line.trim()}`;
      continue;
    }
    const width = item[1].replaceAll("\t", "    ").length;
    while (widths.length && widths.at(-1) > width) widths.pop();
    if (!widths.length || widths.at(-1) < width) widths.push(width);
    found.push({ depth: Math.min(widths.length - 1, 5), number: item[2] ? Number(item[2]) : null, text: item[3] });
  }
  return found;
}

function nodeOf(block) {
  if (block.kind === "code") return codeBlock(block.text, block.language);
  if (block.kind === "rule") return make("hr");
  if (block.kind === "heading") return inline(make(block.level < 3 ? "h3" : "h4"), block.text);
  if (block.kind === "list") return list(block.items);
  if (block.kind === "quote") return inline(make("blockquote"), block.text);
  return inline(make("p"), block.text);
}

function list(all) {
  const root = make("div", { class: "list" });
  const open = []; // one list per depth, the innermost last
  for (const { depth, number, text } of all) {
    const tag = number === null ? "ul" : "ol";
    open.length = Math.min(open.length, depth + 1);
    if (open.length === depth + 1 && open[depth].localName !== tag) open.length = depth;
    while (open.length <= depth) {
      const inner = make(tag, { start: number !== null && number !== 1 ? number : null });
      (open.at(-1)?.lastElementChild ?? open.at(-1) ?? root).append(inner);
      open.push(inner);
    }
    open[depth].append(inline(make("li"), text));
  }
  return root;
}

export function codeBlock(text, language) {
  const name = language || "code";
  const copier = button("Copy", () => copy(text, copier), { class: "link", "aria-label": `Copy ${name}` });
  const caption = make("figcaption", {}, make("span", {}, name), copier);
  return make("figure", { class: "code" }, caption, make("pre", { tabindex: "0" }, make("code", {}, text)));
}

function inline(target, text) {
  text.split(INLINE).forEach((part, index) => {
    if (index % 2 === 0) target.append(part);
    else if (part[0] === "`") target.append(make("code", {}, part.slice(1, -1)));
    else if (part.startsWith("**") || part.startsWith("__")) target.append(inline(make("strong"), part.slice(2, -2)));
    else target.append(inline(make("em"), part.slice(1, -1)));
  });
  return target;
}
