// The settings stand beside the conversation on a wide screen and slide over it on a narrow one.

import { byId } from "./dom.js";

const wide = matchMedia("(min-width: 60rem)");
const [sheet, shade, opener, main] = ["settings", "shade", "open-settings", "main"].map(byId);

export function prepareSheet() {
  opener.addEventListener("click", () => (isOpen() ? close() : openSheet()));
  byId("close-settings").addEventListener("click", close);
  shade.addEventListener("click", close);
  document.addEventListener("keydown", (event) => { 
    if (event.key !== "Escape" || !isOpen()) return;
    event.preventDefault(); // the same key stops an answer
    close();
  });
  wide.addEventListener("change", () => set(false));
  set(false);
}

const isOpen = () => sheet.classList.contains("open");

/** Bring the settings up, and one field of them into sight. */
export function openSheet(field = null) {
  if (!wide.matches) set(true);
  const target = field ?? byId("close-settings");
  target.focus();
  target.scrollIntoView({ block: "nearest" });
}

function close() {
  set(false);
  opener.focus();
}

/** A closed sheet on a narrow screen is out of reach for the keyboard too, and so is what lies under an open one. */
function set(open) {
  sheet.classList.toggle("open", open);
  sheet.inert = !open && !wide.matches;
  main.inert = open;
  shade.hidden = !open;
  opener.setAttribute("aria-expanded", String(open));
}
