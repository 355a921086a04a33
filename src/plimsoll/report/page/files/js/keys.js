// Keys: each view declares those that it takes and their action; `?` shows them.

import { el } from "./dom.js";

const TYPED = "select, textarea, input:not([type=checkbox], [type=range])"; // these take letters themselves
const PRESSED = new Set(["BUTTON", "SUMMARY", "A", "INPUT", "SELECT"]); // these take the space bar themselves
const SHOWN = { " ": "Space", ArrowDown: "\u2193", ArrowUp: "\u2191", ArrowLeft: "\u2190", ArrowRight: "\u2192", Enter: "Enter", Escape: "Esc" };

let bindings = [];

/** Takes keys: a list of `{ keys: ["j", "ArrowDown"], says, act }`. Returns a function that gives them up. */
export function take(list) {
  bindings = [...bindings, ...list];
  return () => {
    bindings = bindings.filter((binding) => !list.includes(binding));
  };
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const target = event.target instanceof Element ? event.target : document.body;
  if (target.closest("dialog")) return;
  if (target.matches(TYPED) && event.key !== "Escape") return;
  if (target.matches("input[type=range]") && event.key.startsWith("Arrow")) return;
  if (event.key === " " && PRESSED.has(target.tagName)) return;
  const binding = bindings.find(({ keys }) => keys.includes(event.key));
  if (binding && binding.act(event) !== false) event.preventDefault();
}

/** Starts to listen; `dialog` shows the keys that are taken. */
export function listen(dialog, list, button) {
  const show = () => {
    list.replaceChildren(...bindings.filter(({ says }) => says).flatMap(({ keys, says }) => [
      el("dt", {}, keys.map((key, i) => [i ? " or " : "", el("kbd", {}, SHOWN[key] ?? key)])), el("dd", {}, says),
    ]));
    if (!dialog.open) dialog.showModal();
  };
  take([{ keys: ["?"], says: "Show these keys", act: show }]);
  button.addEventListener("click", show);
  document.addEventListener("keydown", pressed);
}
