// The conversation as data: who said what, and what the server is sent of it. It knows nothing of the page, and outlives
// a reload.

import { recall, remember } from "./store.js";

const NO_RESULT = "No result: the tool was not run.";

/** A turn is {role: "user", content} or {role: "assistant", content, reasoning, calls, …}; a call keeps its own result. */
export class Conversation {
  constructor() {
    const kept = recall("turns");
    this.turns = Array.isArray(kept) ? kept : [];
    for (const turn of this.turns) if (turn.running) Object.assign(turn, { running: false, stopped: true });
  }

  ask(content) {
    return this.#add({ role: "user", content });
  }

  /** An answer that is about to be written. `asJson`: the answer is held to a schema. */
  begin({ model, asJson, maxTokens, context }) {
    const empty = { content: "", reasoning: "", calls: [], finish: null, usage: null, times: null, problem: null };
    return this.#add({ role: "assistant", model, asJson, maxTokens, context, running: true, stopped: false, ...empty });
  }

  #add(turn) {
    this.turns.push(turn);
    this.save();
    return turn;
  }

  /** Forget a turn and all after it; these are given back. */
  cut(turn) {
    const at = this.turns.indexOf(turn);
    const gone = at < 0 ? [] : this.turns.splice(at);
    this.save();
    return gone;
  }

  clear() {
    return this.turns.length ? this.cut(this.turns[0]) : [];
  }

  save() {
    remember("turns", this.turns);
  }

  /** Whether the model waits for tools' results. */
  get waiting() {
    const last = this.turns.at(-1);
    return last?.role === "assistant" && last.calls.some((call) => call.result == null);
  }

  /** Messages of the API. Answers of which nothing arrived are left out; every call gets a result, as the API asks. */
  messages(system) {
    const out = system.trim() ? [{ role: "system", content: system }] : [];
    for (const turn of this.turns) {
      if (turn.role === "user") {
        out.push({ role: "user", content: turn.content });
      } else if (turn.calls.length && !turn.running) {
        out.push({ role: "assistant", content: turn.content || null, tool_calls: turn.calls.map(callOf) });
        for (const call of turn.calls) out.push({ role: "tool", tool_call_id: call.id, content: call.result ?? NO_RESULT });
      } else if (turn.content) {
        out.push({ role: "assistant", content: turn.content });
      }
    }
    return out;
  }
}

const callOf = ({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } });

/** Take one chunk of a streamed answer into its turn. Whether it carried anything that was written. */
export function absorb(turn, chunk) {
  if (chunk.usage) turn.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  if (choice.finish_reason) turn.finish = choice.finish_reason;
  const { content, reasoning_content: reasoning, refusal, tool_calls: calls } = choice.delta ?? {};
  turn.content += content ?? refusal ?? "";
  turn.reasoning += reasoning ?? "";
  for (const part of calls ?? []) {
    const call = (turn.calls[part.index ?? turn.calls.length] ??= { id: "", name: "", arguments: "", draft: "", result: null });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  return Boolean(content || reasoning || refusal || calls?.length);
}
