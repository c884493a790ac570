// What went wrong, as a card: the server's words, when to try again, and a way to do so.

import { button, make } from "./dom.js";
import { contextCounts, count } from "./figures.js";

/** A card for one problem (see api.js). `retry` sends the same question again; nothing is lost by waiting. */
export function problemCard(problem, retry) {
  const words = [make("strong", {}, problem.title), make("p", {}, problem.message)];
  const card = make("div", { class: "problem", role: "alert" }, ...words);
  if (problem.kind === "context") card.append(...contextUse(problem.message));
  if (problem.kind === "key") {
    card.append(make("p", { class: "hint" }, "Type the key below; your question is then sent again."));
    return card;
  }
  const when = make("span", { class: "hint", role: "timer" });
  const again = button("Try again", retry, { class: "retry" });
  card.append(make("div", { class: "row" }, again, when));
  if (problem.retryAfter) countDown(problem, when);
  return card;
}

/** How full the context is, with both counts. */
function contextUse(message) {
  const counts = contextCounts(message);
  const advice = make("p", { class: "hint" }, "Start a new chat, shorten the system text, or lower “Max tokens”.");
  if (!counts) return [advice];
  const { used, room } = counts;
  const words = `${count(used)} of ${count(room)} tokens`;
  const fits = make("span");
  fits.style.width = `${(100 * room) / used}%`;
  const gauge = make("div", { class: "gauge", "aria-hidden": "true" }, fits);
  return [make("div", { class: "context" }, gauge, make("span", {}, words)), advice];
}

/** Say how long to wait, every second, as long as the card is on the page. */
function countDown(problem, target) {
  problem.until ??= Date.now() + problem.retryAfter * 1000;
  const tick = () => {
    const left = Math.ceil((problem.until - Date.now()) / 1000);
    target.textContent = left > 0 ? `The server asks to wait ${left} s` : "You can try again now";
    if (left > 0) setTimeout(() => { if (target.isConnected) tick(); }, 250);
  };
  tick();
}
