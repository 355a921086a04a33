// Groups of the list of runs: runs of the same folder, under one row that opens.

import { el, named, setText, short } from "../dom.js";
import { ago, badge, counted, moment, prose, SEVERITY_ORDER, whole } from "../words.js";

/** The folder that a run is in, below the served one. Empty: that itself. */
export const folderOf = (run) => run.id.slice(0, Math.max(run.id.lastIndexOf("/"), 0));

/** The rows of sorted runs, each `{ key, run }` or `{ key, folder, runs, open }`. A folder stands where its first run would. */
export function rowsOf(runs, opened) {
  const folders = new Map();
  for (const run of runs) {
    const folder = folderOf(run);
    if (!folders.has(folder)) folders.set(folder, []);
    folders.get(folder).push(run);
  }
  const rows = [];
  for (const run of runs) {
    const folder = folderOf(run), members = folders.get(folder);
    // One run is no group, and neither are all runs of the list.
    const grouped = folder !== "" && members.length > 1 && folders.size > 1;
    if (!grouped) rows.push({ key: run.id, run });
    if (!grouped || members[0] !== run) continue;
    const open = opened.has(folder);
    rows.push({ key: `${folder}/`, folder, runs: members, open });
    if (open) rows.push(...members.map((member) => ({ key: member.id, run: member, member: true })));
  }
  return rows;
}

/** The row of a group; `toggle` opens or folds it, `mark` marks its runs. */
export function groupRow({ folder }, toggle, mark) {
  const state = el("td", { class: "col-state" });
  const count = el("span", { class: "soft" });
  const button = el("button", { type: "button", class: "group-toggle", onclick: () => toggle(folder) }, named(folder, 56), " ", count);
  const verdict = el("p", { class: "verdict-line" });
  const cells = ["step number", "live", "age", "tensors number"].map((kind) => el("td", { class: `col-${kind}` }));
  const box = el("input", { type: "checkbox", onchange: () => mark(folder), "aria-label": `Mark the runs of ${short(folder)} for a comparison` });
  const last = el("td", { class: "col-mark" }, box);
  const row = el("tr", { class: "group", onclick: (event) => {
    if (!event.target.closest("button, input, label") && !getSelection().toString()) toggle(folder);
  } }, state, el("th", { scope: "row", class: "col-name" }, button, verdict), cells, last);
  row.parts = { state, count, button, verdict, cells, box, last };
  return row;
}

/** Fills the row with what holds of the group: the worst state and its verdict, and the last step, change and most tensors of any run. */
export function fillGroup(row, { runs, open }, marked, columns, cell) {
  const { state, count, button, verdict, cells, box, last } = row.parts;
  const worst = runs.reduce((a, b) => (SEVERITY_ORDER.indexOf(b.state) < SEVERITY_ORDER.indexOf(a.state) ? b : a));
  const most = (of) => Math.max(...runs.map(of));
  const live = runs.filter((run) => run.live).length;
  if (state.dataset.state !== worst.state) state.replaceChildren(badge(worst.state));
  state.dataset.state = worst.state;
  setText(count, counted(runs.length, "run"));
  button.setAttribute("aria-expanded", String(open));
  const words = worst.problem ?? worst.verdict ?? "";
  prose(verdict, words && `${short(worst.name, 40)}: ${words}`);
  verdict.hidden = open || !words; // open, the run says it itself
  const [step, writing, age, tensors] = cells;
  setText(step, most((run) => run.last_step) >= 0 ? whole(most((run) => run.last_step)) : "\u2013");
  writing.classList.toggle("is-live", live > 0);
  setText(writing, live ? `${whole(live)} live` : runs.every((run) => run.closed) ? "closed" : "not closed");
  age.dataset.moment = most((run) => run.modified);
  setText(age, ago(most((run) => run.modified)));
  age.title = moment(most((run) => run.modified));
  setText(tensors, most((run) => run.tensors) ? whole(most((run) => run.tensors)) : "\u2013");
  for (const node of row.querySelectorAll(".col-setting")) node.remove();
  for (const name of columns) {
    const values = new Set(runs.map((run) => run.settings[name]));
    last.before(cell(values.size === 1 ? [...values][0] : "differs", name));
  }
  const chosen = runs.filter((run) => marked.includes(run.id)).length;
  box.checked = chosen === runs.length;
  box.indeterminate = chosen > 0 && chosen < runs.length;
}
