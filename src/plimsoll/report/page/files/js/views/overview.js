// The overview: the findings with their figures, and the pictures of the run that the registry of figures offers.

import { address } from "../api.js";
import { clean, el, renderList, reveal, setText } from "../dom.js";
import { isReport } from "../embedded.js";
import { Picture } from "../figures/picture.js";
import { change, replace, to, values, visit, withState } from "../router.js";
import { badge, tensorWords } from "../words.js";
import { FindingView, keysOf } from "./finding.js";

/** A drawing's name in an address: "heatmap:norm:weights". */
const nameOf = ({ figure, arguments: given }) => [figure, ...Object.values(given)].join(":");

export class OverviewPart {
  constructor(page) {
    this.page = page;
    this.chosen = null; // the key of the finding that is shown
    this.list = el("ol", { class: "findings" });
    this.none = el("p", { class: "soft" });
    const onPick = (point) => this.#picked(point);
    this.detail = new FindingView(page, onPick);
    this.details = []; // of a report, which shows all findings
    this.more = el("div", { class: "all-findings" });
    this.scale = el("div", { class: "offered" });
    this.choice = el("select", { id: "layers-figure", onchange: () => this.#chooseLayers() });
    this.layers = new Picture({
      address: () => this.#at(this.#chosenLayers()), question: () => this.choice.value, onPick,
      hint: "Click a row to see where that layer\u2019s values lie. The list of tensors leads there too.",
      height: () => this.#chosenLayers()?.height ?? 400, title: () => this.#chosenLayers()?.label ?? "",
    });
    this.layers.element.classList.add("layers-figure");
    this.layers.heading.after(el("p", { class: "controls" }, el("label", { for: "layers-figure" }, "Show"), this.choice));
    this.spectrogram = new Picture({
      address: () => {
        const tensor = this.run?.first_tensor;
        return tensor && !this.#isFindings(tensor) ? this.#at({ figure: "spectrogram", arguments: tensor }) : null;
      },
      question: () => JSON.stringify(this.run?.first_tensor), height: () => 460, title: () => tensorWords(this.run?.first_tensor),
    });
    this.spectrogram.element.classList.add("spectrogram-figure");
    this.other = el("p", { class: "controls" });
    this.spectrogram.heading.after(this.other);
    this.found = el("div", { class: "found" },
      el("section", { "aria-labelledby": "findings-title" }, el("h2", { id: "findings-title" }, "Findings"), this.none, this.list), isReport ? this.more : this.detail.element);
    this.pictures = el("section", { class: "pictures", "aria-labelledby": "pictures-title" }, el("h2", { id: "pictures-title" }, "The run in pictures"),
      this.scale, this.layers.element, isReport ? null : this.spectrogram.element);
    this.element = el("div", {}, this.found, this.pictures);
    this.leaveKeys = page.take([
      { keys: ["j", "ArrowDown"], says: "Next finding", act: (event) => this.#move(event, 1) },
      { keys: ["k", "ArrowUp"], says: "Previous finding", act: (event) => this.#move(event, -1) },
    ]);
  }

  close() {
    this.leaveKeys();
    for (const picture of this.#all()) picture.close();
  }

  go(route) {
    this.#offered(route.values.get("layers"));
    if (isReport) return;
    const { findings } = this.page.run.summary;
    const index = route.part === "finding" ? route.finding : 0;
    this.unknown = route.part === "finding" && index >= findings.length;
    this.chosen = keysOf(findings)[index] ?? null;
    this.#choose();
    if (route.part === "finding" && this.chosen) reveal(this.detail.element);
  }

  /** The element that a route of this part leads to. */
  placeOf(route) {
    if (route.part === "pictures") return this.pictures;
    return route.part === "finding" ? this.details[route.finding]?.element ?? this.found : this.found;
  }

  /** Shows new data of the run. */
  renew(run) {
    this.run = run;
    const { findings } = run.summary;
    setText(this.none, findings.length ? "" : nothing(run.summary));
    this.none.hidden = findings.length > 0;
    const keys = keysOf(findings);
    renderList(this.list, findings, (_, index) => keys[index], () => this.#item(), (node, finding, index) => this.#fillItem(node, finding, index));
    // Until one is chosen it is the verdict's own, which comes first.
    if (findings.length && (this.chosen === null || this.page.route.part === "overview")) [this.chosen] = keys;
    this.#offered(values().get("layers"));
    if (isReport) this.#showAll();
    else if (this.shownOnce) this.#choose();
    for (const picture of this.#all()) picture.refresh();
  }

  #all() { return [this.detail, ...this.details, ...[...this.scale.children].map((node) => node.picture), this.layers, this.spectrogram]; }

  #index() { return keysOf(this.run.summary.findings).indexOf(this.chosen); }

  #at(drawing) {
    return drawing ? address(["runs", this.page.id, "figure", drawing.figure], drawing.arguments) : null;
  }

  /** The drawings that the registry offers for this run. The one of the address is chosen, else the first that no finding shows. */
  #offered(asked) {
    const of = (section) => this.run.pictures.filter((drawing) => drawing.section === section);
    renderList(this.scale, of("scale"), nameOf, (drawing) => new Picture({
      address: () => (this.#above(drawing) ? null : this.#at(drawing)), question: () => drawing.label,
      height: () => this.run.pictures.find((other) => nameOf(other) === nameOf(drawing))?.height ?? 400, title: () => clean(drawing.label),
    }).element);
    const layers = of("layers");
    const before = this.choice.value;
    renderList(this.choice, layers, nameOf, (drawing) => el("option", { value: nameOf(drawing) }, clean(drawing.label)));
    const offered = [...this.choice.options].map((option) => option.value);
    const first = offered[Math.max(layers.findIndex((drawing) => !this.#above(drawing)), 0)] ?? "";
    this.choice.value = [asked, this.picked ? before : null].find((name) => offered.includes(name)) ?? first;
    this.#hideEmpty();
    if (this.choice.value !== before) this.layers.refresh();
    const tensor = this.run.first_tensor;
    if (tensor) {
      const link = el("a", { href: to.tensor(this.page.id, tensor.collection, tensor.name) }, "Choose another tensor, or its formats");
      if (this.other.firstElementChild?.getAttribute("href") !== link.getAttribute("href")) this.other.replaceChildren(link);
    }
  }

  /** Hides the pictures of a run whose only one is above, with its finding. */
  #hideEmpty() {
    const curves = this.run.pictures.filter((drawing) => drawing.section === "scale");
    const hasTensor = !isReport && this.run.first_tensor;
    this.pictures.hidden = !this.choice.options.length && !hasTensor && curves.every((drawing) => this.#above(drawing));
  }

  #chooseLayers() {
    this.picked = true;
    change({ layers: this.choice.value });
    this.layers.refresh();
  }

  #chosenLayers() {
    return this.run?.pictures.find((drawing) => nameOf(drawing) === this.choice.value);
  }

  /** Whether a finding that is shown has that drawing: then it is not drawn a second time below. */
  #above({ figure, arguments: { collection = "gradients", statistic } }) {
    const { findings } = this.run.summary;
    const shown = isReport ? findings : findings.slice(this.#index()).slice(0, 1);
    return shown.some((finding) => [figure, `${statistic}_heatmap`].includes(finding.figure) && (finding.collection || collection) === collection);
  }

  #isFindings({ collection, name }) {
    const finding = this.run.summary.findings[this.#index()];
    return finding?.figure === "spectrogram" && finding.collection === collection && finding.where[0] === name;
  }

  #item() {
    const mark = el("span");
    const name = el("span", { class: "finding-name" });
    const since = el("span", { class: "soft since" });
    const where = el("span", { class: "soft where" });
    const node = el("li", {}, el("a", {}, mark, name, since, where));
    node.parts = { mark, name, since, where };
    return node;
  }

  #fillItem(node, finding, index) {
    const { mark, name, since, where } = node.parts;
    node.firstElementChild.setAttribute("href", to.finding(this.page.id, index));
    if (mark.dataset.state !== finding.severity) mark.replaceChildren(badge(finding.severity));
    mark.dataset.state = finding.severity;
    setText(name, finding.shown.title);
    setText(since, finding.shown.when);
    setText(where, clean(finding.shown.where) || "the whole run");
  }

  #showAll() {
    const { findings } = this.run.summary;
    this.list.hidden = findings.length < 2; // of one there is no list
    this.details = findings.map((finding, index) => {
      const view = new FindingView(this.page, (point) => this.#picked(point));
      view.show(finding, index);
      return view;
    });
    this.more.replaceChildren(...this.details.map(({ element }) => element));
  }

  /** Marks the chosen finding in the list and shows all of it. */
  #choose() {
    this.shownOnce = true;
    const index = this.#index();
    const finding = this.run.summary.findings[index];
    for (const [place, node] of [...this.list.children].entries()) {
      node.firstElementChild.toggleAttribute("aria-current", place === index);
    }
    this.detail.element.hidden = this.unknown !== true && !finding;
    this.found.classList.toggle("single", this.detail.element.hidden);
    if (this.unknown) return this.detail.say("There is no such finding (any more). Choose one from the list.");
    if (!finding) return;
    this.#hideEmpty();
    if (this.page.route.part === "finding" && this.page.route.finding !== index) {
      this.page.route.finding = index; // a more severe one came before it
      replace(withState(to.finding(this.page.id, index)));
    }
    if (this.detail.show(finding, index)) for (const picture of this.#all().slice(1)) picture.refresh();
  }

  #picked(point) {
    const tensor = tensorOf(point, this.run.collections);
    if (tensor) visit(withState(to.tensor(this.page.id, tensor.collection, tensor.name)));
  }

  #move(event, by) {
    const links = [...this.list.querySelectorAll("a")];
    const arrow = event.key.startsWith("Arrow");
    if (!links.length || (arrow && !this.list.contains(document.activeElement))) return false; // the arrows scroll
    const here = links.indexOf(document.activeElement);
    const now = here >= 0 ? here : this.#index();
    links[Math.min(Math.max(now + by, 0), links.length - 1)].focus();
  }
}

/** The tensor of a clicked point, as the figure's `meta` says; null for none. */
export function tensorOf(point, collections) {
  const { collection, rows, name } = point.meta ?? {};
  const row = Array.isArray(point.pointIndex) ? point.pointIndex[0] : point.pointIndex;
  const tensor = Array.isArray(rows) ? rows[row] : name;
  return (collections[collection] ?? []).includes(tensor) ? { collection, name: tensor } : null;
}

function nothing(summary) {
  if (summary.state === "empty") return isReport ? "There is nothing to judge: the run holds no records." : "Nothing was recorded yet. New samples appear by themselves.";
  return "No findings.";
}
