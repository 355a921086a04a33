// Numbers, times and states in words, as plimsoll/text.py writes them.

import { clean, el, short } from "./dom.js";

const GROUPED = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });
const MINUS = "\u2212";
const SPANS = [[86400 * 365, "year"], [86400 * 30, "month"], [86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];

// A state has a sign and a word besides its colour, which not everyone sees.
const STATES = {
  healthy: ["\u2713", "Healthy"],
  warning: ["!", "Warning"],
  alarm: ["\u2715", "Alarm"],
  empty: ["\u2013", "Empty"],
  unreadable: ["?", "Unreadable"],
  unknown: ["\u2026", "Not judged yet"],
  info: ["i", "Info"],
};

/** All states, the most severe first. */
export const SEVERITY_ORDER = ["alarm", "unreadable", "warning", "unknown", "empty", "healthy", "info"];

/** The state as a sign and a word. */
export function badge(state, { large = false } = {}) {
  const known = state in STATES ? state : "unknown";
  const [sign, word] = STATES[known];
  return el("span", { class: `badge ${known}${large ? " large" : ""}`, "data-state": known },
    el("span", { class: "sign", "aria-hidden": "true" }, sign), el("span", { class: "word" }, word));
}

/** A whole number, in groups of three. */
export function whole(value) {
  return typeof value === "number" && Number.isFinite(value) ? GROUPED.format(value).replace("-", MINUS) : "\u2013";
}

/** Any number in three digits, or its name where it is not finite. */
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return whole(value);
  if (size >= 1e9 || size < 1e-3) return value.toExponential(2).replace("+", "").replaceAll("-", MINUS);
  return size >= 999.5 ? whole(value) : String(Number(value.toPrecision(3))).replace("-", MINUS);
}

/** A fraction in per cent. A share that is not quite none or all is never rounded to it. */
export function percent(fraction) {
  if (fraction >= 1) return `${whole(100 * fraction)}\u00a0%`;
  if (fraction > 0.99) return "over 99\u00a0%";
  if (fraction < 1e-4) return fraction > 0 ? "under 0.01\u00a0%" : "0\u00a0%";
  return `${Number((100 * fraction).toPrecision(2))}\u00a0%`;
}

// As plimsoll/diagnosis/what_if/result.py writes intervals.

/** An interval's estimate in per cent; about 0 where it may be more. */
export function estimate({ high, estimate: middle }) {
  return middle === 0 && high > 0 ? `about ${percent(0)}` : percent(middle);
}

/** The ends of an interval, in brackets after its estimate; nothing where they do not differ. */
export function between({ low, high }) {
  const [from, to] = [percent(low), percent(high)];
  return from === to ? "" : ` (${from} to ${to})`;
}

/** A power of two with a raised exponent. Copied, or read aloud, it is 2^14. */
export function power(exponent) {
  return el("span", { class: "power" }, "2", el("span", { class: "unseen" }, "^"), el("sup", {}, String(exponent).replace("-", MINUS)));
}

/** Writes prose whose powers of two come as 2^-14. Nothing is written where the text is the same. */
export function prose(element, text) {
  const shown = clean(text).replaceAll(/(?<=\d) (?=%)/g, "\u00a0");
  if (element.dataset.prose === shown) return;
  element.dataset.prose = shown;
  element.replaceChildren(...shown.split(/(2\^-?\d+(?:\.\d+)?)/).map((part) => (part.startsWith("2^") ? power(part.slice(2)) : part)));
}

/** The value of 2 to a power, in few digits. */
export function powerValue(exponent) {
  if (exponent >= 0 && exponent <= 30) return whole(2 ** exponent);
  return number(2 ** exponent);
}

/** Time gone by since a moment (unix seconds). */
export function ago(moment, now = Date.now() / 1000) {
  const seconds = Math.max(0, now - moment);
  if (seconds < 5) return "now";
  const [length, name] = SPANS.find(([span]) => seconds >= span);
  return `${counted(Math.floor(seconds / length), name)} ago`;
}

/** A moment (unix seconds) as date and time of day, in UTC, as plimsoll/report/verdicts/summary_text.py writes it. */
export function moment(seconds) {
  return new Date(seconds * 1000).toISOString().replace("T", " ").replace(/\.\d+Z$/, " UTC");
}

/** "1 step", "2 steps". */
export function counted(count, name) {
  return `${whole(count)} ${name}${count === 1 ? "" : "s"}`;
}

let labels = {};

/** Takes over the labels of all collections, in the order of lists, from an answer of the server. */
export function setCollections(answer) {
  labels = answer.collection_labels;
}

/** The names of all collections that can be recorded, in the order of lists. */
export function collectionNames() {
  return Object.keys(labels);
}

/** The label of a collection. */
export function collectionWords(name) {
  return title(labels[name] ?? name);
}

/** A tensor as a title: "Weights of blocks.0.mlp.weight". */
export function tensorWords(tensor) {
  return tensor ? `${collectionWords(tensor.collection)} of ${short(tensor.name, 60)}` : "";
}

/** A rule's or figure's id as words: "underflow-high" is "Underflow high". */
export function title(id) {
  const text = String(id).replaceAll(/[-_]/g, " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}
