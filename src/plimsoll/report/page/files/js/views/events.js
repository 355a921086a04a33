// What happened in a run, and how it was recorded, in the words of the report (plimsoll/report/verdicts/summary_text.py).

import { clean, el, renderList, setText } from "../dom.js";
import { isReport } from "../embedded.js";
import { prose } from "../words.js";

export class EventsPart {
  constructor() {
    this.rows = el("tbody");
    this.none = el("p", { class: "soft" });
    this.table = el("table", { class: "events" }, el("caption", { class: "unseen" }, "Events, the latest first"),
      el("thead", {}, el("tr", {}, ["Step", "What", "Message", "When"].map((text) => el("th", { scope: "col" }, text)))), this.rows);
    this.record = el("dl", { class: "settings" });
    this.settings = el("dl", { class: "settings" });
    this.events = el("section", { "aria-labelledby": "events-title" }, el("h2", { id: "events-title" }, "Events"), this.none, this.table);
    this.recorded = el("section", { "aria-labelledby": "record-title" }, el("h2", { id: "record-title" }, "The record"), this.record);
    const heading = el("h2", { id: "settings-title" }, "Settings");
    this.written = isReport ? el("details", {}, el("summary", { id: "settings-title" }, "Settings"), this.settings)
      : el("section", { "aria-labelledby": "settings-title" }, heading, this.settings);
    this.element = el("div", {}, this.events, this.recorded, this.written);
  }

  go() {}
  close() {}

  /** The place of a route on this part. */
  placeOf(route) { return route.part === "record" ? this.recorded : this.events; }

  renew({ shown }) {
    setText(this.none, shown.events.length ? shown.events_words : "No event was recorded: no skipped step, no trigger, no act of a guard.");
    this.none.hidden = this.none.textContent === "";
    this.table.hidden = shown.events.length === 0;
    this.written.hidden = shown.settings.length === 0;
    this.recorded.hidden = shown.record.length === 0;
    const seen = new Map();
    const keyed = shown.events.toReversed().map((event) => { // the same event twice has two keys, in the order of time
      const key = JSON.stringify(event);
      seen.set(key, (seen.get(key) ?? 0) + 1);
      return [event, `${key}${seen.get(key)}`];
    }).toReversed();
    renderList(this.rows, keyed, ([, key]) => key, ([event]) => rowOf(event));
    list(this.record, shown.record);
    list(this.settings, shown.settings);
  }
}

function list(element, pairs) {
  renderList(element, pairs, ([name], index) => `${index} ${name}`, ([name]) => el("div", {}, el("dt", {}, clean(name)), el("dd")),
    (node, [, text]) => setText(node.lastElementChild, clean(text)));
}

function rowOf([step, kind, message, details, when]) {
  return el("tr", {}, el("td", { class: "number" }, step), el("td", {}, clean(kind)),
    el("td", {}, withProse("span", message), details ? withProse("p", details, "soft details") : null), el("td", { class: "soft when" }, when));
}

function withProse(tag, text, kind = null) {
  const element = el(tag, { class: kind });
  prose(element, text);
  return element;
}
