// The list of runs: filter, sort, keys, and marks for a comparison.

import { get, onceAtATime, Problem } from "../api.js";
import { el, keep, named, say, short } from "../dom.js";
import { take } from "../keys.js";
import { replace, to } from "../router.js";
import { Stream } from "../stream.js";
import { ago, badge, GRAVITY, many, moment, prose, whole } from "../words.js";

// Columns: id, heading, the key to sort by, and whether the first click sorts downwards.
const COLUMNS = [
  ["state", "State", (run) => GRAVITY.indexOf(run.state), false],
  ["name", "Run", (run) => run.name.toLowerCase(), false],
  ["step", "Last step", (run) => run.last_step, true],
  ["live", "Writing", (run) => (run.live ? 0 : run.closed ? 2 : 1), false],
  ["age", "Changed", (run) => -run.modified, false],
  ["tensors", "Tensors", (run) => run.tensors, true],
];

const NUMBERS = new Set(["step", "tensors"]);

export class ListPage {
  constructor(frame, route) {
    this.frame = frame;
    this.runs = null;
    this.marked = [];
    this.load = onceAtATime(() => this.#load());
    this.#build();
    this.go(route);
    this.leaveKeys = take(this.#keys());
    this.stream = new Stream("/api/stream", {
      runs: () => this.load(),
      again: () => this.load(),
      state: (state) => frame.live(state === "open" ? "live" : "lost"),
    });
    this.clock = setInterval(() => this.#ages(), 20_000);
    this.load();
  }

  takes(route) { return route.view === "list"; }

  go(route) {
    this.frame.place("Runs", []);
    this.filter.value = route.values.get("filter") ?? "";
    const [column, way] = (route.values.get("sort") ?? "age").split(".");
    this.sort = { column: COLUMNS.some(([id]) => id === column) ? column : "age", down: way === "down" };
    const mark = route.values.get("mark");
    if (mark !== null && !this.marked.includes(mark)) this.marked = [mark];
    this.#show();
  }

  close() {
    this.leaveKeys();
    this.stream.close();
    clearInterval(this.clock);
    this.closed = true;
  }

  async #load() {
    if (this.closed) return;
    try {
      const { folder, runs } = await get("/api/runs");
      if (this.closed) return;
      Object.assign(this, { folder, runs, problem: null });
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      this.problem = problem;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.load(), 3000);
    }
    if (!this.closed) this.#show();
  }

  #build() {
    this.filter = el("input", { type: "search", id: "filter", placeholder: "Filter by name, state or verdict",
      "aria-label": "Filter runs", autocomplete: "off", spellcheck: "false", oninput: () => this.#chosen(), onkeydown: (e) => this.#fromFilter(e) });
    this.tally = el("p", { class: "soft", role: "status" });
    this.heads = COLUMNS.map(([id, text]) => el("th", { scope: "col", class: `col-${id}`, "data-column": id },
      el("button", { type: "button", class: "sort", onclick: () => this.#sortBy(id) }, text)));
    this.body = el("tbody");
    this.note = el("div", { class: "note" });
    this.table = el("table", { class: "runs" }, el("caption", { class: "unseen" }, "Runs; columns can be sorted by"),
      el("thead", {}, el("tr", {}, this.heads, el("th", { scope: "col", class: "col-mark" }, el("span", { class: "unseen" }, "Compare")))), this.body);
    this.tray = el("div", { class: "tray", role: "status", hidden: true });
    this.frame.main.replaceChildren(el("section", { class: "view list-view" },
      el("div", { class: "bar" }, el("h1", {}, "Runs"), this.tally, this.filter), this.note, this.table, this.tray));
  }

  #show() {
    const runs = this.runs ?? [];
    const shown = this.#sorted(runs.filter(matcher(this.filter.value)));
    keep(this.body, shown, (run) => run.id, (run) => this.#row(run), (row, run) => this.#fill(row, run));
    for (const head of this.heads) {
      const mine = head.dataset.column === this.sort.column;
      head.setAttribute("aria-sort", mine ? (this.sort.down ? "descending" : "ascending") : "none");
    }
    this.table.hidden = shown.length === 0;
    say(this.tally, this.runs === null ? "Reading\u2026" : tallied(shown.length, runs.length, this.folder));
    this.#tell(runs.length, shown.length);
    this.#showMarks();
  }

  #tell(all, shown) {
    const text = this.problem ? [`${this.problem.message} ${this.problem.advice}`]
      : this.runs === null || shown ? []
      : all ? ["No run matches the filter. Shorten it, or press Escape in it."]
      : ["No run is here yet. Begin one with ", el("code", {}, "plimsoll.watch(model, optimizer, run=\u2026)"), " or ",
         el("code", {}, "plimsoll run -o \u2026 train.py"), "; it appears by itself."];
    const key = text.map((part) => part.textContent ?? part).join("");
    if (this.note.dataset.text !== key) this.note.replaceChildren(...text);
    this.note.dataset.text = key;
    this.note.hidden = text.length === 0;
  }

  #row(run) {
    const state = el("td", { class: "col-state" });
    const link = el("a", { href: to.run(run.id), class: "run-link" });
    const verdict = el("p", { class: "verdict-line" });
    const cells = ["step", "live", "age", "tensors"].map((id) => el("td", { class: `col-${id}${NUMBERS.has(id) ? " number" : ""}` }));
    const mark = el("input", { type: "checkbox", onchange: () => this.#mark(run.id), "aria-label": `Mark ${short(run.name)} for a comparison` });
    const row = el("tr", { onclick: (event) => opens(event, link) },
      state, el("th", { scope: "row", class: "col-name" }, link, verdict), cells, el("td", { class: "col-mark" }, mark));
    row.parts = { state, link, verdict, cells, mark };
    return row;
  }

  #fill(row, run) {
    const told = this.marked.includes(run.id);
    if (row.run === run && row.told === told) return; // only its place has changed
    Object.assign(row, { run, told });
    const { state, link, verdict, cells, mark } = row.parts;
    if (state.dataset.state !== run.state) state.replaceChildren(badge(run.state));
    state.dataset.state = run.state;
    if (link.dataset.name !== run.name) link.replaceChildren(named(run.name, 56));
    link.dataset.name = run.name;
    prose(verdict, run.problem ?? run.verdict ?? "");
    verdict.hidden = verdict.textContent === "";
    const [step, live, age, tensors] = cells;
    say(step, run.last_step >= 0 ? whole(run.last_step) : "\u2013");
    live.classList.toggle("is-live", run.live);
    say(live, run.live ? "live" : run.closed ? "closed" : run.state === "unreadable" ? "\u2013" : "not closed");
    age.dataset.moment = run.modified;
    say(age, ago(run.modified));
    age.title = moment(run.modified);
    say(tensors, run.tensors ? whole(run.tensors) : "\u2013");
    mark.checked = told;
  }

  #ages() {
    for (const cell of this.body.querySelectorAll("[data-moment]")) say(cell, ago(Number(cell.dataset.moment)));
  }

  #sorted(runs) {
    const [, , key] = COLUMNS.find(([id]) => id === this.sort.column);
    const way = this.sort.down ? -1 : 1;
    const keyed = runs.map((run) => [key(run), run]);
    keyed.sort(([a, first], [b, second]) => (a < b ? -way : a > b ? way : second.modified - first.modified));
    return keyed.map(([, run]) => run);
  }

  #sortBy(id) {
    const first = COLUMNS.find(([each]) => each === id)[3];
    this.sort = { column: id, down: this.sort.column === id ? !this.sort.down : first };
    this.#chosen();
  }

  /** The filter and the order are part of the address, but no steps back. */
  #chosen() {
    const { column, down } = this.sort;
    const sort = column === "age" && !down ? null : `${column}${down ? ".down" : ""}`;
    replace(to.list({ filter: this.filter.value, sort }));
    this.#show();
  }

  #mark(id) {
    this.marked = this.marked.includes(id) ? this.marked.filter((each) => each !== id) : [...this.marked, id].slice(-2);
    this.#show();
  }

  #showMarks() {
    const runs = this.marked.map((id) => (this.runs ?? []).find((run) => run.id === id)).filter(Boolean);
    this.tray.hidden = runs.length === 0;
    const text = runs.map((run) => run.id).join("\n");
    if (this.tray.dataset.text === text) return;
    this.tray.dataset.text = text;
    const names = runs.map((run, i) => [i ? " with " : "", named(run.name, 28)]);
    this.tray.replaceChildren(...(runs.length === 2
      ? [el("a", { href: to.compare(runs[0].id, runs[1].id), class: "go" }, "Compare ", names)]
      : runs.length ? [el("span", {}, "Compare ", names, " with another: mark it too")] : []),
      el("button", { type: "button", class: "quiet", onclick: () => { this.marked = []; this.#show(); } }, "Unmark"));
  }

  #keys() {
    return [
      { keys: ["j", "ArrowDown"], says: "Next run", act: () => this.#move(1) },
      { keys: ["k", "ArrowUp"], says: "Run before", act: () => this.#move(-1) },
      { keys: ["Home"], act: () => this.#move(-Infinity) },
      { keys: ["End"], act: () => this.#move(Infinity) },
      { keys: ["Enter"], says: "Open the run", act: () => false }, // the link's own
      { keys: ["/"], says: "Filter", act: () => this.filter.focus() },
      { keys: ["c"], says: "Mark the run for a comparison", act: () => this.#markHere() },
      { keys: ["v"], says: "Compare the two that are marked", act: () => this.tray.querySelector("a")?.click() },
      { keys: ["Escape"], act: (event) => this.#escape(event) },
    ];
  }

  #move(by) {
    const links = [...this.body.querySelectorAll(".run-link")];
    if (!links.length) return;
    const here = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
    const next = here < 0 ? 0 : Math.min(Math.max(here + by, 0), links.length - 1);
    links[next].focus();
    links[next].closest("tr").scrollIntoView({ block: "nearest" });
  }

  #markHere() {
    const row = document.activeElement?.closest("tr[data-key]");
    if (row) this.#mark(row.dataset.key);
  }

  #escape(event) {
    if (event.target !== this.filter) return false;
    if (this.filter.value) { this.filter.value = ""; this.#chosen(); } else this.#move(0);
  }

  #fromFilter(event) {
    if (event.key !== "ArrowDown" && event.key !== "Enter") return;
    event.preventDefault();
    this.#move(0);
  }
}

/** Whether a run holds every word of the filter in its name, state, or verdict. */
function matcher(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return (run) => {
    const told = `${run.name} ${run.state} ${run.verdict ?? ""} ${run.live ? "live" : ""}`.toLowerCase();
    return words.every((word) => told.includes(word));
  };
}

function tallied(shown, all, folder) {
  const count = shown === all ? many(all, "run") : `${whole(shown)} of ${many(all, "run")}`;
  return `${count} in ${short(folder, 48)}`;
}

/** A click anywhere on a row opens it, but not one on a control or one that selects text. */
function opens(event, link) {
  if (event.target.closest("a, input, label, button") || getSelection().toString()) return;
  if (event.ctrlKey || event.metaKey) window.open(link.href, "_blank", "noopener");
  else link.click();
}
