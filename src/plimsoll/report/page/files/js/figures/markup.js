// The little HTML that Plotly reads in texts of a figure, as nodes and as plain text.

import { el } from "../dom.js";

/** A figure's text as nodes: of its markup only raised digits stay. The parser's document is inert: nothing in it is run, loaded or shown. */
function nodes(markup) {
  const { body } = new DOMParser().parseFromString(markup.replaceAll("<br>", " "), "text/html");
  const read = (node) => [...node.childNodes].flatMap((child) => (child.nodeName === "SUP" ? [el("span", { class: "unseen" }, "^"), el("sup", {}, child.textContent)]
    : child.nodeType === Node.TEXT_NODE ? child.data : read(child)));
  return read(body);
}

/** A figure's text without markup; a raised 14 is ^14. */
export function readMarkup(markup) {
  return nodes(markup).map((part) => part.textContent ?? part).join("");
}

/** Writes a figure's text into an element. */
export function writeMarkup(element, markup = "") {
  if (element.dataset.markup === markup) return;
  element.dataset.markup = markup;
  element.replaceChildren(...nodes(markup));
}

/** Any text as a figure shows it: nothing in it is markup. */
export function plain(text) {
  return String(text).replace(/[&<>$]/g, (sign) => `&#${sign.charCodeAt(0)};`);
}
