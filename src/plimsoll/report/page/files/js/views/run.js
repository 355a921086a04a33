// A run: its verdict, and below it one of five parts, each with an address. Follows the run while it is written.
// A report has all parts one below the other: addresses are places in it, and nothing is followed.

import { address, get, onceAtATime, Problem } from "../api.js";
import { clean, el, renderList, setText } from "../dom.js";
import { isReport } from "../embedded.js";
import { take } from "../keys.js";
import { to, visit, withState } from "../router.js";
import { Stream } from "../stream.js";
import { badge, prose, setCollections } from "../words.js";
import { EventsPart } from "./events.js";
import { OverviewPart } from "./overview.js";
import { ScalarsPart } from "./scalars.js";
import { TensorPart } from "./tensors.js";
import { WhatIfPart } from "./whatif.js";

const PARTS = {
  overview: OverviewPart, finding: OverviewPart, pictures: OverviewPart, scalars: ScalarsPart, tensor: TensorPart, whatif: WhatIfPart, events: EventsPart, record: EventsPart,
};
const PROBLEMS = isReport ? 100 : 5; // that are listed

export class RunPage {
  constructor(frame, route) {
    Object.assign(this, { frame, id: route.id, route, run: null, paused: false, part: null });
    this.load = onceAtATime(() => this.#load());
    this.#build();
    this.leaveKeys = take([
      ...(isReport ? [] : [{ keys: [" "], says: "Pause, or follow the run again", act: () => this.pause(!this.paused) }]),
      ...[["o", "Overview", to.run], ["s", "Scalars", to.scalars], ["t", "Tensors", to.tensor], ["w", "What if", to.whatif], ["e", "Events and settings", to.events]]
        .map(([key, says, place]) => ({ keys: [key], says, act: () => visit(withState(place(this.id))) })),
    ]);
    if (!isReport) this.#follow();
    this.#place();
    this.load();
  }

  /** Takes the keys of a part; of a report, whose parts are all there at once, none. */
  take(bindings) { return isReport ? () => {} : take(bindings); }

  takes(route) { return route.view === "run" && route.id === this.id; }

  go(route) {
    const before = PARTS[this.route.part];
    this.route = route;
    this.#place();
    this.#nav();
    if (!this.run) return;
    if (isReport) return this.#show(route, before);
    if (before === PARTS[route.part]) this.part.go(route);
    else this.#part();
  }

  close() {
    this.closed = true;
    this.leaveKeys();
    this.frame.pause.onclick = null;
    this.stream?.close();
    this.part?.close();
    clearTimeout(this.timer);
  }

  #follow() {
    this.frame.pause.hidden = false;
    this.frame.pause.onclick = () => this.pause(!this.paused);
    this.stream = new Stream(address(["stream"], { run: this.id }), {
      run: (news) => this.#onNews(news),
      again: () => this.#onNews({ id: this.id, token: null }),
      state: (state) => { this.lost = state === "lost"; this.#sign(); },
    });
    this.pause(false);
  }

  /** Reads the run and shows its present state. */
  async #load() {
    clearTimeout(this.timer);
    if (this.closed) return;
    try {
      const run = await get(address(["runs", this.id]));
      setCollections(run);
      if (this.closed) return;
      const first = this.run === null;
      this.run = run;
      this.#tell("");
      this.#place();
      this.#fill();
      if (isReport) this.#parts();
      else if (first || !this.part) this.#part();
      else this.part.renew(run);
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      if (this.closed) return;
      this.#tell(problem);
      if (problem.status !== 404 && problem.status !== 401) this.timer = setTimeout(() => this.load(), 3000);
    }
  }

  /** While paused nothing on the page changes by itself. News is shown when the page follows again. */
  pause(paused) {
    this.paused = paused;
    setText(this.frame.pause, paused ? "Follow" : "Pause");
    this.frame.pause.setAttribute("aria-label", paused ? "Follow the run again" : "Pause: change nothing by itself");
    this.#sign();
    if (!paused && this.due) { this.due = false; this.load(); }
  }

  #onNews({ id, token }) {
    if (id !== this.id || token === (this.run?.token ?? token)) return; // the first reading is under way, or nothing is new
    if (this.paused) { this.due = true; this.#sign(); } else this.load();
  }

  #sign() {
    if (isReport) return;
    if (this.nav.hidden) return; // there is no run
    this.frame.pause.hidden = this.run?.summary.closed === true && !this.paused;
    const state = this.lost ? "lost" : this.paused ? (this.due ? "waiting" : "paused") : this.run?.summary.closed ? "ended" : this.run?.live === false ? "idle" : "live";
    this.frame.live(state);
  }

  #build() {
    this.badge = el("div", { class: "badge-place" });
    this.verdict = el("h1", { class: "verdict", "aria-live": "polite", tabindex: "-1" }, "Reading the run\u2026");
    this.facts = el("dl", { class: "facts" });
    this.problems = el("ul", { class: "problems", hidden: true });
    this.note = el("p", { class: "note", role: "alert", hidden: true });
    this.nav = el("nav", { class: "parts", "aria-label": "Parts of the run", hidden: true }, el("ul")); // until there is a verdict, which would push it down
    this.place = el("div", { class: "part", tabindex: "-1" });
    this.head = el("header", { class: "head" }, this.badge, this.verdict, this.facts, this.problems, this.note);
    this.frame.main.replaceChildren(el("article", { class: "view run-view" }, this.head, isReport ? null : this.nav, this.place));
    if (isReport) this.frame.contents.append(this.nav);
    this.#nav();
  }

  #place() {
    const name = clean(this.run?.name ?? this.id);
    const state = this.run ? ` (${this.run.summary.state})` : "";
    this.frame.place(`${name.slice(0, 80)}${state}`, [[name, null]]);
  }

  #nav() {
    const items = [
      [isReport ? "Findings" : "Overview", to.run(this.id), ["overview", "finding"]], ["Pictures", to.pictures(this.id), ["pictures"]],
      ["Scalars", to.scalars(this.id), ["scalars"]], ["Tensors", to.tensor(this.id), ["tensor"]], ["What if", to.whatif(this.id), ["whatif"]], ["Events", to.events(this.id), ["events"]],
      ["Record", to.record(this.id), ["record"]], ["Compare\u2026", to.list({ mark: this.id }), ["compare"]],
    ].filter(([, , [part]]) => (isReport ? this.#has(part) : !["pictures", "record"].includes(part)));
    this.head.classList.toggle("compact", !isReport && PARTS[this.route.part] !== OverviewPart);
    renderList(this.nav.firstElementChild, items, ([text]) => text, ([text, href]) => el("li", {}, el("a", { href }, text)), (node, [, , parts]) => {
      const link = node.firstElementChild;
      if (!isReport && parts.includes(this.route.part)) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    });
  }

  /** Whether a report has something to show in a part. */
  #has(part) {
    if (part === "pictures") return Boolean(this.run?.pictures.length);
    if (part === "scalars") return Boolean(this.run?.scalars.length);
    if (part === "tensor") return Object.keys(this.run?.collections ?? {}).length > 0;
    if (part === "events") return Boolean(this.run?.shown.events.length);
    return part === "whatif" ? Boolean(this.run?.whatif) : part !== "compare";
  }

  /** All parts, one below the other. */
  #parts() {
    const headings = [[OverviewPart, null, "overview"], [ScalarsPart, "Scalars", "scalars"], [TensorPart, "Tensors", "tensor"], [WhatIfPart, "What if", "whatif"], [EventsPart, null, "record"]];
    this.places = new Map();
    for (const [Part, heading, name] of headings.filter(([, , part]) => this.#has(part))) {
      const part = new Part(this);
      const element = heading ? el("div", { class: "titled" }, el("h2", { class: "part-title" }, heading), part.element) : part.element;
      this.places.set(Part, { part, element });
      this.place.append(element);
      part.renew(this.run);
      part.go({ part: name, collection: null, name: null, values: this.route.values });
    }
    this.place.append(el("footer", { class: "soft" }, this.run.made));
    this.#nav();
    if (location.hash) this.#show(this.route, null);
  }

  /** Brings the place of an address into view. */
  #show(route, before) {
    const { part, element } = this.places.get(PARTS[route.part]) ?? {};
    if (!part) return;
    if (route.part !== "overview") part.go(route);
    const chosen = before === PARTS[route.part] && (route.name || route.values.size); // something within what is in view
    if (chosen) return;
    const place = route.part === "overview" && !location.hash ? this.head : part.placeOf?.(route) ?? element;
    place.scrollIntoView({ block: "start" });
    if (place.tabIndex === -1) place.focus({ preventScroll: true });
  }

  #part() {
    const first = !this.part;
    const lost = this.place.contains(document.activeElement);
    this.part?.close();
    this.part = new PARTS[this.route.part](this);
    this.place.replaceChildren(this.part.element);
    this.part.renew(this.run);
    this.part.go(this.route);
    if (first) return;
    if (lost) this.place.focus({ preventScroll: true }); // the element that had the focus is gone
    if (this.nav.getBoundingClientRect().top < 0) this.nav.scrollIntoView({ block: "start" }); // else the part would begin out of view
  }

  #fill() {
    const { summary } = this.run;
    if (this.badge.dataset.state !== summary.state) this.badge.replaceChildren(badge(summary.state, { large: true }));
    this.badge.dataset.state = summary.state;
    prose(this.verdict, summary.verdict);
    renderList(this.facts, this.run.shown.facts, (fact, index) => index, () => el("div", {}, el("dt"), el("dd")),
      (node, [name, value]) => { setText(node.firstElementChild, name); prose(node.lastElementChild, value); });
    this.problems.hidden = summary.problems.length === 0;
    renderList(this.problems, summary.problems.slice(0, PROBLEMS), (text) => text, (text) => el("li", {}, clean(text).slice(0, 300)));
    this.#sign();
  }

  #tell(problem) {
    const missing = problem?.status === 404;
    const text = missing ? "No run of this name is in the served folder. It may have been moved or deleted." : problem?.text ?? "";
    this.note.replaceChildren(clean(text));
    this.note.hidden = text === "";
    this.nav.hidden = Boolean(problem && !this.run);
    if (!this.nav.hidden) return;
    delete this.verdict.dataset.prose;
    setText(this.verdict, missing ? "This run is not there" : "This run cannot be shown");
    this.note.append(" ", el("a", { href: to.list() }, "See the list of runs"), ".");
    this.frame.pause.hidden = true; // there is nothing to follow
    this.frame.live("");
  }
}
