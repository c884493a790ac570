// The settings beside the conversation: what they hold, whether it can be sent, and that it outlives a reload.

import { byId } from "./dom.js";
import { SCHEMA, TOOLS } from "./examples.js";
import { read } from "./json.js";
import { recall, remember } from "./store.js";

const PLAIN = ["model", "system", "temperature", "max-tokens", "seed"];
const FIELDS = [...PLAIN, "schema-on", "schema", "tools-on", "tools", "tool-choice"];
const MODES = ["schema", "tools"];

/** A setting that cannot be sent as it is: the field, and what is wrong with it. */
export class BadSetting extends Error {
  constructor(id, message) {
    super(message);
    this.field = byId(id);
  }
}

/** Fill the fields with what they held, and call `changed` whenever something is. */
export function prepare(changed) {
  const kept = recall("settings") ?? {};
  for (const id of FIELDS) {
    const field = byId(id);
    if (id in kept && field.type === "checkbox") field.checked = kept[id] === true;
    else if (id in kept && id !== "model") field.value = kept[id];
    field.addEventListener("input", () => { refresh(); changed(); });
  }
  for (const mode of MODES) byId(`${mode}-example`).addEventListener("click", () => { insertExample(mode); changed(); });
  refresh();
}

export const wantedModel = () => recall("settings")?.model ?? "";

/** Switch a mode on, with its example where the field is empty. */
export function switchOn(mode) {
  byId(`${mode}-on`).checked = true;
  if (!byId(mode).value.trim()) insertExample(mode);
  if (mode === "tools") byId("tool-choice").value = "required";
  refresh();
}

function insertExample(mode) {
  byId(mode).value = JSON.stringify(mode === "schema" ? SCHEMA : TOOLS, null, 2);
  byId(`${mode}-on`).checked = true;
  refresh();
}

/** Show what follows from the fields, and keep them. */
export function refresh() {
  byId("temperature-value").value = Number(byId("temperature").value).toFixed(2).replace(/0$/, "");
  for (const mode of MODES) byId(`${mode}-fields`).hidden = !byId(`${mode}-on`).checked;
  judge("schema", () => schema() && "Valid JSON: answers will match it");
  judge("tools", () => `Offered to the model: ${tools().map((tool) => tool.function.name).join(", ")}`);
  const values = FIELDS.map((id) => [id, byId(id).type === "checkbox" ? byId(id).checked : byId(id).value]);
  remember("settings", { ...Object.fromEntries(values), model: byId("model").value || wantedModel() });
}

/** Say below a field whether it can be sent: `check` gives the words for one that can, or throws. */
function judge(id, check) {
  const words = byId(`${id}-words`);
  try {
    words.textContent = check();
    words.dataset.ok = "yes";
  } catch (error) {
    words.textContent = error.message;
    words.dataset.ok = "no";
  }
  byId(id).setAttribute("aria-invalid", String(words.dataset.ok === "no"));
}

function schema() {
  const { ok, value, reason } = read(byId("schema").value);
  if (!ok) throw new BadSetting("schema", `Not valid JSON yet: ${reason}`);
  const isObject = value !== null && typeof value === "object" && !Array.isArray(value);
  if (!isObject) throw new BadSetting("schema", "A JSON Schema is an object: { … }");
  return value;
}

function tools() {
  const { ok, value, reason } = read(byId("tools").value);
  if (!ok) throw new BadSetting("tools", `Not valid JSON yet: ${reason}`);
  const all = Array.isArray(value) ? value : [value];
  if (!all.length) throw new BadSetting("tools", "The list is empty: add a tool, or switch tools off");
  const bad = all.findIndex((tool) => typeof tool?.function?.name !== "string" || !tool.function.name);
  if (bad >= 0) throw new BadSetting("tools", `Tool ${bad + 1} needs {"type": "function", "function": {"name": …}}`);
  return all;
}

function whole(id, name, least) {
  const field = byId(id);
  if (field.validity.badInput) throw new BadSetting(id, `${name} must be a whole number`);
  if (field.value === "") return undefined;
  const number = Number(field.value);
  if (Number.isSafeInteger(number) && number >= least) return number;
  throw new BadSetting(id, `${name} must be a whole number, ${least} or more`);
}

/** Everything of a request but its messages; fields left empty are left to the server. `free`: no tool has to be called. */
export function requestFields(free) {
  const model = byId("model").value;
  if (!model) throw new BadSetting("model", "Choose a model first");
  const fields = { model, temperature: Number(byId("temperature").value) };
  Object.assign(fields, { max_tokens: whole("max-tokens", "Max tokens", 1), seed: whole("seed", "Seed", 0) });
  if (byId("schema-on").checked) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: schema() } };
  }
  if (byId("tools-on").checked) {
    const choice = byId("tool-choice").value;
    Object.assign(fields, { tools: tools(), tool_choice: free && choice === "required" ? "auto" : choice });
  }
  return fields;
}

/** Modes that are on, in words, for beside the question. */
export function modes() {
  const found = [];
  if (byId("schema-on").checked) found.push({ id: "schema", words: "JSON" });
  const choice = byId("tool-choice").value === "required" ? "Tools, always" : "Tools";
  if (byId("tools-on").checked) found.push({ id: "tools", words: choice });
  return found;
}
