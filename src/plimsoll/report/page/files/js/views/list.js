// The list of runs: filter, order, groups, columns of settings, keys, tags, and marks for a comparison.

import { address, get, onceAtATime, Problem } from "../api.js";
import { el, named, renderList, setText, short, clean } from "../dom.js";
import { take } from "../keys.js";
import { remember, remembered } from "../memory.js";
import { change, MOST_COMPARED, to } from "../router.js";
import { matcher } from "../search.js";
import { Stream } from "../stream.js";
import { ago, badge, counted, moment, number, prose, SEVERITY_ORDER, whole } from "../words.js";
import { fillGroup, folderOf, groupRow, rowsOf } from "./groups.js";

// Columns: id, heading, the key to sort by, and whether the first click sorts downwards.
const COLUMNS = [
  ["state", "State", (run) => SEVERITY_ORDER.indexOf(run.state), false],
  ["name", "Run", (run) => run.id.toLowerCase(), false],
  ["step", "Last step", (run) => run.last_step, true],
  ["live", "Writing", (run) => (run.live ? 0 : run.closed ? 2 : 1), false],
  ["age", "Changed", (run) => -run.modified, false],
  ["tensors", "Tensors", (run) => run.tensors, true],
];
const NUMBERS = new Set(["step", "tensors"]);
const SETTING = "setting:"; // before a setting's name in the order of an address
const MOST_SETTINGS = 8; // columns of settings that fit beside each other
const TAGS = "tags";
const CONDITION = /^([^\s<>=!]+)(<=|>=|!=|=|<|>)(.*)$/; // lr<=0.01, optimizer.name=AdamW
const FILTER_HELP = "Words in name, state, verdict or tags. A glob (sweep/*) or a regular expression for the name. Settings: lr<0.01, optimizer=AdamW.";

/** A run that was written again under its old name is another one: tags are of a folder and its beginning. */
export const tagKey = (run) => `${run.id}@${run.created ?? ""}`;

export class ListPage {
  constructor(frame, route) {
    this.frame = frame;
    this.runs = null;
    this.settings = [];
    this.tags = remembered(TAGS);
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
    const { values } = route;
    this.frame.place("Runs", []);
    this.filter.value = values.get("filter") ?? "";
    const [, column, way] = /^(.*?)(?:\.(down))?$/s.exec(values.get("sort") ?? "age");
    this.sort = { column: COLUMNS.some(([id]) => id === column) || column.startsWith(SETTING) ? column : "age", down: way === "down" };
    this.columns = values.getAll("column").slice(0, MOST_SETTINGS);
    this.marked = values.getAll("mark").slice(0, MOST_COMPARED);
    this.opened = new Set(values.getAll("open"));
    this.#asked();
    this.#show();
  }

  close() {
    this.leaveKeys();
    this.stream.close();
    clearInterval(this.clock);
    this.closed = true;
  }

  /** Reads the list, with the settings that are shown, sorted or filtered by. */
  async #load() {
    if (this.closed) return;
    const wanted = this.#wanted();
    try {
      const { folder, runs, settings } = await get(address(["runs"], { column: wanted }));
      if (this.closed) return;
      Object.assign(this, { folder, runs, settings, loaded: wanted, problem: null });
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      this.problem = problem;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.load(), 3000);
    }
    if (!this.closed) this.#show();
  }

  #wanted() {
    const sorted = this.sort.column.startsWith(SETTING) ? [this.sort.column.slice(SETTING.length)] : [];
    const filtered = this.filter.value.split(/\s+/).map((word) => CONDITION.exec(word)?.[1]).filter(Boolean);
    return [...new Set([...this.columns, ...sorted, ...filtered])].slice(0, 2 * MOST_SETTINGS);
  }

  /** Reads the list again where a setting is wanted that was not read. */
  #asked() {
    if (this.runs !== null && this.#wanted().some((name) => !this.loaded.includes(name))) this.load();
  }

  #build() {
    this.filter = el("input", { type: "search", id: "filter", placeholder: "Filter: words, glob, lr<0.01", title: FILTER_HELP,
      "aria-label": "Filter runs", autocomplete: "off", spellcheck: "false", oninput: () => this.#chosen(), onkeydown: (e) => this.#fromFilter(e) });
    this.tally = el("p", { class: "soft", role: "status" });
    this.boxes = el("div", { class: "boxes" });
    this.chooser = el("details", { class: "menu" }, el("summary", {}, "Columns"), this.boxes);
    this.heads = el("tr");
    this.body = el("tbody");
    this.note = el("div", { class: "note" });
    this.table = el("table", { class: "runs" }, el("caption", { class: "unseen" }, "Runs; columns can be sorted by"), el("thead", {}, this.heads), this.body);
    this.tray = el("div", { class: "tray", role: "group", "aria-label": "Marked runs", hidden: true });
    this.frame.main.replaceChildren(el("section", { class: "view list-view" },
      el("div", { class: "bar" }, el("h1", {}, "Runs"), this.tally, this.chooser, this.filter), this.note, el("div", { class: "scrolls" }, this.table), this.tray));
  }

  #show() {
    const runs = this.runs ?? [];
    const shown = this.#sorted(runs.filter(this.#matching()));
    this.#showHeads();
    this.rows = this.filter.value.trim() ? shown.map((run) => ({ key: run.id, run })) : rowsOf(shown, this.opened);
    renderList(this.body, this.rows, ({ key }) => key, (row) => (row.run ? this.#row(row.run) : groupRow(row, (folder) => this.#toggleGroup(folder), (folder) => this.#markGroup(folder))),
      (node, row) => (row.run ? this.#fill(node, row) : fillGroup(node, row, this.marked, this.columns, (value, name) => settingCell(value, this.#isNumber(name)))));
    this.table.hidden = shown.length === 0;
    setText(this.tally, this.runs === null ? "Reading\u2026" : tallied(shown.length, runs.length, this.folder));
    this.#tell(runs.length, shown.length);
    this.#showColumns();
    this.#showMarks();
  }

  #showHeads() {
    const heads = [...COLUMNS.map(([id, text]) => [id, text]), ...this.columns.map((name) => [SETTING + name, name])];
    renderList(this.heads, [...heads, ["mark", ""]], ([id]) => id, ([id, text]) => (id === "mark"
      ? el("th", { scope: "col", class: "col-mark" }, el("span", { class: "unseen" }, "Mark"))
      : el("th", { scope: "col", class: id.startsWith(SETTING) ? "col-setting" : `col-${id}`, "data-column": id, title: text.length > 14 ? clean(text) : null },
        el("button", { type: "button", class: "sort", onclick: () => this.#sortBy(id) }, short(text, 24)))));
    for (const head of this.heads.children) {
      const mine = head.dataset.column === this.sort.column;
      if (head.classList.contains("col-setting")) head.classList.toggle("number", this.#isNumber(head.dataset.column.slice(SETTING.length)));
      if (head.dataset.column) head.setAttribute("aria-sort", mine ? (this.sort.down ? "descending" : "ascending") : "none");
    }
    this.table.style.setProperty("--columns", this.columns.length);
    this.table.classList.toggle("more", this.columns.length > 0);
  }

  /** The settings that can be columns; those that differ among the runs come first. */
  #showColumns() {
    this.chooser.hidden = this.settings.length === 0;
    renderList(this.boxes, this.settings, ({ name }) => name, ({ name }) => el("label", {}, el("input", { type: "checkbox", onchange: () => this.#toggle(name) }), named(name, 40), el("span", { class: "soft" })),
      (node, { name, differs }) => {
        node.firstElementChild.checked = this.columns.includes(name);
        node.firstElementChild.disabled = this.columns.length >= MOST_SETTINGS && !this.columns.includes(name);
        setText(node.lastElementChild, differs ? "" : "same in all");
      });
  }

  #toggle(name) {
    this.columns = this.columns.includes(name) ? this.columns.filter((column) => column !== name) : [...this.columns, name];
    if (!this.columns.includes(name) && this.sort.column === SETTING + name) this.sort = { column: "age", down: false };
    this.#chosen();
  }

  #tell(all, shown) {
    const text = this.problem ? [this.problem.text]
      : this.runs === null || shown ? []
      : all ? [`No run matches the filter. ${FILTER_HELP} Escape clears it.`]
      : ["No run is here yet. Start one with ", el("code", {}, "plimsoll.watch(model, optimizer, run=\u2026)"), " or ",
         el("code", {}, "plimsoll run -o \u2026 train.py"), "; it appears by itself."];
    const key = text.map((part) => part.textContent ?? part).join("");
    if (this.note.dataset.text !== key) this.note.replaceChildren(...text);
    this.note.dataset.text = key;
    this.note.hidden = text.length === 0;
  }

  #row(run) {
    const state = el("td", { class: "col-state" });
    const folder = el("span", { class: "soft" }); // where no row of the group says it
    const link = el("a", { href: to.run(run.id), class: "run-link" });
    const tags = el("span", { class: "tags" });
    const verdict = el("p", { class: "verdict-line" });
    const settings = el("p", { class: "settings-line" }); // in place of columns, on a narrow screen
    const cells = ["step", "live", "age", "tensors"].map((id) => el("td", { class: `col-${id}${NUMBERS.has(id) ? " number" : ""}` }));
    const mark = el("input", { type: "checkbox", onchange: () => this.#mark(run.id), "aria-label": `Mark ${short(run.name)} for a comparison` });
    const last = el("td", { class: "col-mark" }, mark);
    const row = el("tr", { onclick: (event) => opens(event, link) },
      state, el("th", { scope: "row", class: "col-name" }, folder, link, tags, verdict, settings), cells, last);
    row.parts = { state, folder, link, tags, verdict, settings, cells, mark, last };
    return row;
  }

  #fill(row, { run, member = false }) {
    const marked = this.marked.includes(run.id), tags = this.tags.get(tagKey(run)) ?? [], columns = this.columns.join("\n");
    const shown = JSON.stringify([marked, tags, columns, member]);
    if (row.run === run && row.shown === shown) return; // only its place has changed
    Object.assign(row, { run, shown });
    const { state, link, verdict, cells, mark, last } = row.parts;
    if (state.dataset.state !== run.state) state.replaceChildren(badge(run.state));
    state.dataset.state = run.state;
    row.classList.toggle("member", member);
    setText(row.parts.folder, member || !folderOf(run) ? "" : `${short(folderOf(run), 40)}/`);
    if (link.dataset.name !== run.name) link.replaceChildren(named(run.name, 56));
    link.dataset.name = run.name;
    row.parts.tags.replaceChildren(...tags.map((tag) => el("span", { class: "tag" }, short(tag, 24))));
    prose(verdict, run.problem ?? run.verdict ?? "");
    verdict.hidden = verdict.textContent === "";
    const [step, live, age, tensors] = cells;
    setText(step, run.last_step >= 0 ? whole(run.last_step) : "\u2013");
    live.classList.toggle("is-live", run.live);
    setText(live, run.live ? "live" : run.closed ? "closed" : run.state === "unreadable" ? "\u2013" : "not closed");
    age.dataset.moment = run.modified;
    setText(age, ago(run.modified));
    age.title = moment(run.modified);
    setText(tensors, run.tensors ? whole(run.tensors) : "\u2013");
    for (const node of row.querySelectorAll(".col-setting")) node.remove();
    for (const name of this.columns) last.before(settingCell(run.settings[name], this.#isNumber(name)));
    setText(row.parts.settings, this.columns.map((name) => `${clean(name)} ${settingWords(run.settings[name])}`).join(" \u00b7 "));
    mark.checked = marked;
  }

  #ages() {
    for (const cell of this.body.querySelectorAll("[data-moment]")) setText(cell, ago(Number(cell.dataset.moment)));
  }

  #isNumber(setting) {
    return (this.runs ?? []).some((run) => typeof run.settings[setting] === "number");
  }

  #sorted(runs) {
    const { column, down } = this.sort;
    const setting = column.slice(SETTING.length);
    const key = COLUMNS.find(([id]) => id === column)?.[2] ?? ((run) => orderOf(run.settings[setting]));
    const way = down ? -1 : 1;
    const keyed = runs.map((run) => [key(run), run]);
    keyed.sort(([a, first], [b, second]) => way * ordered(a, b) || second.modified - first.modified);
    return keyed.map(([, run]) => run);
  }

  #sortBy(id) {
    const first = COLUMNS.find(([column]) => column === id)?.[3] ?? false;
    this.sort = { column: id, down: this.sort.column === id ? !this.sort.down : first };
    this.#chosen();
  }

  /** Filter, order, columns, marks and open groups are part of the address, but no steps back. */
  #chosen() {
    const { column, down } = this.sort;
    const sort = column === "age" && !down ? null : `${column}${down ? ".down" : ""}`;
    change({ filter: this.filter.value, sort, column: this.columns, mark: this.marked, open: [...this.opened] });
    this.#asked();
    this.#show();
  }

  /** Whether a run has what each word of the filter asks for: a condition on a setting, or its name, state, verdict and tags. */
  #matching() {
    const words = this.filter.value.split(/\s+/).filter(Boolean);
    const names = new Set(this.settings.map(({ name }) => name));
    const tests = words.map((word) => {
      const condition = CONDITION.exec(word);
      if (condition && names.has(condition[1])) return (run) => holds(run.settings[condition[1]], condition[2], condition[3]);
      const search = matcher(word);
      if (search.kind !== "words") return (run) => search.test(run.id) || search.test(run.name);
      return (run) => search.test(`${run.id} ${run.name} ${run.state} ${run.verdict ?? ""} ${run.live ? "live" : ""} ${(this.tags.get(tagKey(run)) ?? []).join(" ")}`);
    });
    return (run) => tests.every((test) => test(run));
  }

  #mark(id) {
    this.marked = this.marked.includes(id) ? this.marked.filter((other) => other !== id) : [...this.marked, id].slice(-MOST_COMPARED);
    this.#chosen();
  }

  /** Marks all runs of a group, in the order of the list and as many as one comparison holds; or none, if no more can be. */
  #markGroup(folder) {
    const ids = this.rows.find((row) => row.folder === folder).runs.map((run) => run.id);
    const more = ids.filter((id) => !this.marked.includes(id)).slice(0, MOST_COMPARED - this.marked.length);
    this.marked = more.length ? [...this.marked, ...more] : this.marked.filter((id) => !ids.includes(id));
    this.#chosen();
  }

  #toggleGroup(folder) {
    if (!this.opened.delete(folder)) this.opened.add(folder);
    this.#chosen();
  }

  /** Opens or folds the group of the row in focus. A folded group keeps the focus that one of its runs had. */
  #setOpen(open) {
    const key = document.activeElement?.closest("tr[data-key]")?.dataset.key;
    const row = this.rows?.find((other) => other.key === key);
    const group = row?.folder ?? (row?.member && !open ? folderOf(row.run) : null);
    if (group === null || group === undefined) return false;
    if (this.opened.has(group) !== open) this.#toggleGroup(group);
    [...this.body.children].find((node) => node.dataset.key === `${group}/`).parts.button.focus();
  }

  #showMarks() {
    const runs = this.marked.map((id) => (this.runs ?? []).find((run) => run.id === id)).filter(Boolean);
    this.tray.hidden = runs.length === 0;
    const tags = runs.map((run) => this.tags.get(tagKey(run)) ?? []);
    const text = JSON.stringify([runs.map((run) => run.id), tags]);
    if (this.tray.dataset.text === text) return;
    this.tray.dataset.text = text;
    const names = runs.slice(0, 3).map((run, i) => [i ? " with " : "", named(run.name, 28)]);
    const more = runs.length > 3 ? ` and ${whole(runs.length - 3)} more` : "";
    const input = el("input", { type: "text", "aria-label": "Tag of the marked runs", placeholder: "tag", maxlength: 40, size: 10 });
    this.tray.replaceChildren(
      runs.length > 1 ? el("a", { href: to.compare(runs.map((run) => run.id)), class: "go" }, "Compare ", names, more)
        : el("span", {}, "Compare ", names, " with another: mark it too"),
      el("form", { class: "tagging", onsubmit: (event) => { event.preventDefault(); this.#tag(runs, input.value); } }, input, el("button", { type: "submit" }, "Tag")),
      el("button", { type: "button", class: "quiet", onclick: () => { this.marked = []; this.#chosen(); } }, "Unmark"));
  }

  /** Gives the marked runs a tag, or takes it away where all of them have it. Tags stay in this browser. */
  #tag(runs, text) {
    const tag = text.trim();
    if (!tag) return;
    const taken = runs.every((run) => this.tags.get(tagKey(run))?.includes(tag));
    for (const run of runs) {
      const others = (this.tags.get(tagKey(run)) ?? []).filter((other) => other !== tag);
      remember(TAGS, tagKey(run), taken ? others : [...others, tag]);
    }
    this.tags = remembered(TAGS);
    this.#show();
  }

  #keys() {
    return [
      { keys: ["j", "ArrowDown"], says: "Next run", act: () => this.#move(1) },
      { keys: ["k", "ArrowUp"], says: "Previous run", act: () => this.#move(-1) },
      { keys: ["Home"], act: () => this.#move(-Infinity) },
      { keys: ["End"], act: () => this.#move(Infinity) },
      { keys: ["Enter"], says: "Open the run", act: () => false }, // the link does it
      { keys: ["ArrowRight"], says: "Open the group", act: () => this.#setOpen(true) },
      { keys: ["ArrowLeft"], says: "Fold the group", act: () => this.#setOpen(false) },
      { keys: ["/"], says: "Filter", act: () => this.filter.focus() },
      { keys: ["c"], says: "Mark the run, or the runs of the group, for a comparison", act: () => this.#markHere() },
      { keys: ["v"], says: "Compare the marked runs", act: () => this.tray.querySelector("a")?.click() },
      { keys: ["Escape"], act: (event) => this.#escape(event) },
    ];
  }

  #move(by) {
    const links = [...this.body.querySelectorAll(".run-link, .group-toggle")];
    if (!links.length) return;
    const here = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
    const next = here < 0 ? 0 : Math.min(Math.max(here + by, 0), links.length - 1);
    links[next].focus();
    links[next].closest("tr").scrollIntoView({ block: "nearest" });
  }

  #markHere() {
    const key = document.activeElement?.closest("tr[data-key]")?.dataset.key;
    const row = this.rows?.find((other) => other.key === key);
    if (row) row.run ? this.#mark(row.run.id) : this.#markGroup(row.folder);
  }

  #escape(event) {
    if (this.chooser.open && this.chooser.contains(event.target)) {
      this.chooser.open = false;
      this.chooser.firstElementChild.focus();
      return;
    }
    if (event.target !== this.filter) return false;
    if (this.filter.value) { this.filter.value = ""; this.#chosen(); } else this.#move(0);
  }

  #fromFilter(event) {
    if (event.key !== "ArrowDown" && event.key !== "Enter") return;
    event.preventDefault();
    this.#move(0);
  }
}

/** A setting in few letters; of a name with dots, the last part. */
function settingWords(value) {
  if (typeof value === "number") return number(value);
  const text = value === undefined ? "\u2013" : value === null ? "none" : String(value);
  return short(/^[\w.]+\.(\w+)$/.exec(text)?.[1] ?? text, 24);
}

function settingCell(value, isNumber) {
  return el("td", { class: `col-setting${isNumber ? " number" : ""}`, title: value === undefined ? null : clean(String(value)) }, settingWords(value));
}

/** Numbers come before texts, and runs without the setting last. */
const orderOf = (value) => (value === undefined ? [2, ""] : typeof value === "number" ? [0, value] : [1, String(value)]);

function ordered(a, b) {
  if (!Array.isArray(a)) return a < b ? -1 : a > b ? 1 : 0;
  return a[0] - b[0] || (a[1] < b[1] ? -1 : a[1] > b[1] ? 1 : 0);
}

/** Whether a setting meets a condition. Texts are equal without regard to case; < and > are for numbers. */
function holds(value, sign, wanted) {
  if (value === undefined) return false;
  const target = Number(wanted);
  if (typeof value === "number" && wanted !== "" && !Number.isNaN(target)) {
    return { "<": value < target, ">": value > target, "<=": value <= target, ">=": value >= target, "=": value === target, "!=": value !== target }[sign];
  }
  const same = (value === null ? "none" : String(value)).toLowerCase() === wanted.toLowerCase();
  return sign === "=" ? same : sign === "!=" ? !same : false;
}

function tallied(shown, all, folder) {
  const count = shown === all ? counted(all, "run") : `${whole(shown)} of ${counted(all, "run")}`;
  return `${count} in ${short(folder, 48)}`;
}

/** A click anywhere on a row opens it, but not one on a control or one that selects text. */
function opens(event, link) {
  if (event.target.closest("a, input, label, button") || getSelection().toString()) return;
  if (event.ctrlKey || event.metaKey) window.open(link.href, "_blank", "noopener");
  else link.click();
}
