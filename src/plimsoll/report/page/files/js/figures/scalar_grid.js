// Curves of scalars: one figure for each name, with one line for each run; smoothed, on a linear or logarithmic axis.

import { address } from "../api.js";
import { clean, el, renderList, setOptions, setText, short } from "../dom.js";
import { change } from "../router.js";
import { HINT, matcher } from "../search.js";
import { counted, whole } from "../words.js";
import { plain } from "./markup.js";
import { Picture } from "./picture.js";

// As plimsoll/report/drawing/plotly_parts.py has them. Twelve lines are distinguished by six colours and two dashes.
const COLOURS = ["#2f83cc", "#c9781a", "#1f9d78", "#a26fd0", "#dc5340", "#7d8791"];
const DASHES = ["solid", "dash"];
const MOST = 24; // figures that are offered at once
const HEIGHT = 320; // pixels
const AXES = { step: "Steps", epoch: "Epochs", time: "Time" };
const UNITS = [[7200, 3600, "hours"], [120, 60, "minutes"], [0, 1, "seconds"]]; // from so many seconds on, by so many

/** Colour and dash of a line, by the place of its run. */
export function lineOf(place) {
  return { color: COLOURS[place % COLOURS.length], dash: DASHES[Math.floor(place / COLOURS.length) % DASHES.length] };
}

/** `runs`: a function that returns the runs, each with `id`, `name`, `line`, `scalars` (names) and `hidden`. */
export class ScalarGrid {
  #names = [];
  #all = false;
  #ready = false;
  #known = new Set(["step"]); // axes that some answer has

  constructor({ runs, level = "h3", id = "scalars" }) {
    Object.assign(this, { runs, level });
    const redraw = () => { this.#keep(); this.redraw(); };
    this.search = el("input", { type: "search", id: `${id}-search`, placeholder: "Search scalars", "aria-label": "Search scalars", title: HINT,
      autocomplete: "off", spellcheck: "false", oninput: () => { this.#keep(); this.#list(); } });
    this.axis = el("select", { id: `${id}-axis`, onchange: redraw });
    this.smoothing = el("input", { type: "range", id: `${id}-smoothing`, min: 0, max: 0.99, step: 0.01, value: 0, oninput: redraw });
    this.amount = el("output", { for: `${id}-smoothing` }, "0");
    this.log = el("input", { type: "checkbox", id: `${id}-log`, onchange: redraw });
    this.tally = el("p", { class: "soft", role: "status" });
    this.grid = el("div", { class: "pictures" });
    this.more = el("button", { type: "button", hidden: true, onclick: () => { this.#all = true; this.#list(); } });
    this.element = el("div", { class: "scalars" },
      el("div", { class: "controls" }, this.search,
        el("label", { for: `${id}-axis` }, "Over"), this.axis,
        el("label", { for: `${id}-smoothing` }, "Smoothing"), this.smoothing, this.amount,
        el("label", {}, this.log, " Logarithmic")),
      this.tally, this.grid, this.more);
  }

  close() {
    for (const { picture } of this.grid.children) picture.close();
  }

  /** Takes over the state that an address holds. */
  go(values) {
    this.search.value = values.get("find") ?? "";
    this.asked = values.get("x");
    this.axis.value = "";
    const smoothing = Number(values.get("smooth"));
    this.smoothing.value = smoothing >= 0 && smoothing < 1 ? smoothing : 0;
    this.log.checked = values.get("log") === "1";
    this.#ready = true;
    this.#axes();
    this.redraw();
  }

  /** Shows these scalars, of which some may be new, and asks for the values again. */
  renew(names) {
    this.#names = names;
    if (!this.#ready) return; // the search of the address decides which figures are made
    this.#axes();
    this.#list();
    for (const { picture } of this.grid.children) picture.refresh();
  }

  redraw() {
    this.#list();
    setText(this.amount, String(Number(this.smoothing.value)));
    for (const { picture } of this.grid.children) picture.redraw();
  }

  #keep() {
    const smoothing = Number(this.smoothing.value);
    change({ find: this.search.value, x: this.axis.value === "step" ? null : this.axis.value, smooth: smoothing || null, log: this.log.checked ? 1 : null });
  }

  #axes() {
    const wanted = this.axis.value || (Object.hasOwn(AXES, this.asked ?? "") ? this.asked : "step");
    setOptions(this.axis, Object.keys(AXES).filter((name) => this.#known.has(name)), wanted, (name) => AXES[name]);
  }

  #list() {
    const search = matcher(this.search.value, this.#names);
    const names = this.#names.filter((name) => search.test(name) && name !== this.axis.value); // epochs over epochs say nothing
    const shown = this.#all ? names : names.slice(0, MOST);
    const before = [...this.grid.children];
    renderList(this.grid, shown, (name) => name, (name) => this.#picture(name).element);
    for (const { isConnected, picture } of before) if (!isConnected) picture.close();
    const left = names.length - shown.length;
    this.more.hidden = left === 0;
    setText(this.more, `Show ${whole(left)} more`);
    setText(this.tally, this.#names.length === 0 ? "No scalar was recorded. Log some in your training: watch.log(lr=\u2026, accuracy=\u2026)."
      : search.problem ?? (names.length === 0 ? `No scalar matches. ${HINT}` : `${counted(names.length, "scalar")}${search.kind === "all" ? "" : ` by ${search.kind}`}`));
  }

  #picture(name) {
    const picture = new Picture({
      address: () => this.#having(name).map((run) => address(["runs", run.id, "scalar"], { name })),
      make: (answers) => this.#figure(name, answers), question: () => `${name} ${this.axis.value}`,
      level: this.level, height: () => HEIGHT, title: () => clean(short(name)),
    });
    picture.refresh();
    return picture;
  }

  #learnAxes(answers) {
    const axes = Object.keys(AXES).filter((axis) => !this.#known.has(axis) && answers.some((answer) => answer[axis]));
    for (const axis of axes) this.#known.add(axis);
    if (axes.length) this.#axes();
  }

  #having(name) {
    return this.runs().filter((run) => run.scalars.includes(name));
  }

  #figure(name, answers) {
    this.#learnAxes(answers);
    const runs = this.#having(name), axis = this.axis.value || "step", smoothing = Number(this.smoothing.value);
    const lines = answers.map((answer, i) => ({ answer, run: runs[i] })).filter(({ run, answer }) => run && !run.hidden && answer[axis]);
    const without = answers.length - answers.filter((answer) => answer[axis]).length;
    const seconds = axis === "time" ? Math.max(...lines.flatMap(({ answer }) => answer.time.slice(-1))) : 0;
    const [, unit, unitName] = UNITS.find(([from]) => seconds >= from) ?? UNITS.at(-1);
    const several = runs.length > 1;
    const data = lines.flatMap(({ answer, run }) => traces(answer, run, { axis, unit, smoothing, several, log: this.log.checked }));
    const first = lines[0]?.answer;
    const about = [
      first?.each > 1 ? `each point: ${counted(first.each, "value")}, the mean` : "",
      smoothing ? "smoothed; the faint line is as recorded" : "",
      lines.some(({ answer }) => answer.nonfinite) ? `${counted(lines.reduce((sum, { answer }) => sum + answer.nonfinite, 0), "value")} NaN or infinite` : "",
      this.log.checked && lines.some(({ answer }) => answer.mean.some((value) => value !== null && value <= 0)) ? "values of 0 and below are left out" : "",
      without ? `${counted(without, "run")} without this axis` : "",
    ];
    const title = axis === "time" ? `${unitName} since the start` : axis;
    return {
      data,
      layout: {
        title: { text: plain(clean(short(name))), subtitle: { text: about.filter(Boolean).join(" \u00b7 ") } },
        xaxis: { title: { text: title }, showgrid: false, zeroline: false, tickformat: axis === "step" ? ",d" : "" },
        yaxis: { type: this.log.checked ? "log" : "linear", exponentformat: "power", minexponent: 6, separatethousands: true, zeroline: false },
        hovermode: "x", showlegend: several, height: HEIGHT + (several ? 20 * Math.ceil(lines.length / 4) : 0),
        meta: { figure: "scalar" },
      },
    };
  }
}

/** The lines of one run: as recorded, and smoothed where that is asked for. */
export function traces(answer, run, { axis, unit, smoothing, several, log = false }) {
  const x = unit === 1 ? answer[axis] : answer[axis].map((value) => value / unit);
  const name = plain(short(run.name, 40));
  const line = { type: "scatter", mode: "lines", x, name, hovertemplate: `%{y:.4~g}<extra>${several ? "%{fullData.name}" : ""}</extra>` };
  const { color, dash } = run.line;
  const edge = { ...line, line: { width: 0 }, hoverinfo: "skip", hovertemplate: undefined, showlegend: false };
  const band = several || !answer.low ? [] : [
    { ...edge, y: answer.low, name: `${name}: lowest` },
    { ...edge, y: answer.high, name: `${name}: highest`, fill: "tonexty", fillcolor: `${color}38` },
  ];
  const dots = dotted(answer.mean, color, log);
  if (!smoothing) return [...band, { ...line, ...dots, y: answer.mean, line: { color, dash, width: 1.8 } }];
  return [
    { ...line, y: answer.mean, name: `${name}: as recorded`, line: { color, width: 1 }, opacity: 0.3, showlegend: false, hoverinfo: "skip", hovertemplate: undefined },
    { ...line, ...dots, y: smoothed(answer.mean, smoothing), line: { color, dash, width: 1.8 } },
  ];
}

/** Dots where a point lies between gaps, so that no line reaches it. */
function dotted(values, color, log) {
  const known = (value) => value !== undefined && value !== null && !(log && value <= 0);
  const alone = values.map((value, i) => known(value) && !known(values[i - 1]) && !known(values[i + 1]));
  return alone.some(Boolean) ? { mode: "lines+markers", marker: { color, size: alone.map((is) => (is ? 6 : 0)) } } : {};
}

/** The exponential mean of all points so far. Divided by the sum of its weights, so that it does not begin at zero. */
export function smoothed(values, weight) {
  let mean = 0, sum = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    sum = weight * sum + (1 - weight);
    return mean / sum;
  });
}
