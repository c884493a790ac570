// Elements, made without markup: every word from a model, a server or a person enters the page as text and never as HTML.

/** An element with attributes, listeners (values that are functions) and children (nodes or text; null is left out). */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** A button that does something; `type=button`, so that it never sends a form by accident. */
export function button(words, action, attributes = {}) {
  return make("button", { type: "button", ...attributes, click: action }, words);
}

/** Put text on the clipboard, and say on the button whether that worked. */
export async function copy(text, from) {
  const words = from.textContent;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copyBySelection(text); // the clipboard's own interface is missing on plain http away from this machine
  }
  from.textContent = done ? "Copied" : "Copying failed";
  setTimeout(() => { from.textContent = words; }, 1500);
}

function copyBySelection(text) {
  const area = make("textarea", { class: "unseen", readonly: true, "aria-hidden": "true" });
  const before = document.activeElement;
  area.value = text;
  document.body.append(area);
  area.select();
  let done = false;
  try {
    done = document.execCommand("copy");
  } catch {
    done = false;
  }
  area.remove();
  before?.focus();
  return done;
}

/** Tell people who listen to the page rather than look at it. */
export function say(words) {
  byId("spoken").textContent = words;
}

/** Let a text area be as tall as its text; its stylesheet holds the most. */
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}
