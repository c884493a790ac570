// JSON as people read it: indented and coloured, from its own text. Numbers keep every digit and keys their order, and an
// answer that is still being written is shown as far as it goes.

import { make } from "./dom.js";

const TOKEN = /"(?:[^"\\]|\\.)*"?|-?\d[\d.eE+-]*|[a-z]+|[{}[\],:]|[^\s]/gsy;
const SPACE = /\s*/y;
const STEP = "  ";
const DEEPEST = 40; // brackets further in are not indented further: a model may write nothing but brackets

/** What JSON.parse says of a text: {ok, value} or {ok: false, reason}. */
export function read(text) {
  try {
    return { ok: true, value: JSON.parse(text) };
  } catch (error) {
    return { ok: false, reason: text.trim() ? error.message : "there is nothing here" };
  }
}

/** Indented text, in pieces of [class, text]. */
export function pieces(text) {
  const out = [];
  let depth = 0;
  let fresh = false; // just after an opening bracket
  for (let at = skip(text, 0); at < text.length; at = skip(text, TOKEN.lastIndex)) {
    TOKEN.lastIndex = at;
    const token = TOKEN.exec(text)[0];
    const closing = token === "}" || token === "]";
    if (closing) depth = Math.max(0, depth - 1);
    if (fresh !== closing && (fresh || closing)) out.push(["", newLine(depth)]);
    fresh = token === "{" || token === "[";
    if (fresh) depth += 1;
    if (token === ",") out.push(["mark", ","], ["", newLine(depth)]);
    else if (token === ":") out.push(["mark", ": "]);
    else out.push([kind(token, text, TOKEN.lastIndex), token]);
  }
  return out;
}

/** Show a text as JSON in `target`. */
export function show(target, text) {
  target.replaceChildren(...pieces(text).map(([name, piece]) => (name ? make("span", { class: `json-${name}` }, piece) : piece)));
}

export const pretty = (text) => pieces(text).map(([, piece]) => piece).join("");

const newLine = (depth) => `\n${STEP.repeat(Math.min(depth, DEEPEST))}`;

function skip(text, from) {
  SPACE.lastIndex = from;
  SPACE.exec(text);
  return SPACE.lastIndex;
}

function kind(token, text, after) {
  if (token[0] === '"') return text[skip(text, after)] === ":" ? "key" : "string";
  if (/^[-\d]/.test(token)) return "number";
  return /^[a-z]/.test(token) ? "word" : "mark";
}
