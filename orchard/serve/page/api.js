// The server's public HTTP interface, and what goes wrong with it, in words. Nothing here is known to this page alone:
// any OpenAI client can do the same.

import { events } from "./events.js";
import { recall, remember } from "./store.js";

const TITLES = {
  key: "An API key is needed",
  busy: "The server is busy",
  stopping: "The server is not taking questions now",
  context: "The conversation is too long for this model",
  refused: "The server could not accept this",
  failed: "The server failed to answer",
  unreachable: "The server cannot be reached",
  broken: "The answer broke off",
};

/** What went wrong: `kind` is a key of TITLES, `message` the server's own words where it had any. */
export class Problem extends Error {
  constructor(kind, message, { status = null, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { kind, title: TITLES[kind], status, code, retryAfter });
  }

  /** As plain data, so that it can be kept with the answer that it ended. */
  get data() {
    const { kind, title, message, status, code, retryAfter } = this;
    return { kind, title, message, status, code, retryAfter };
  }
}

let key = recall("key") ?? "";

export function useKey(value) {
  key = value.trim();
  remember("key", key || null);
}

export const hasKey = () => key !== "";

/** Names of all models and of their adapters ("base:adapter"), with what the server tells of each. */
export async function models() {
  const response = await request("v1/models");
  const body = await response.json();
  return Array.isArray(body?.data) ? body.data.filter((model) => typeof model?.id === "string") : [];
}

/** Whether the server is there; one that refuses is there as well. */
export async function healthy() {
  try {
    return (await request("health")).ok;
  } catch (error) {
    return error.status != null && error.status < 500;
  }
}

/** The chunks of a streamed answer. Ends after the server's last word; anything else is a Problem or the caller's abort. */
export async function* chat(body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(asked),
    signal,
  });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw problemOf(chunk.error, Number(chunk.error.status) || 500, null);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Problem || error?.name === "AbortError") throw error;
  }
  throw new Problem("broken", "The connection ended before the answer did. What arrived is kept.");
}

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    const url = new URL(path, document.baseURI);
    response = await fetch(url, { cache: "no-store", credentials: "omit", redirect: "error", ...options, headers });
  } catch (error) {
    if (error?.name === "AbortError") throw error;
    const words = "No answer from the server. Check that it is still running and that this device is connected.";
    throw new Problem("unreachable", words);
  }
  if (response.ok) return response;
  throw problemOf(await errorOf(response), response.status, retryAfter(response.headers.get("retry-after")));
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  try {
    const body = JSON.parse(text);
    return body.error ?? { message: body.detail };
  } catch {
    return { message: text.slice(0, 500) };
  }
}

function problemOf(error, status, seconds) {
  const known = typeof error === "string" ? { message: error } : error ?? {};
  const message = typeof known.message === "string" && known.message ? known.message : `The server answered ${status}.`;
  const code = typeof known.code === "string" ? known.code : null;
  return new Problem(kindOf(status, code), message, { status, code, retryAfter: seconds });
}

function kindOf(status, code) {
  if (code === "context_length_exceeded") return "context";
  if (status === 401) return "key";
  if (status === 429) return "busy";
  if (status === 503) return "stopping";
  return status >= 500 ? "failed" : "refused";
}

/** Seconds, from a number of seconds or a date. */
function retryAfter(header) {
  if (!header) return null;
  const seconds = /^\d+(\.\d+)?$/.test(header) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : null;
}
