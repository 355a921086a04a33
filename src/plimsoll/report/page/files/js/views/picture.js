// A figure: what the API gives, drawn by Plotly in the theme that is shown, renewed without losing the zoom.

import { get, Latest, Problem } from "../api.js";
import { el, say } from "../dom.js";
import { isReport, unpacked } from "../embedded.js";
import { onTheme, printing, theme } from "../theme.js";

// plotly.js with the traces that figures use, and plimsoll.report.TEMPLATES.
const ASSETS = document.documentElement.dataset.assets; // holds the page's version, so the browser keeps these files
const PLOTLY = `${ASSETS}/plotly.min.js`;
const TEMPLATES = `${ASSETS}/templates.json`;
const SHEET = 680; // pixels across a printed page
const CONFIG = {
  displaylogo: false,
  responsive: true,
  plotlyServerURL: "", // the button that asks for it is removed by the templates
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
};

let loading = null;

/** Plotly and the templates, fetched once, when the first figure is looked at. */
function tools() {
  loading ??= Promise.all([isReport ? inline() : script(PLOTLY), get(TEMPLATES)]).catch((error) => {
    loading = null;
    throw error;
  });
  return loading.then(([, templates]) => ({ Plotly: globalThis.Plotly, templates }));
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

/** A figure's text as nodes: of Plotly's markup only raised digits stay. The parser's document is inert: nothing in it
 * is run, loaded or shown. */
function marked(markup = "") {
  const { body } = new DOMParser().parseFromString(markup.replaceAll("<br>", " "), "text/html");
  const read = (node) => [...node.childNodes].flatMap((each) => (each.nodeName === "SUP" ? [el("span", { class: "unseen" }, "^"), el("sup", {}, each.textContent)]
    : each.nodeType === Node.TEXT_NODE ? each.data : read(each)));
  return read(body);
}

function write(element, markup) {
  if (element.dataset.markup === markup) return;
  element.dataset.markup = markup;
  element.replaceChildren(...marked(markup));
}

const inView = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) target.picture.looked(isIntersecting);
}, { rootMargin: "200px" });

/** A picture of its own. `address` gives the figure's address, or null for none; `question` what the zoom belongs to. */
export class Picture {
  #latest = new Latest();
  #drawn = null; // the JSON that is shown
  #asked = null; // the address that is being asked
  #visible = false;
  #closed = false;
  #due = false;

  constructor({ address = () => null, question = address, onPick = null, level = "h3", hint = null }) {
    Object.assign(this, { address, question, onPick });
    this.plot = el("div", { class: "plot" });
    this.heading = el(level, { class: "picture-title" });
    this.about = el("p", { class: "soft" });
    this.note = el("p", { class: "note", hidden: true });
    this.element = el("figure", { class: "picture", "aria-busy": "true" },
      el("figcaption", {}, this.heading, this.about, hint && el("p", { class: "soft hint" }, hint)), this.plot, this.note);
    this.element.picture = this;
    this.leave = onTheme(() => (printing() && isReport && this.#due ? this.#fetch() : this.#draw()));
    inView.observe(this.element);
  }

  /** Asks anew: at once if it is in view, else when it comes there. */
  refresh() {
    this.#due = true;
    this.element.hidden = this.address() === null; // what is hidden never comes into view
    return this.#visible ? this.#fetch() : Promise.resolve();
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
  }

  close() {
    this.#closed = true;
    this.leave();
    this.#latest.drop();
    inView.unobserve(this.element);
    if (this.#drawn && globalThis.Plotly) globalThis.Plotly.purge(this.plot);
  }

  async #fetch() {
    const address = this.address();
    if (address !== null && address === this.#asked) return; // it is under way; `#due` asks once more after it
    this.#due = false;
    this.element.hidden = address === null;
    if (address === null) return;
    this.element.setAttribute("aria-busy", "true");
    this.#asked = address;
    try {
      const answer = await this.#latest.ask(address);
      if (answer === null) return; // a later question is under way
      this.#drawn = { ...answer.figure, question: this.question() };
      await this.#draw();
      this.#tell("");
    } catch (problem) {
      if (this.#closed) return;
      this.#tell(`${problem.message} ${problem.advice ?? ""}`.trim());
    } finally {
      if (this.#asked === address) this.#asked = null;
    }
    this.element.setAttribute("aria-busy", "false");
    if (this.#due && this.#visible) this.#fetch();
  }

  #tell(text) {
    say(this.note, text);
    this.note.hidden = text === "";
    this.plot.hidden = text !== "" && this.#drawn === null;
  }

  async #draw() {
    if (this.#drawn === null) return;
    const { Plotly, templates } = await tools();
    const { data, layout, question } = this.#drawn;
    write(this.heading, layout.title?.text ?? "");
    write(this.about, layout.title?.subtitle?.text ?? "");
    this.about.hidden = this.about.textContent === "";
    this.plot.setAttribute("role", "group"); // not "img": Plotly's buttons within can be focused
    this.plot.setAttribute("aria-label", `${this.heading.textContent}. ${this.about.textContent}`);
    const height = Math.max(layout.height ?? 380, 220) - 40;
    this.plot.style.height = `${height}px`;
    const shown = {
      ...layout,
      title: { text: "" },
      width: printing() ? SHEET : undefined,
      height: undefined,
      autosize: !printing(),
      margin: { ...layout.margin, t: 26 },
      template: templates[theme()],
      uirevision: question,
    };
    await Plotly.react(this.plot, data, shown, CONFIG);
    if (this.onPick && !this.picks) {
      this.picks = true;
      this.plot.on("plotly_click", ({ points: [{ pointIndex }] }) => this.onPick({ pointIndex, meta: this.#drawn.layout.meta }));
    }
  }
}
