// What if: another format, at any scale. Answers come from spectra, as fast as the slider moves; the address holds all.

import { address, Latest, Problem } from "../api.js";
import { clean, el, named, renderList, setOptions, setText, svg } from "../dom.js";
import { isReport } from "../embedded.js";
import { Picture } from "../figures/picture.js";
import { replace, to, values } from "../router.js";
import { between, collectionWords, estimate, power, powerValue, prose, tensorWords, title, whole } from "../words.js";

const WAIT = isReport ? 0 : 60; // milliseconds that the slider must rest before the server is asked
const LOWEST = -24, HIGHEST = 40; // of the slider, unless a shift lies beyond
const ROWS = isReport ? 15 : 50; // tensors that are shown at once
// Columns of the table by their first word, with the number to sort by.
const SORTED = {
  tensor: (row) => row.name, lost: (row) => row.lost.estimate, subnormal: (row) => row.subnormal?.estimate, overflow: (row) => row.overflow.estimate,
  snr: (row) => (typeof row.snr_db === "number" ? row.snr_db : Infinity), scales: (row) => (row.window ? row.window[1] - row.window[0] : -1),
};

export class WhatIfPart {
  #latest = new Latest();

  constructor(page) {
    this.page = page;
    this.answer = null;
    this.#build();
    this.leaveKeys = page.take([
      { keys: ["ArrowLeft"], says: "Halve the scale", act: () => this.#move(Number(this.slider.value) - 1) },
      { keys: ["ArrowRight"], says: "Double the scale", act: () => this.#move(Number(this.slider.value) + 1) },
      { keys: ["b"], says: "The best scale", act: () => this.#best() },
    ]);
  }

  close() {
    this.leaveKeys();
    clearTimeout(this.timer);
    this.#latest.drop();
    this.picture.close();
    this.time.close();
  }

  go(route) {
    const { values: asked } = route;
    const { collections, formats } = this.run;
    const offered = this.run.whatif ? [this.run.whatif.collection] : Object.keys(collections); // a report answers about one
    const collection = asked.get("collection") ?? offered[0] ?? "";
    setOptions(this.format, formats, asked.get("format") ?? "fp16", (name) => name.toUpperCase());
    setOptions(this.collection, offered, collection, collectionWords);
    const [column, way] = (asked.get("sort") ?? "").split(".");
    this.sort = Object.hasOwn(SORTED, column) ? { column, down: way === "down" } : null;
    const shift = asked.get("shift");
    this.shift = shift !== null && /^-?\d{1,4}$/.test(shift) ? Number(shift) : null;
    this.name = asked.get("name");
    if (this.shift !== null) this.#slide(this.shift);
    this.ask();
  }

  renew(run) {
    const first = this.run === undefined; // then `go` asks
    this.run = run;
    if (first && run.whatif) this.#needs(run.whatif);
    if (!first) this.ask();
  }

  /** Asks for the chosen format, scale and collection; only the latest answer counts. */
  async ask() {
    this.element.setAttribute("aria-busy", "true");
    this.picture.refresh();
    try {
      const answers = await this.#latest.ask([address(["runs", this.page.id, "whatif"],
        { format: this.format.value, shift: this.shift, collection: this.collection.value })]);
      if (answers === null) return;
      [this.answer] = answers;
      this.#tell("");
      this.#fill();
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      this.#tell(problem.text);
    }
    this.element.setAttribute("aria-busy", "false");
  }

  #build() {
    const changed = () => { this.shift = null; this.name = null; this.#keep(); this.ask(); };
    this.format = el("select", { id: "whatif-format", onchange: changed });
    this.collection = el("select", { id: "whatif-collection", onchange: changed });
    this.slider = el("input", { type: "range", id: "whatif-shift", min: LOWEST, max: HIGHEST, step: 1, value: 0, oninput: () => this.#move(Number(this.slider.value)) });
    this.value = el("output", { for: "whatif-shift", class: "shift" });
    this.best = el("button", { type: "button", onclick: () => this.#best() }, "Best scale");
    this.sentence = el("p", { class: "sentence", "aria-live": "polite" });
    this.note = el("p", { class: "note", role: "alert", hidden: true });
    this.overall = el("dl", { class: "facts overall" });
    this.rows = el("tbody");
    this.heads = [["Tensor"], ["Lost", "number"], ["Subnormal", "number"], ["Overflow", "number"], ["SNR dB", "number"], ["Scales that work", "window-col"]].map(([text, kind]) => {
      const column = text.toLowerCase().split(" ")[0];
      return el("th", { scope: "col", class: kind, "data-kind": column }, el("button", { type: "button", class: "sort", onclick: () => this.#sortBy(column) }, text));
    });
    this.more = el("p", { class: "soft" });
    this.all = el("button", { type: "button", onclick: () => { this.whole = !this.whole; this.#fill(); } });
    this.needs = el("div", { class: "needs", hidden: true });
    this.stretches = el("ol", { class: "stretches" });
    this.picture = new Picture({ address: () => this.#spectrogram(), question: () => `${this.collection.value} ${this.#tensor()}`, height: () => 460,
      title: () => tensorWords({ collection: this.collection.value, name: this.#tensor() ?? "" }) });
    this.time = new Picture({});
    this.time.element.classList.add("low");
    this.result = el("div", { class: "result", hidden: true },
      this.sentence, this.overall, el("div", { class: "answered" }, el("section", { "aria-labelledby": "layers-title" }, el("h2", { id: "layers-title" }, "Tensors, the worst first"),
        el("div", { class: "scrolls" }, el("table", { class: "layers" }, el("thead", {}, el("tr", {}, this.heads)), this.rows)), this.all, this.more),
        el("section", { class: "pictures", "aria-label": "Pictures" }, this.picture.element, this.time.element)),
      el("section", { "aria-labelledby": "stretches-title" }, el("h2", { id: "stretches-title" }, "Scales that work for all layers, over time"), this.stretches));
    this.element = el("div", { class: "whatif" }, this.needs,
      el("form", { class: "asked", "aria-label": "What if", onsubmit: (event) => event.preventDefault() },
        el("div", {}, el("label", { for: "whatif-format" }, "Format"), this.format),
        el("div", {}, el("label", { for: "whatif-collection" }, "Of"), this.collection),
        el("div", { class: "slide" }, el("label", { for: "whatif-shift" }, "Scale"), this.slider, this.value), this.best),
      this.note, this.result);
  }

  /** What each format needs, in a table: of a report. */
  #needs({ note, needs }) {
    this.needs.hidden = false;
    const cell = (label, text, name = "number") => { const made = el("td", { class: name, "data-label": label }); prose(made, text); return made; };
    this.needs.replaceChildren(
      el("p", { class: "soft" }, "Nothing is trained again: the numbers follow from where the values of this run lie."),
      note ? el("p", { class: "soft" }, clean(note)) : "",
      el("div", { class: "scrolls" }, el("table", { class: "cards" }, el("thead", {}, el("tr", {}, ["Format", "What it needs", "Best scale", "Lost there", "Overflow"].map((text, i) =>
        el("th", { scope: "col", class: i > 1 ? "number" : null }, text)))), el("tbody", {}, needs.map(({ format, sentence, best, lost, overflow }) =>
        el("tr", {}, el("th", { scope: "row" }, format.toUpperCase()), cell("", sentence, "sentence-cell"), cell("Best scale", `2^${best}`), cell("Lost there", lost), cell("Overflow", overflow)))))));
  }

  #move(shift) {
    if (this.answer === null) return;
    this.shift = shift;
    this.#slide(shift);
    this.#lines();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { this.#keep(); this.ask(); }, WAIT);
  }

  #best() {
    clearTimeout(this.timer);
    this.shift = null;
    this.#keep();
    this.ask();
  }

  /** Puts the slider, its range if need be, and its words. */
  #slide(shift) {
    this.slider.min = Math.min(LOWEST, shift, this.answer?.best_shift ?? 0);
    this.slider.max = Math.max(HIGHEST, shift, this.answer?.best_shift ?? 0);
    this.slider.value = shift;
    this.slider.setAttribute("aria-valuetext", `2 to the power ${shift}, ${powerValue(shift)}`);
    this.value.replaceChildren(power(shift), el("span", { class: "soft" }, ` = ${powerValue(shift)}`));
  }

  #keep() {
    const { value: format } = this.format, { value: collection } = this.collection;
    const sort = this.sort && `${this.sort.column}${this.sort.down ? ".down" : ""}`;
    replace(to.whatif(this.page.id, { format, shift: this.shift, collection, name: this.name, sort, zoom: values().get("zoom") }));
  }

  /** The first click sorts a column the worst first, the second the other way round, the third ends it. */
  #sortBy(column) {
    const first = column !== "tensor" && column !== "snr" && column !== "scales"; // of these the smallest is the worst
    const isSecond = this.sort?.column === column && this.sort.down === first;
    this.sort = this.sort?.column === column && !isSecond ? null : { column, down: isSecond ? !first : first };
    this.#keep();
    this.#fillRows();
  }

  #sorted() {
    if (this.sort === null) return this.answer.rows;
    const key = SORTED[this.sort.column], way = this.sort.down ? -1 : 1;
    return this.answer.rows.toSorted((a, b) => (key(a) < key(b) ? -way : key(a) > key(b) ? way : 0));
  }

  #fillRows() {
    const rows = this.#sorted();
    renderList(this.rows, this.whole ? rows : rows.slice(0, ROWS), (row) => row.name, (row) => this.#row(row), (node, row) => this.#fillRow(node, row));
    for (const head of this.heads) {
      const sorted = head.dataset.kind === this.sort?.column;
      head.setAttribute("aria-sort", sorted ? (this.sort.down ? "descending" : "ascending") : "none");
    }
    this.#lines();
  }

  #tensor() {
    return this.name ?? this.answer?.rows[0]?.name ?? null;
  }

  #spectrogram() {
    if (isReport) return null; // it holds none with a format's limits at another scale
    const name = this.#tensor();
    const shift = this.shift ?? this.answer?.shift;
    if (name === null || !(this.run.collections[this.collection.value] ?? []).includes(name)) return null;
    return address(["runs", this.page.id, "figure", "spectrogram"], { collection: this.collection.value, name, formats: this.answer?.block ? null : this.format.value, shift });
  }

  #fill() {
    const { answer } = this;
    this.result.hidden = false;
    this.result.dataset.shift = answer.shift;
    if (this.shift === null || this.shift === answer.shift) this.#slide(answer.shift);
    prose(this.sentence, answer.sentence);
    const best = answer.shift === answer.best_shift;
    this.best.disabled = best && this.shift === null;
    this.best.replaceChildren("Best scale ", power(answer.best_shift));
    const { overall } = answer;
    const works = answer.block ? "each block's own" : overall.window === null ? "none works for all" : scales(overall.window);
    const facts = [
      ...["lost", "subnormal", "overflow"].filter((kind) => overall[kind]).map((kind) => [title(kind), [estimate(overall[kind]), el("span", { class: "soft" }, between(overall[kind]))], kind]),
      ...(overall.snr_db === undefined ? [] : [["SNR dB", [decibels(overall.snr_db)], "snr"]]), ["Scales that work", [works], "scales"],
    ];
    this.result.classList.toggle("few", overall.subnormal === undefined);
    renderList(this.overall, facts, ([, , kind]) => kind, ([name, , kind]) => el("div", { "data-kind": kind }, el("dt", {}, name), el("dd")),
      (node, [, content]) => node.lastElementChild.replaceChildren(...content.flat()));
    this.#fillRows();
    this.all.hidden = answer.rows.length <= ROWS;
    setText(this.all, this.whole ? `Show the worst ${ROWS} only` : `Show all ${whole(answer.rows.length)} tensors`);
    setText(this.more, answer.more ? `and ${whole(answer.more)} tensors that lose less.` : "");
    renderList(this.stretches, answer.stretches, (stretch, index) => index, () => el("li"), (node, stretch) => node.replaceChildren(...rangeWords(stretch, answer.block)));
    this.#overTime();
    if (this.picture.address() !== this.asked) { this.asked = this.picture.address(); this.picture.refresh(); }
  }

  #row() {
    const link = el("a");
    const cells = ["lost", "subnormal", "overflow", "snr"].map((kind) => el("td", { class: "number", "data-kind": kind }));
    const words = el("span", { class: "window-words" });
    const band = svg("rect", { class: "band", y: 3, height: 6, rx: 1 });
    const line = svg("line", { class: "line", y1: 0, y2: 12 });
    const bar = svg("svg", { class: "window", viewBox: "0 0 160 12", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("line", { class: "axis", x1: 0, x2: 160, y1: 6, y2: 6 }), band, line);
    const node = el("tr", {}, el("th", { scope: "row" }, link), cells, el("td", { class: "window-col" }, bar, words));
    node.parts = { link, cells, words, band, line };
    return node;
  }

  #fillRow(node, row) {
    const { link, cells, words } = node.parts;
    const values = { format: this.format.value, collection: this.collection.value, shift: this.shift, name: row.name };
    const recorded = (this.run.collections[this.collection.value] ?? []).includes(row.name);
    if (!isReport) link.setAttribute("href", to.whatif(this.page.id, values));
    else if (recorded) link.setAttribute("href", to.tensor(this.page.id, this.collection.value, row.name));
    if (link.dataset.name !== row.name) link.replaceChildren(named(row.name, 44));
    link.dataset.name = row.name;
    link.toggleAttribute("aria-current", !isReport && row.name === this.#tensor());
    const [lost, subnormal, overflow, snr] = cells;
    for (const [cell, kind] of [[lost, "lost"], [subnormal, "subnormal"], [overflow, "overflow"]].filter(([, kind]) => row[kind])) {
      setText(cell, estimate(row[kind]));
      cell.title = `${estimate(row[kind])}${between(row[kind])}`;
      cell.classList.toggle("much", kind !== "subnormal" && row[kind].estimate > 0.01);
    }
    if (row.snr_db !== undefined) setText(snr, decibels(row.snr_db));
    const range = row.window ? scales(row.window) : ["none"];
    words.replaceChildren(...(this.answer.block ? [row.window ? "works" : "loses too much"] : range));
    node.window = row.window;
  }

  /** The windows of the layers as bars, and the chosen scale across them. */
  #lines() {
    const low = Number(this.slider.min), span = Number(this.slider.max) - low || 1;
    const at = (shift) => 2 + (156 * (Math.min(Math.max(shift, low), low + span) - low)) / span;
    const shift = Number(this.slider.value);
    for (const { parts: { band, line }, window } of this.rows.children) {
      const works = window !== null && window[0] <= shift && shift <= window[1];
      band.setAttribute("visibility", window ? "visible" : "hidden");
      if (window) {
        band.setAttribute("x", at(window[0]));
        band.setAttribute("width", Math.max(at(window[1]) - at(window[0]), 3));
      }
      line.setAttribute("x1", at(shift));
      line.setAttribute("x2", at(shift));
      line.classList.toggle("outside", !works);
    }
  }

  #overTime() {
    const { over_time: overTime, over_scale: overScale } = this.answer; // a report has the second
    const { lost, overflow } = overTime ?? overScale;
    const ticks = overScale?.shift.filter((shift) => shift % 8 === 0);
    const xaxis = overTime ? { title: { text: "step" }, showgrid: false }
      : { title: { text: "scale" }, showgrid: false, zeroline: false, tickvals: ticks, ticktext: ticks.map((shift) => `2<sup>${String(shift).replace("-", "\u2212")}</sup>`) };
    const at = Number(this.slider.value);
    const line = (name, values, dash) => ({ type: "scatter", mode: "lines", name, x: overTime?.step ?? overScale.shift, y: values.map((value) => 100 * value), line: { dash, width: 2 },
      hovertemplate: `${overTime ? "step " : "scale 2^"}%{x}<br>${name} %{y:.3~g} %<extra></extra>` });
    const layout = { title: { text: `Lost and overflowing values, all layers together${overTime ? "" : ", at each scale"}` }, height: 280, xaxis,
      shapes: overTime ? [] : [{ type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", line: { color: "#7d8791", width: 2 } }],
      yaxis: { title: { text: "per cent of values" }, rangemode: "tozero" }, showlegend: true };
    this.time.show({ data: [line("lost", lost, "solid"), line("overflow", overflow, "dot")], layout }, `${this.format.value} ${this.collection.value}`);
  }

  #tell(text) {
    setText(this.note, clean(text));
    this.note.hidden = text === "";
    if (text) this.result.hidden = true;
  }
}

/** Scales between two powers of two, as plimsoll/diagnosis/estimates/usable_scales.py writes them. */
function scales([low, high]) {
  return low === high ? [power(low)] : [power(low), " to ", power(high)];
}

function decibels(value) {
  return typeof value === "number" ? value.toFixed(0).replace("-", "\u2212") : value === "inf" ? "\u221E" : String(value);
}

function rangeWords({ from_step: from, to_step: until, window }, block) {
  const steps = from === until ? `Step ${whole(from)}: ` : `Steps ${whole(from)} to ${whole(until)}: `;
  if (block) return [steps, window ? "works for all layers" : "loses too much of some layer"];
  return window ? [steps, ...scales(window)] : [steps, "no single scale works for all layers"];
}
