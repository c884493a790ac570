// The list of models: adapters stand under their base.

import { make } from "./dom.js";

/** Bases with their adapters, in the server's order: [{base, adapters: [{id, name}]}]. Models that only embed cannot chat. */
export function families(models) {
  const able = models.filter(chats);
  const known = new Set(able.map((model) => model.id));
  const found = new Map();
  for (const { id, orchard } of able) {
    const base = orchard?.base ?? (id.includes(":") ? id.slice(0, id.indexOf(":")) : id);
    const inFamily = base !== id && known.has(base);
    const own = inFamily ? base : id;
    if (!found.has(own)) found.set(own, { base: own, adapters: [] });
    if (inFamily) found.get(own).adapters.push({ id, name: id.slice(base.length + 1) });
  }
  return [...found.values()];
}

const chats = (model) => {
  const kinds = [model.type, model.orchard?.kind];
  return !kinds.some((kind) => /^embed/.test(kind ?? ""));
};

const contexts = new Map();

/** Tokens that a model's context holds, or null while the server does not say. */
export const contextOf = (id) => contexts.get(id) ?? null;

const idsOf = (select) => [...select.options].map((option) => option.value);

/** Fill a select, keeping what is chosen where that is still there. */
export function fill(select, models, wanted) {
  for (const model of models) contexts.set(model.id, model.orchard?.context ?? null);
  const groups = families(models).map(({ base, adapters }) => {
    const plain = make("option", { value: base }, base);
    if (!adapters.length) return plain;
    const adapted = adapters.map(({ id, name }) => make("option", { value: id }, `${base} + ${name}`));
    return make("optgroup", { label: base }, plain, ...adapted);
  });
  const fresh = make("select", {}, ...groups);
  const ids = idsOf(fresh);
  if (ids.length && ids.join("\n") === idsOf(select).join("\n")) return; // it may be open
  select.replaceChildren(...fresh.children);
  select.value = ids.includes(wanted) ? wanted : ids[0] ?? ""; // the server's first is its default
  select.disabled = ids.length === 0;
  if (!ids.length) select.append(make("option", { value: "" }, "No model that can chat"));
}
