// One turn as the page shows it: a question, or an answer that grows while it is written, with its tool calls, its figures
// and what went wrong.

import { button, copy, fit, make } from "./dom.js";
import { ending, figureList } from "./figures.js";
import { pretty, read, show } from "./json.js";
import { render } from "./markdown.js";
import { problemCard } from "./problem.js";

export function questionView(turn, actions) {
  const edit = button("Edit", () => actions.edit(turn), { class: "link edit", "aria-label": "Edit this question" });
  const words = make("div", { class: "words" }, make("span", { class: "unseen" }, "You: "), turn.content);
  return make("li", { class: "turn user" }, words, make("div", { class: "actions" }, edit));
}

/** {element, update, finish}: `update` after every piece, `finish` once nothing more will come. */
export function answerView(turn, actions) {
  const thinking = make("div", { class: "words" });
  const thought = make("details", { class: "thinking", hidden: true }, make("summary", {}, "Thinking"), thinking);
  const body = make("div", { class: turn.asJson ? "body json" : "body", "aria-live": "polite", "aria-busy": "true" });
  const json = turn.asJson ? body.appendChild(make("pre", { tabindex: "0" })) : null;
  const calls = make("div", { class: "calls" });
  const after = make("div", { class: "after" });
  const element = make(
    "li",
    { class: "turn assistant" },
    make("p", { class: "who" }, turn.model),
    thought, body, calls, after,
  );
  let waiting = 0; // a frame that was asked for

  function draw() {
    waiting = 0;
    thought.hidden = !turn.reasoning;
    thinking.textContent = turn.reasoning;
    if (!json) render(body, turn.content);
    else if (turn.running || read(turn.content).ok) show(json, turn.content);
    else json.textContent = turn.content;
    body.hidden = !turn.content && !turn.running;
    if (turn.running) drawCalls(calls, turn);
    actions.drawn();
  }

  function finish() {
    cancelAnimationFrame(waiting);
    draw();
    element.classList.remove("running");
    body.setAttribute("aria-busy", "false");
    drawCalls(calls, turn, actions);
    after.replaceChildren(...below(turn, actions));
    actions.drawn();
  }

  element.classList.add("running");
  return { element, update: () => { waiting ||= requestAnimationFrame(draw); }, finish };
}

/** What stands below a finished answer. */
function below(turn, actions) {
  const words = ending(turn);
  const text = turn.asJson && read(turn.content).ok ? pretty(turn.content) : turn.content;
  const copier = button("Copy", () => copy(text, copier), { class: "link", "aria-label": "Copy this answer" });
  const again = button("Try again", () => actions.retry(turn), { class: "link retry", "aria-label": "Answer again" });
  const actionRow = make("div", { class: "actions" }, turn.content ? copier : null, turn.problem ? null : again);
  return [
    turn.asJson && turn.content ? jsonVerdict(turn) : null,
    words ? make("p", { class: "ending" }, words) : null,
    turn.problem ? problemCard(turn.problem, () => actions.retry(turn)) : null,
    make("div", { class: "under" }, figureList(turn), actionRow),
  ].filter(Boolean);
}

function jsonVerdict(turn) {
  const { ok, reason } = read(turn.content);
  const cut = turn.finish === "length" || turn.stopped || turn.problem ? ", because the answer is not complete" : `: ${reason}`;
  return make("p", { class: "verdict", "data-ok": ok ? "yes" : "no" }, ok ? "Valid JSON" : `Not valid JSON${cut}`);
}

/** Cards of the calls. With `actions` the answer is complete, and results can be typed where there are none. */
function drawCalls(target, turn, actions = null) {
  if (!turn.calls.length) return;
  const open = actions && turn.calls.some((call) => call.result == null);
  const cards = turn.calls.map((call, index) => callCard(call, index, actions));
  if (!open) {
    target.replaceChildren(...cards);
    return;
  }
  const send = (event) => {
    event.preventDefault();
    actions.results(turn);
  };
  const words = turn.calls.length > 1 ? "Send results" : "Send result";
  target.replaceChildren(make("form", { submit: send }, ...cards, make("button", { type: "submit", class: "main" }, words)));
}

function callCard(call, index, actions) {
  const given = make("pre", { class: "json", tabindex: "0" });
  if (actions && !read(call.arguments).ok) given.textContent = call.arguments;
  else show(given, call.arguments);
  const card = make("section", { class: "call", "aria-label": `Call of the tool ${call.name}` },
    make("p", { class: "call-name" }, make("span", { class: "hint" }, "Tool call"), make("code", {}, call.name)), given);
  if (call.result != null) {
    card.append(make("p", { class: "hint" }, "Its result"), make("pre", { class: "result", tabindex: "0" }, call.result));
  } else if (actions) {
    card.append(resultField(call, index, actions));
  }
  return card;
}

function resultField(call, index, actions) {
  const id = `result-${call.id || index}`;
  const area = make("textarea", { id, rows: "2", placeholder: "Type what the tool gives back: JSON or plain words" });
  area.value = call.draft;
  area.addEventListener("input", () => {
    call.draft = area.value;
    fit(area);
    actions.save();
  });
  return make("div", {}, make("label", { for: id }, `Result of ${call.name}`), area);
}
