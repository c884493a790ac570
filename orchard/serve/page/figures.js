// What an answer cost, in figures: how fast it was written, how long the first token took, what was read and what of it was
// known already; and how it ended, in words.

import { make } from "./dom.js";

/** When things happened, in milliseconds since the question was sent. */
export class Clock {
  #start = performance.now();
  first = null;
  last = null;

  tick() {
    this.last = performance.now() - this.#start;
    this.first ??= this.last;
  }

  get times() {
    return { first: this.first, last: this.last, total: performance.now() - this.#start };
  }
}

/** [label, value] pairs of an answer; only what is known. */
export function figures({ usage, times, context }) {
  const found = [];
  const written = usage?.completion_tokens ?? 0;
  const writing = times ? times.last - times.first : 0; // the first token belongs to reading the prompt
  if (written > 1 && writing > 0) found.push(["Speed", `${rate(((written - 1) / writing) * 1000)} tokens/s`]);
  if (times?.first != null) found.push(["First token", duration(times.first)]);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    found.push(["Answer", tokens(written)]);
    found.push(["Prompt", `${tokens(usage.prompt_tokens ?? 0)}, ${cached ? count(cached) : "none"} cached`]);
    const used = (usage.prompt_tokens ?? 0) + written;
    if (context && used > context / 2) found.push(["Context", `${count(used)} of ${tokens(context)}`]);
  } else if (times?.first != null) {
    found.push(["Time", duration(times.total)]); // stopped or broken off: the server's own count comes last
  }
  return found;
}

export function figureList(turn) {
  const list = make("dl", { class: "figures", "aria-label": "Figures of this answer" });
  for (const [label, value] of figures(turn)) list.append(make("div", {}, make("dt", {}, label), make("dd", {}, value)));
  return list;
}

/** How an answer ended, where that needs saying. */
export function ending(turn) {
  if (turn.stopped) return "You stopped this answer. What was written is kept.";
  if (turn.finish === "length") {
    const limit = turn.maxTokens && (turn.usage?.completion_tokens ?? turn.maxTokens) >= turn.maxTokens;
    return limit
      ? `Cut off: it reached the limit of ${tokens(turn.maxTokens)}. Raise “Max tokens” in the settings for longer answers.`
      : "Cut off: there is no room left in the model's context. A new chat, or a shorter question, makes room.";
  }
  if (turn.finish === "content_filter") return "The server withheld the rest of this answer.";
  if (turn.finish === "stop" && !turn.content && !turn.calls.length) return "The model had nothing to say.";
  return "";
}

/** Both counts of a server's words about a conversation that is too long: {used, room}, or null where it names none. */
export function contextCounts(message) {
  const numbers = [...message.matchAll(/(?<![\w.-])\d[\d,]*(?!\w)/g)].map(([text]) => Number(text.replaceAll(",", "")));
  if (numbers.length < 2) return null;
  const [one, other] = numbers; // servers differ in which they name first
  return { used: Math.max(one, other), room: Math.min(one, other) };
}

export const count = (number) => number.toLocaleString("en");
export const tokens = (number) => `${count(number)} ${number === 1 ? "token" : "tokens"}`;
const rate = (number) => (number < 10 ? number.toFixed(1) : count(Math.round(number)));
const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`);
