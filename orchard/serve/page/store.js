// What outlives a reload: kept by the browser for this tab, gone when the tab is closed, never part of an address.

const PREFIX = "orchard.";

/** A value kept under this name, or null where there is none or the browser keeps nothing. */
export function recall(name) {
  try {
    return JSON.parse(sessionStorage.getItem(PREFIX + name));
  } catch {
    return null;
  }
}

export function remember(name, value) {
  try {
    if (value === null) sessionStorage.removeItem(PREFIX + name);
    else sessionStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // No room, or not allowed: the page works on without it.
  }
}
