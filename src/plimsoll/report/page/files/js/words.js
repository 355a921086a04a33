// Numbers, times and states in words.

import { clean, el } from "./dom.js";

const GROUPED = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });
const MINUS = "\u2212";
const SPANS = [[86400 * 365, "year"], [86400 * 30, "month"], [86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];

// A state is told by a sign and a word; its colour is there besides, never alone.
const STATES = {
  healthy: ["\u2713", "Healthy"],
  warning: ["!", "Warning"],
  alarm: ["\u2715", "Alarm"],
  empty: ["\u2013", "Empty"],
  unreadable: ["?", "Unreadable"],
  unknown: ["\u2026", "Not judged yet"],
  info: ["i", "Info"],
};

/** How grave a state is: the gravest first. */
export const GRAVITY = ["alarm", "unreadable", "warning", "unknown", "empty", "healthy", "info"];

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

/** Any number in three digits, as plimsoll/text.py writes it, or its name where it is not finite. */
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return whole(value);
  if (size >= 1e9 || size < 1e-3) return value.toExponential(2).replace("+", "").replaceAll("-", MINUS);
  return size >= 999.5 ? whole(value) : String(Number(value.toPrecision(3))).replace("-", MINUS);
}

/** A fraction in per cent, as plimsoll/text.py writes it: what is not quite none or all is never rounded to it. */
export function percent(fraction) {
  if (fraction >= 1) return `${whole(100 * fraction)}\u00a0%`;
  if (fraction > 0.99) return "over 99\u00a0%";
  if (fraction < 1e-4) return fraction > 0 ? "under 0.01\u00a0%" : "0\u00a0%";
  return `${Number((100 * fraction).toPrecision(2))}\u00a0%`;
}

// As plimsoll/diagnosis/what_if/result.py writes intervals, and single_file/templates/report.js.

/** An interval's estimate in per cent; about 0 where it may be more. */
export function estimate({ high, estimate: middle }) {
  return middle === 0 && high > 0 ? `about ${percent(0)}` : percent(middle);
}

/** The ends of an interval, in brackets after its estimate; nothing where they do not differ. */
export function between({ low, high }) {
  const [from, to] = [percent(low), percent(high)];
  return from === to ? "" : ` (${from} to ${to})`;
}

/** 2 to a power, as one reads it; copied, or read aloud, it is 2^14. */
export function power(exponent) {
  return el("span", { class: "power" }, "2", el("span", { class: "unseen" }, "^"), el("sup", {}, String(exponent).replace("-", MINUS)));
}

/** Prose with its powers of two, which come as 2^-14, as one reads them. Written anew only where it differs. */
export function prose(element, text) {
  const told = clean(text).replaceAll(/(?<=\d) (?=%)/g, "\u00a0");
  if (element.dataset.told === told) return;
  element.dataset.told = told;
  element.replaceChildren(...told.split(/(2\^-?\d+(?:\.\d+)?)/).map((part) => (part.startsWith("2^") ? power(part.slice(2)) : part)));
}

/** The value of 2 to a power, in few digits. */
export function powerValue(exponent) {
  if (exponent >= 0 && exponent <= 30) return whole(2 ** exponent);
  return number(2 ** exponent);
}

/** Time gone by since a moment (unix seconds). */
export function ago(moment, now = Date.now() / 1000) {
  const gone = Math.max(0, now - moment);
  if (gone < 5) return "now";
  const [seconds, name] = SPANS.find(([length]) => gone >= length);
  const many = Math.floor(gone / seconds);
  return `${many} ${name}${many === 1 ? "" : "s"} ago`;
}

/** A moment (unix seconds) as date and time of day, in UTC, as plimsoll/report/verdicts/summary_text.py writes it. */
export function moment(seconds) {
  return new Date(seconds * 1000).toISOString().replace("T", " ").replace(/\.\d+Z$/, " UTC");
}

/** "1 step", "2 steps". */
export function many(count, name) {
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

/** A rule's or figure's id as words: "underflow-high" is "Underflow high". */
export function title(id) {
  const text = String(id).replaceAll(/[-_]/g, " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}
