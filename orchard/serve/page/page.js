// The page: what happens when someone sends, stops, tries again or starts anew.

import { answerView, questionView } from "./answer.js";
import { chat, healthy, models, Problem, useKey } from "./api.js";
import { absorb, Conversation } from "./chat.js";
import { button, byId, fit, make, say } from "./dom.js";
import { SUGGESTIONS } from "./examples.js";
import { Clock, tokens } from "./figures.js";
import { contextOf, fill } from "./models.js";
import { BadSetting, modes, prepare, requestFields, switchOn, refresh, wantedModel } from "./settings.js";
import { openSheet, prepareSheet } from "./sheet.js";
import { recall, remember } from "./store.js";

const TOUCH = matchMedia("(pointer: coarse)"); // there, focus would bring up a keyboard over the answer
const AGAIN_MS = 3000; // between looks for a server that went away

const conversation = new Conversation();
const [scroller, turns, question] = ["conversation", "turns", "question"].map(byId);
let running = null; // the AbortController of the answer being written
let follow = true; // whether the newest words are kept in sight

const actions = { retry, edit, results, save: () => conversation.save(), drawn: keepInSight };

// Asking and answering ----------------------------------------------------------------------------------------------------

function send() {
  const text = question.value;
  if (running || !text.trim()) return;
  const fields = fieldsOrComplaint(false);
  if (!fields) return;
  setQuestion("");
  notice();
  addView(questionView(conversation.ask(text), actions));
  answer(fields);
}

async function answer(fields) {
  const system = byId("system").value;
  const messages = conversation.messages(system);
  const asJson = Boolean(fields.response_format);
  const { model, max_tokens: maxTokens = null } = fields;
  const turn = conversation.begin({ model, asJson, maxTokens, context: contextOf(model) });
  const view = answerView(turn, actions);
  follow = true;
  addView(view.element);
  setRunning(new AbortController());
  const clock = new Clock();
  try {
    for await (const chunk of chat({ ...fields, messages }, running.signal)) {
      if (absorb(turn, chunk)) clock.tick();
      view.update();
    }
  } catch (error) {
    if (error?.name === "AbortError") turn.stopped = true;
    else turn.problem = problemOf(error).data;
  }
  turn.calls = turn.problem || turn.stopped ? [] : turn.calls.filter(Boolean);
  Object.assign(turn, { running: false, times: clock.times });
  setRunning(null);
  view.finish();
  conversation.save();
  afterwards(turn);
}

function problemOf(error) {
  if (error instanceof Problem) return error;
  console.error(error);
  return new Problem("failed", "This page could not make sense of the server's answer.");
}

function afterwards(turn) {
  const kind = turn.problem?.kind;
  if (kind === "key") askForKey(turn.problem.message);
  else if (kind === "unreachable" || kind === "broken") lookForServer();
  else setState("ready", "Ready");
  if (!turn.problem && !contextOf(turn.model)) findModels(); // it is known once a model is loaded
  if (turn.problem) say("");
  else if (turn.calls.length) say(`The model calls ${turn.calls.map((call) => call.name).join(", ")}. Type the result.`);
  else say(`Answer ${turn.stopped ? "stopped" : "complete"}, ${tokens(turn.usage?.completion_tokens ?? 0)}.`);
  const result = turns.lastElementChild?.querySelector(".call textarea");
  if (result) result.focus();
  else if (!TOUCH.matches && [document.body, byId("stop")].includes(document.activeElement)) question.focus();
}

function retry(turn) {
  const fields = running ? null : fieldsOrComplaint(answersTools(turn));
  if (!fields) return;
  conversation.cut(turn);
  showAll();
  answer(fields);
}

/** Whether this answer follows tools' results and not a question. */
function answersTools(turn) {
  return conversation.turns[conversation.turns.indexOf(turn) - 1]?.role === "assistant";
}

function edit(turn) {
  if (running) return;
  conversation.cut(turn);
  setQuestion([turn.content, question.value].filter((text) => text.trim()).join("\n\n"));
  showAll();
  question.focus();
}

function results(turn) {
  const fields = running ? null : fieldsOrComplaint(true);
  if (!fields) return;
  for (const call of turn.calls) call.result ??= call.draft;
  conversation.save();
  showAll();
  answer(fields);
}

/** What to send, or null after saying which setting is in the way. The question stays where it is. */
function fieldsOrComplaint(free) {
  try {
    return requestFields(free);
  } catch (error) {
    if (!(error instanceof BadSetting)) throw error;
    notice(error.message, error.field.id === "model" ? null : button("Show the setting", () => openSheet(error.field)));
    return null;
  }
}

// What is on the page -----------------------------------------------------------------------------------------------------

function addView(element) {
  byId("welcome").hidden = true;
  turns.append(element);
  keepInSight();
}

function showAll() {
  turns.replaceChildren();
  byId("welcome").hidden = conversation.turns.length > 0;
  for (const turn of conversation.turns) {
    if (turn.role === "user") {
      turns.append(questionView(turn, actions));
    } else {
      const view = answerView(turn, actions);
      turns.append(view.element);
      view.finish();
    }
  }
}

function keepInSight() {
  if (follow) scroller.scrollTop = scroller.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  byId("stop").hidden = !controller;
  byId("send").hidden = Boolean(controller);
  document.body.classList.toggle("busy", Boolean(controller));
  if (controller) say("The model is answering.");
}

function setQuestion(text) {
  question.value = text;
  question.dispatchEvent(new Event("input"));
}

function notice(words = "", ...more) {
  byId("notice").hidden = !words;
  byId("notice").replaceChildren(...(words ? [make("span", {}, words), ...more.filter(Boolean)] : []));
}

function setState(state, words) {
  byId("state").dataset.state = state;
  byId("state-words").textContent = words;
}

function showModes() {
  const attributes = { class: "mode", title: "Change this in the settings" };
  byId("modes").replaceChildren(...modes().map(({ id, words }) => button(words, () => openSheet(byId(id)), attributes)));
}

function startAnew() {
  if (running) running.abort();
  const old = conversation.clear();
  showAll();
  question.focus();
  if (!old.length) return;
  const bringBack = button("Bring it back", () => {
    notice();
    conversation.turns = [...old, ...conversation.turns];
    conversation.save();
    showAll();
  });
  notice("The conversation was cleared.", bringBack);
}

// The server --------------------------------------------------------------------------------------------------------------

async function findModels() {
  try {
    fill(byId("model"), await models(), byId("model").value || wantedModel());
    refresh();
    setState("ready", "Ready");
    return true;
  } catch (error) {
    const { kind, message } = problemOf(error);
    if (kind === "key") askForKey(message);
    else if (kind === "unreachable") lookForServer();
    else setState("lost", "No models");
    if (kind !== "key" && kind !== "unreachable") notice(message, button("Look again", () => { notice(); findModels(); }));
    return false;
  }
}

let looking = false;

/** Look for a server that went away until it is back. */
async function lookForServer() {
  if (looking) return;
  looking = true;
  for (let first = true; !(await healthy()); first = false) {
    if (first) {
      setState("lost", "Server away");
      notice("The server cannot be reached. This page keeps looking for it; nothing you wrote is lost.");
    }
    await new Promise((done) => { setTimeout(done, AGAIN_MS); });
  }
  looking = false;
  if (byId("state").dataset.state === "lost") notice();
  await findModels();
}

function askForKey(message) {
  setState("lost", "Key needed");
  byId("key-form").hidden = false;
  byId("key-words").textContent = `${message} The key is kept for this tab only, until it is closed.`;
  byId("key").focus();
}

async function takeKey(event) {
  event.preventDefault();
  useKey(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  if (!(await findModels())) return;
  const last = conversation.turns.at(-1);
  if (last?.problem?.kind === "key") retry(last);
  else question.focus();
}

// Beginning ---------------------------------------------------------------------------------------------------------------

function listen() {
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("key-form").addEventListener("submit", takeKey);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("new-chat").addEventListener("click", startAnew);
  question.addEventListener("input", () => { remember("draft", question.value || null); fit(question); });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  new ResizeObserver(keepInSight).observe(scroller);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !event.defaultPrevented) running?.abort(); });
  let top = 0;
  scroller.addEventListener("scroll", () => {
    const gap = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
    follow = gap < 40 || (follow && scroller.scrollTop >= top); // only going up says that something else is being read
    top = scroller.scrollTop;
  }, { passive: true });
}

function suggest() {
  byId("suggestions").append(...SUGGESTIONS.map(({ title, words, mode }) => {
    const take = () => {
      if (mode) switchOn(mode);
      showModes();
      setQuestion(words);
      question.focus();
    };
    return make("li", {}, make("button", { type: "button", click: take }, make("strong", {}, title), make("span", {}, words)));
  }));
}

prepareSheet();
prepare(showModes);
listen();
suggest();
showModes();
showAll();
setQuestion(recall("draft") ?? "");
findModels();
if (!TOUCH.matches) question.focus();
