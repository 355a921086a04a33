// The overview: the findings with their figures, and the pictures of the run that the registry of figures offers.

import { address } from "../api.js";
import { clean, el, keep, say } from "../dom.js";
import { isReport } from "../embedded.js";
import { replace, to } from "../router.js";
import { badge } from "../words.js";
import { FindingView, keyOf } from "./finding.js";
import { Picture } from "./picture.js";

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
    this.choice = el("select", { id: "layers-figure", onchange: () => this.layers.refresh() });
    this.layers = new Picture({
      address: () => this.#at(this.#chosenLayers()), question: () => this.choice.value, onPick,
      hint: "Choose a row to see where that layer\u2019s values lie.",
    });
    this.layers.element.classList.add("layers-figure");
    this.layers.heading.after(el("p", { class: "controls" }, el("label", { for: "layers-figure" }, "Show"), this.choice));
    this.spectrogram = new Picture({
      address: () => {
        const tensor = this.#shownTensor();
        return tensor && !this.#isFindings(tensor) ? this.#at({ figure: "spectrogram", arguments: tensor }) : null;
      },
      question: () => JSON.stringify(this.#shownTensor()),
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
      { keys: ["k", "ArrowUp"], says: "Finding before", act: (event) => this.#move(event, -1) },
    ]);
  }

  close() {
    this.leaveKeys();
    for (const picture of this.#all()) picture.close();
  }

  go(route) {
    if (isReport) return;
    const { findings } = this.page.run.summary;
    const index = route.part === "finding" ? route.finding : 0;
    this.unknown = route.part === "finding" && index >= findings.length;
    this.chosen = findings[index] ? keyOf(findings[index]) : null;
    this.#choose();
    if (route.part === "finding" && this.chosen) this.#reveal();
  }

  /** The place of a route on this part. */
  placeOf(route) {
    if (route.part === "pictures") return this.pictures;
    return route.part === "finding" ? this.details[route.finding]?.element ?? this.found : this.found;
  }

  /** Shows what is new in the run. */
  renew(run) {
    this.run = run;
    const { findings } = run.summary;
    say(this.none, findings.length ? "" : nothing(run.summary));
    this.none.hidden = findings.length > 0;
    keep(this.list, findings, keyOf, () => this.#item(), (node, finding, index) => this.#fillItem(node, finding, index));
    // Until one is chosen it is the verdict's own, which comes first.
    if (findings.length && (this.chosen === null || this.page.route.part === "overview")) this.chosen = keyOf(findings[0]);
    this.#offered();
    if (isReport) this.#showAll();
    else if (this.shownOnce) this.#choose();
    for (const picture of this.#all()) picture.refresh();
  }

  #all() { return [this.detail, ...this.details, ...[...this.scale.children].map((node) => node.picture), this.layers, this.spectrogram]; }

  #index() { return this.run.summary.findings.findIndex((finding) => keyOf(finding) === this.chosen); }

  #at(drawing) {
    return drawing ? address(["runs", this.page.id, "figure", drawing.figure], drawing.arguments) : null;
  }

  /** The drawings that the registry offers for this run, without losing the choice. */
  #offered() {
    const of = (section) => this.run.pictures.filter((drawing) => drawing.section === section);
    keep(this.scale, of("scale"), (drawing) => JSON.stringify([drawing.figure, drawing.arguments]), (drawing) =>
      new Picture({ address: () => (this.#above(drawing) ? null : this.#at(drawing)), question: () => drawing.label }).element);
    const layers = of("layers");
    const before = this.choice.value;
    keep(this.choice, layers, (drawing) => JSON.stringify([drawing.figure, drawing.arguments]), (drawing) =>
      el("option", { value: JSON.stringify([drawing.figure, drawing.arguments]) }, clean(drawing.label)));
    const values = [...this.choice.options].map((option) => option.value);
    this.choice.value = values.includes(before) ? before : values[Math.max(layers.findIndex((drawing) => !this.#above(drawing)), 0)] ?? "";
    this.pictures.hidden = this.run.pictures.length === 0;
    const tensor = this.#shownTensor();
    if (tensor) {
      const link = el("a", { href: to.tensor(this.page.id, tensor.collection, tensor.name) }, "Choose another tensor, or its formats");
      if (this.other.firstElementChild?.getAttribute("href") !== link.getAttribute("href")) this.other.replaceChildren(link);
    }
  }

  #chosenLayers() {
    return this.run?.pictures.find((drawing) => JSON.stringify([drawing.figure, drawing.arguments]) === this.choice.value);
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

  /** The tensor that tells most: the worst of the gravest finding that names one, else the first there is. */
  #shownTensor() {
    if (!this.run) return null;
    const { collections, summary } = this.run;
    const telling = summary.findings.find((f) => f.where.length && (collections[f.collection] ?? []).includes(f.where[0]));
    if (telling) return { collection: telling.collection, name: telling.where[0] };
    const collection = Object.keys(collections).find((name) => collections[name]?.length);
    return collection ? { collection, name: collections[collection][0] } : null;
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
    say(name, finding.shown.title);
    say(since, finding.shown.when);
    say(where, clean(finding.shown.where) || "the whole run");
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
    if (this.page.route.part === "finding" && this.page.route.finding !== index) {
      this.page.route.finding = index; // a graver one came before it
      replace(to.finding(this.page.id, index));
    }
    if (this.detail.show(finding, index)) for (const picture of this.#all().slice(1)) picture.refresh();
  }

  #picked(point) {
    const tensor = tensorOf(point, this.run.collections);
    if (tensor) location.hash = to.tensor(this.page.id, tensor.collection, tensor.name);
  }

  #move(event, by) {
    const links = [...this.list.querySelectorAll("a")];
    const arrow = event.key.startsWith("Arrow");
    if (!links.length || (arrow && !this.list.contains(document.activeElement))) return false; // the arrows scroll
    const here = links.indexOf(document.activeElement);
    const now = here >= 0 ? here : this.#index();
    links[Math.min(Math.max(now + by, 0), links.length - 1)].focus();
  }

  /** On a narrow page the finding is below the list: it is brought into view. */
  #reveal() {
    const { top } = this.detail.element.getBoundingClientRect();
    if (top > innerHeight * 0.8 || top < 0) this.detail.element.scrollIntoView({ block: "start" });
  }
}

/** The tensor that a clicked point of a figure stands for, as the figure's `meta` says; null for none. */
export function tensorOf(point, collections) {
  const { collection, rows, name } = point.meta ?? {};
  const row = Array.isArray(point.pointIndex) ? point.pointIndex[0] : point.pointIndex;
  const found = Array.isArray(rows) ? rows[row] : name;
  return (collections[collection] ?? []).includes(found) ? { collection, name: found } : null;
}

function nothing(summary) {
  if (summary.state === "empty") return isReport ? "There is nothing to judge: the run holds no records." : "Nothing was recorded yet. New samples appear by themselves.";
  return "No findings.";
}
