// What happened in a run, and how it was recorded: events, settings, versions, what is missing.

import { clean, el, keep, say } from "./dom.js";
import { moment, title, whole } from "./words.js";

export class EventsPart {
  constructor() {
    this.rows = el("tbody");
    this.none = el("p", { class: "soft" });
    this.table = el("table", { class: "events" }, el("caption", { class: "unseen" }, "Events, the latest first"),
      el("thead", {}, el("tr", {}, ["Step", "What", "Message", "When"].map((text) => el("th", { scope: "col" }, text)))), this.rows);
    this.settings = el("dl", { class: "settings" });
    this.element = el("div", {},
      el("section", { "aria-labelledby": "events-title" }, el("h2", { id: "events-title" }, "Events"), this.none, this.table),
      el("section", { "aria-labelledby": "settings-title" }, el("h2", { id: "settings-title" }, "Settings and versions"), this.settings));
  }

  go() {}
  close() {}

  renew(run) {
    const events = [...run.events].reverse();
    say(this.none, events.length ? (events.length >= 200 ? "The last 200." : "") : "No event was recorded: no skipped step, no trigger, no act of a guard.");
    this.table.hidden = events.length === 0;
    const seen = new Map();
    const keyed = [...run.events].map((event) => {
      const key = JSON.stringify(event);
      seen.set(key, (seen.get(key) ?? 0) + 1);
      return [event, `${key}${seen.get(key)}`];
    }).reverse();
    keep(this.rows, keyed, ([, key]) => key, ([event]) => rowOf(event));
    const pairs = [
      ...Object.entries(run.summary.formats ?? {}).map(([name, formats]) => [`Format of ${name}`, formats.join(", ") || "not said"]),
      ...Object.entries(run.settings).map(([name, value]) => [title(name), told(value)]),
      ...Object.entries(run.summary.versions ?? {}).map(([name, value]) => [`Version of ${name}`, told(value)]),
      ...Object.entries(run.summary.dropped ?? {}).map(([name, value]) => [`Dropped: ${name}`, told(value)]),
    ];
    keep(this.settings, pairs, ([name], index) => `${index} ${name}`, ([name]) => el("div", {}, el("dt", {}, clean(name).slice(0, 100)), el("dd")),
      (node, [, text]) => say(node.lastElementChild, text));
  }
}

function rowOf(event) {
  const details = Object.entries(event.details ?? {});
  return el("tr", {},
    el("td", { class: "number" }, whole(event.step)), el("td", {}, clean(title(event.kind)).slice(0, 60)),
    el("td", {}, el("span", {}, clean(event.message ?? "").slice(0, 500)), details.length
      ? el("p", { class: "soft details" }, clean(details.map(([name, value]) => `${name}: ${told(value)}`).join(", ")).slice(0, 500)) : null),
    el("td", { class: "soft when" }, typeof event.time === "number" ? moment(event.time) : ""));
}

function told(value) {
  return clean(typeof value === "string" ? value : JSON.stringify(value)).slice(0, 500);
}
