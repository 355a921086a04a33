// A figure: asked for when it comes into view, drawn by Plotly in the theme that is shown, renewed without losing the zoom.

import { get, Latest, Problem } from "../api.js";
import { el, setText } from "../dom.js";
import { isReport, unpacked } from "../embedded.js";
import { onTheme, printing, theme } from "../theme.js";
import { csv, download, json } from "./export.js";
import { writeMarkup } from "./markup.js";
import { join, point, shownSteps, zoom } from "./steps.js";

const ASSETS = document.documentElement.dataset.assets; // holds the page's version, so the browser keeps these files
const PLOTLY = `${ASSETS}/plotly.min.js`; // plotly.js with the traces that figures use
const TEMPLATES = `${ASSETS}/templates.json`; // plimsoll.report.TEMPLATES
const SHEET = 680; // pixels across a printed page
const NARROW = 440; // pixels of a figure that is as wide as a telephone
const LEAST_HEIGHT = 220, TITLE_HEIGHT = 40; // pixels; the title stands outside of the plot
const TABLE = "M2 3h20v18H2zM4 5v4h7V5zM13 5v4h7V5zM4 11v3h7v-3zM13 11v3h7v-3zM4 16v3h7v-3zM13 16v3h7v-3z";
const BRACES = "M9 3C6.5 3 6 4.5 6 6.5V9c0 1.3-.7 2-2 2v2c1.3 0 2 .7 2 2v2.5C6 19.5 6.5 21 9 21v-2c-.8 0-1-.5-1-1.5V15c0-1.5-.6-2.5-1.7-3C7.4 11.5 8 10.5 8 9V6.5C8 5.5 8.2 5 9 5z"
  + "M15 3v2c.8 0 1 .5 1 1.5V9c0 1.5.6 2.5 1.7 3-1.1.5-1.7 1.5-1.7 3v2.5c0 1-.2 1.5-1 1.5v2c2.5 0 3-1.5 3-3.5V15c0-1.3.7-2 2-2v-2c-1.3 0-2-.7-2-2V6.5C18 4.5 17.5 3 15 3z";

let loading = null;

/** Plotly and the templates, fetched once. */
function tools() {
  loading ??= Promise.all([isReport ? inline() : script(PLOTLY), get(TEMPLATES)]).catch((error) => {
    loading = null;
    throw error;
  });
  return loading.then(([, templates]) => ({ Plotly: globalThis.Plotly, templates }));
}

/** Fetches Plotly before the first figure is asked for: it is the largest file, and both can come at the same time. */
export function prepare() {
  tools().catch(() => {}); // the first figure says so
}

/** The report's own copy of Plotly. Its policy knows the text by its hash. */
async function inline() {
  document.head.append(el("script", {}, await unpacked("plotly")));
}

function script(source) {
  return new Promise((done, failed) => {
    const node = el("script", { src: source, onload: () => done(), onerror: () => failed(new Problem(0, "Plotly, which draws the figures, could not be loaded.")) });
    document.head.append(node);
  });
}

const inView = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) target.picture.looked(isIntersecting);
}, { rootMargin: "200px" });

/**
 * A figure with its caption.
 *
 * `address`: the address of the figure, or a list of addresses of which `make` makes one; null for none.
 * `question`: what the zoom belongs to. `height`: the expected height in pixels, which is reserved until the figure is there.
 * `title`: the heading until then. `onPick`: called with a point that was clicked.
 */
export class Picture {
  #latest = new Latest();
  #answers = null;
  #drawn = null; // the figure that is shown
  #asked = null; // the address that is being asked
  #visible = false;
  #closed = false;
  #due = false;
  #stale = false; // to be drawn again when it comes into view

  constructor({ address = () => null, question = address, make = ([answer]) => answer.figure, onPick = null, level = "h3", hint = null, height = () => 400, title = () => "" }) {
    Object.assign(this, { address, question, make, onPick, height, title });
    this.plot = el("div", { class: "plot" });
    this.cross = el("div", { class: "crosshair", hidden: true }, el("span"));
    this.room = el("div", { class: "plot-room" }, this.plot, this.cross);
    this.heading = el(level, { class: "picture-title" });
    this.about = el("p", { class: "soft about" });
    this.note = el("p", { class: "note", hidden: true });
    this.element = el("figure", { class: "picture", "aria-busy": "true" },
      el("figcaption", {}, this.heading, this.about, hint && el("p", { class: "soft hint" }, hint)), this.room, this.note);
    this.element.picture = this;
    this.leave = onTheme(() => (printing() && isReport && this.#due ? this.#fetch() : this.#draw()));
    this.plot.addEventListener("pointermove", (event) => this.#pointing(event));
    this.plot.addEventListener("pointerleave", () => this.leaveSteps && point(null));
    inView.observe(this.element);
  }

  /** Asks again: at once if it is in view, else when it comes there. */
  refresh() {
    this.#due = true;
    this.#reserve();
    this.element.hidden = this.address() === null; // what is hidden never comes into view
    return this.#visible ? this.#fetch() : Promise.resolve();
  }

  /** Makes the figure again of the answers that are there. */
  redraw() {
    if (this.#answers === null) return;
    this.#drawn = { ...this.make(this.#answers), question: this.question() };
    if (this.#visible) this.#draw();
    else this.#stale = true;
  }

  /** Draws a figure that was made here. */
  show(figure, question) {
    this.#drawn = { ...figure, question };
    this.element.setAttribute("aria-busy", "false");
    return this.#draw();
  }

  looked(visible) {
    this.#visible = visible;
    if (visible && this.#due) this.#fetch();
    else if (visible && this.#stale) this.#draw();
  }

  close() {
    this.#closed = true;
    this.leave();
    this.leaveSteps?.();
    this.#latest.drop();
    inView.unobserve(this.element);
    if (this.#drawn && globalThis.Plotly) globalThis.Plotly.purge(this.plot);
  }

  /** Shows the steps that all figures show. */
  zoomed() {
    if (!this.#visible) { this.#stale = true; return; }
    if (!this.plot.layout) return;
    const own = this.#drawn.layout.xaxis.range;
    const steps = shownSteps() ?? own;
    globalThis.Plotly.relayout(this.plot, steps ? { "xaxis.range": [...steps] } : { "xaxis.autorange": true });
  }

  /** Draws a line at a step; null takes it away. */
  pointed(step) {
    const { xaxis: axis, _size: size } = this.plot._fullLayout ?? {};
    const place = step === null || !axis ? NaN : axis.d2p(step);
    this.cross.hidden = !(place >= 0 && place <= axis?._length);
    if (this.cross.hidden) return;
    this.cross.style.cssText = `left: ${axis._offset + place}px; top: ${size.t}px; height: ${size.h}px`;
    setText(this.cross.firstElementChild, `step ${step}`);
    this.cross.classList.toggle("left", place > axis._length / 2); // the label stays inside
  }

  #reserve() {
    if (this.#drawn !== null) return;
    setText(this.heading, this.title());
    this.plot.style.height = `${plotHeight(this.height())}px`;
  }

  async #fetch() {
    const address = this.address();
    const key = JSON.stringify(address);
    if (address !== null && key === this.#asked) return; // it is under way; `#due` asks once more after it
    this.#due = false;
    this.element.hidden = address === null;
    if (address === null) return;
    this.element.setAttribute("aria-busy", "true");
    this.#asked = key;
    try {
      const answers = await this.#latest.ask([address].flat());
      if (answers === null) return; // a later question is under way
      this.#answers = answers;
      this.#drawn = { ...this.make(answers), question: this.question() };
      await this.#draw();
      this.#tell("");
    } catch (problem) {
      if (this.#closed) return;
      this.#tell(problem.text ?? problem.message);
    } finally {
      if (this.#asked === key) this.#asked = null;
    }
    this.element.setAttribute("aria-busy", "false");
    if (this.#due && this.#visible) this.#fetch();
  }

  #tell(text) {
    setText(this.note, text);
    this.note.hidden = text === "";
    this.room.hidden = text !== "" && this.#drawn === null;
  }

  async #draw() {
    if (this.#drawn === null) return;
    this.#caption();
    const { Plotly, templates } = await tools();
    if (this.#closed) return;
    this.#stale = false;
    this.#caption(); // another figure may have come while Plotly was fetched
    const { data, layout, question } = this.#drawn;
    this.plot.setAttribute("role", "group"); // not "img": Plotly's buttons within can be focused
    this.plot.setAttribute("aria-label", `${this.heading.textContent}. ${this.about.textContent}`);
    this.plot.style.height = `${plotHeight(layout.height ?? 380)}px`;
    const overSteps = layout.xaxis?.title?.text === "step" && layout.meta?.empty !== true;
    if (overSteps) this.leaveSteps ??= join(this);
    const shown = {
      ...layout,
      title: { text: "" },
      width: printing() ? SHEET : undefined,
      height: undefined,
      autosize: !printing(),
      margin: { ...layout.margin, t: hasWordsAbove(layout) ? 50 : 34 },
      template: templates[theme()],
      uirevision: question,
    };
    // Plotly writes the range that is shown into what it is given: the figure's own range is to stay as it came.
    if (layout.xaxis) shown.xaxis = { ...layout.xaxis, ...(overSteps && shownSteps() ? { range: [...shownSteps()] } : {}) };
    // Beside long names of layers the axis is short, and Plotly would write numbers into one another.
    if (overSteps && data[0]?.type === "heatmap" && this.plot.clientWidth < NARROW) shown.xaxis.nticks = 4;
    this.onlyLines = overSteps && data.every(({ type }) => type === "scatter");
    if (this.onlyLines) Object.assign(shown, { hovermode: "x", hoversubplots: "axis" }); // the values of all lines at a step
    const done = Plotly.react(this.plot, data, shown, (this.config ??= this.#config(Plotly))); // Plotly begins from nothing for another config
    if (!this.listens) { // before the drawing is done: the figure can be zoomed from its first moment on
      this.listens = true;
      this.plot.on("plotly_relayout", (changes) => this.#zoomedHere(changes));
      this.plot.on("plotly_hover", ({ points: [{ x }] }) => this.onlyLines && point(x)); // the step whose values are shown
      if (this.onPick) this.plot.on("plotly_click", ({ points: [{ pointIndex }] }) => this.onPick({ pointIndex, meta: this.#drawn.layout.meta }));
    }
    await done;
  }

  #caption() {
    const { title } = this.#drawn.layout;
    writeMarkup(this.heading, title?.text ?? "");
    writeMarkup(this.about, title?.subtitle?.text ?? "");
  }

  #config(Plotly) {
    const name = () => `${document.title.split(" - ")[0]} ${this.heading.textContent}`.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 100);
    const button = (ending, title, path, text, type) => ({
      name: `download-${ending}`, title, icon: { width: 24, height: 24, path }, click: () => download(`${name()}.${ending}`, text(this.#drawn), type),
    });
    const image = { name: "download-png", title: "Download plot as a PNG", icon: Plotly.Icons.camera, click: (plot) => Plotly.downloadImage(plot, { format: "png", filename: name() }) };
    return {
      displaylogo: false,
      responsive: true,
      showTips: false, // it would cover the header
      plotlyServerURL: "", // the button that asks for it is removed by the templates
      modeBarButtonsToRemove: ["toImage", "select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
      modeBarButtonsToAdd: [image, button("csv", "Download the numbers as CSV", TABLE, csv, "text/csv"), button("json", "Download the figure as JSON", BRACES, json, "application/json")],
    };
  }

  #zoomedHere(changes) {
    if (!this.leaveSteps || !Object.keys(changes).some((key) => key.startsWith("xaxis."))) return;
    const { range, autorange } = this.plot.layout.xaxis;
    const own = this.#drawn.layout.xaxis.range;
    // A double click goes back to all steps, or to the range that the figure came with.
    zoom(autorange || (own && String(range) === String(own)) ? null : [...range], this);
  }

  #pointing(event) {
    const axis = this.plot._fullLayout?.xaxis;
    if (!this.leaveSteps || !axis || this.onlyLines) return;
    const place = event.clientX - this.plot.getBoundingClientRect().left - axis._offset;
    point(place >= 0 && place <= axis._length ? Math.round(axis.p2d(place)) : null);
  }
}

// Words above the axes, such as "since step 300", have a line of their own: Plotly's buttons have the one above them.
function hasWordsAbove({ annotations = [] }) {
  return annotations.some(({ y, yref, yanchor }) => y === 1 && yref === "paper" && yanchor === "bottom");
}

function plotHeight(height) {
  return Math.max(height, LEAST_HEIGHT) - TITLE_HEIGHT;
}
