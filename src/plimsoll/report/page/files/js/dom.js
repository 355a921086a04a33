// Elements made of text. Nothing here, or anywhere in this page, reads data as HTML: names of a run may be hostile.

const SVG = "http://www.w3.org/2000/svg";
const INVISIBLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu; // control, bidirectional and unpaired characters

/** An element. Attributes: `on*` are listeners, null and false are left out, true is an empty one. Children: nodes, text. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An element of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Any text of a run as it can be shown: characters that cannot be seen, or that reverse the text, become a sign. */
export function clean(text) {
  return String(text).replace(INVISIBLE, "\uFFFD");
}

/** A name, its middle left out where it is long. */
export function short(name, most = 64) {
  const text = clean(name);
  if (text.length <= most) return text;
  const half = Math.floor(most / 2) - 1;
  return `${text.slice(0, half)}\u2026${text.slice(-half)}`;
}

/** A name in a span; where it is cut, the whole (up to 2,000 characters) is its title. */
export function named(name, most = 64) {
  const text = short(name, most);
  const whole = clean(name);
  const parts = text.split(/(?<=[._:/-])/); // a line may break after these
  return el("span", { class: "name", title: text === whole ? null : whole.slice(0, 2000) },
    parts.map((part, index) => [index ? el("wbr") : null, part]));
}

/** Sets the text only where it differs: a screen reader announces, and a selection loses, every text that is set. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** One child for each item, found again by key. Nodes that stay are changed by `update` only, so focus and selection stay. */
export function renderList(parent, items, keyOf, make, update = () => {}) {
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const before = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let next = parent.firstElementChild;
  for (const [index, item] of items.entries()) {
    const key = String(keyOf(item, index));
    let node = before.get(key);
    before.delete(key);
    if (!node) {
      node = make(item, index);
      node.dataset.key = key;
    }
    update(node, item, index);
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
  for (const node of before.values()) node.remove();
  // A node that is moved loses the focus.
  if (focused && focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}

/** The options of a select, without losing the choice; an unknown choice is added. */
export function setOptions(select, names, value, words = (name) => name) {
  const all = value && !names.includes(value) ? [...names, value] : names;
  renderList(select, all, (name) => name, (name) => el("option", { value: name }), (node, name) => setText(node, clean(words(name))));
  select.value = value;
}

/** Brings an element below the sticky header, if it is not in view. */
export function reveal(element) {
  const { top } = element.getBoundingClientRect();
  if (top > innerHeight * 0.8 || top < 50) element.scrollIntoView({ block: "start" });
}
