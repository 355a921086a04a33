// The overview: the findings, the one that is chosen with its figure, and the four pictures of the run.

import { address } from "./api.js";
import { clean, el, keep, named, say } from "./dom.js";
import { take } from "./keys.js";
import { Picture } from "./picture.js";
import { replace, to } from "./router.js";
import { badge, collectionWords, prose, whole } from "./words.js";

const STATISTICS = {
  underflow: "underflow", zero: "zeros", nonfinite: "non-finite values", headroom: "room to the top", norm: "norm",
  rms: "root mean square", std: "standard deviation", absmean: "mean size", absmax: "largest value",
};
const SPOTS = 12; // layers of a finding that are listed

const keyOf = (finding) => `${finding.rule}|${finding.collection}|${finding.since_step}`;

export class OverviewPart {
  constructor(page) {
    this.page = page;
    this.chosen = null; // the key of the finding that is shown; its index may change while the run goes on
    this.list = el("ol", { class: "findings" });
    this.none = el("p", { class: "soft" });
    this.detail = el("section", { class: "finding", "aria-label": "The finding" });
    this.figure = new Picture({
      address: () => this.#figure(), question: () => `finding ${this.chosen}`, onPick: (point) => this.#picked(point),
    });
    this.#pictures();
    this.found = el("div", { class: "found" },
      el("section", { "aria-labelledby": "findings-title" }, el("h2", { id: "findings-title" }, "Findings"), this.none, this.list), this.detail);
    this.element = el("div", {}, this.found,
      el("section", { class: "pictures", "aria-labelledby": "pictures-title" }, el("h2", { id: "pictures-title" }, "The run in pictures"),
        this.loss.element, this.heat.element, this.scale.element, this.spectrogram.element));
    this.leaveKeys = take([
      { keys: ["j", "ArrowDown"], says: "Next finding", act: (event) => this.#move(event, 1) },
      { keys: ["k", "ArrowUp"], says: "Finding before", act: (event) => this.#move(event, -1) },
    ]);
  }

  close() {
    this.leaveKeys();
    for (const picture of this.#all()) picture.close();
  }

  go(route) {
    const { findings } = this.page.run.summary;
    const index = route.part === "finding" ? route.finding : 0;
    this.unknown = route.part === "finding" && index >= findings.length;
    this.chosen = findings[index] ? keyOf(findings[index]) : null;
    this.#choose();
    if (route.part === "finding" && this.chosen) this.#reveal();
  }

  /** Shows what is new in the run. */
  renew(run) {
    this.run = run;
    const { findings } = run.summary;
    say(this.none, findings.length ? "" : nothing(run.summary));
    this.none.hidden = findings.length > 0;
    keep(this.list, findings, keyOf, (finding) => this.#item(finding), (node, finding, index) => this.#fillItem(node, finding, index));
    // Until one is chosen it is the verdict's own, which comes first.
    if (findings.length && (this.chosen === null || this.page.route.part === "overview")) this.chosen = keyOf(findings[0]);
    this.#controls();
    if (this.shownOnce) this.#choose();
    for (const picture of this.#all()) picture.refresh();
  }

  #all() { return [this.figure, this.loss, this.heat, this.scale, this.spectrogram]; }

  #index() { return this.run.summary.findings.findIndex((finding) => keyOf(finding) === this.chosen); }

  #at(figure, values) { return address(["runs", this.page.id, "figure", figure], values); }

  #figure() {
    const index = this.run ? this.#index() : -1;
    return index < 0 ? null : this.#at(this.run.summary.findings[index].figure, { finding: index });
  }

  #pictures() {
    this.loss = new Picture({ address: () => (this.#above("loss_and_scale") ? null : this.#at("loss_and_scale")), question: () => "loss" });
    this.statistic = el("select", { id: "heat-statistic", onchange: () => this.heat.refresh() },
      Object.entries(STATISTICS).map(([value, text]) => el("option", { value }, text)));
    this.collection = el("select", { id: "heat-collection", onchange: () => this.heat.refresh() });
    this.heat = new Picture({
      address: () => (this.collection.value ? this.#at("heatmap", { statistic: this.statistic.value, collection: this.collection.value }) : null),
      question: () => `heat ${this.statistic.value} ${this.collection.value}`,
      onPick: (point) => this.#picked(point),
      hint: "Choose a row to see where that layer\u2019s values lie.",
    });
    this.heat.heading.after(el("p", { class: "controls" },
      el("label", { for: "heat-statistic" }, "Show"), this.statistic, el("label", { for: "heat-collection" }, "of"), this.collection));
    this.scale = new Picture({ address: () => (this.#above("scale_window") ? null : this.#at("scale_window")), question: () => "window" });
    this.spectrogram = new Picture({
      address: () => this.#shownTensor() && !this.#isFindings(this.#shownTensor()) && this.#at("spectrogram", this.#shownTensor()) || null,
      question: () => JSON.stringify(this.#shownTensor()),
    });
    this.other = el("p", { class: "controls" });
    this.spectrogram.heading.after(this.other);
  }

  /** The collections that there are, without losing the choice. */
  #controls() {
    const collections = Object.keys(this.run.collections);
    const before = this.collection.value;
    keep(this.collection, collections, (name) => name, (name) => el("option", { value: name }, collectionWords(name)));
    const first = collections.find((name) => !this.#above("underflow_heatmap", name)) ?? collections[0] ?? "";
    this.collection.value = collections.includes(before) ? before : first;
    const tensor = this.#shownTensor();
    if (tensor) {
      const link = el("a", { href: to.tensor(this.page.id, tensor.collection, tensor.name) }, "Choose another tensor, or its formats");
      if (this.other.firstElementChild?.getAttribute("href") !== link.getAttribute("href")) this.other.replaceChildren(link);
    }
  }

  /** Whether the chosen finding's figure is that one: then it is not drawn a second time below. */
  #above(figure, collection = null) {
    const finding = this.run?.summary.findings[this.#index()];
    return finding?.figure === figure && (collection === null || finding.collection === collection);
  }

  #isFindings({ collection, name }) {
    return this.#above("spectrogram", collection) && this.run.summary.findings[this.#index()].where[0] === name;
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

  /** Marks the chosen finding in the list and tells all of it. */
  #choose() {
    this.shownOnce = true;
    const index = this.#index();
    const finding = this.run.summary.findings[index];
    for (const [place, node] of [...this.list.children].entries()) {
      node.firstElementChild.toggleAttribute("aria-current", place === index);
    }
    this.detail.hidden = this.unknown !== true && !finding;
    this.found.classList.toggle("single", this.detail.hidden);
    if (this.unknown) return this.detail.replaceChildren(el("p", { class: "note" }, "There is no such finding (any more). Choose one from the list."));
    if (!finding) return;
    if (this.page.route.part === "finding" && this.page.route.finding !== index) {
      this.page.route.finding = index; // a graver one came before it
      replace(to.finding(this.page.id, index));
    }
    const told = JSON.stringify(finding);
    if (this.told === told && this.detail.contains(this.figure.element)) return;
    for (const picture of [this.loss, this.scale, this.spectrogram]) picture.refresh();
    const focused = this.detail.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    this.told = told;
    this.detail.dataset.key = this.chosen;
    const body = this.#body(finding);
    if (this.detail.contains(this.figure.element)) this.detail.firstElementChild.replaceWith(body);
    else this.detail.replaceChildren(body, this.figure.element);
    this.figure.refresh();
    if (focused) [...body.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
  }

  #body(finding) {
    const { id } = this.page;
    const { shown } = finding;
    const evidence = shown.evidence.map(([name, value]) => el("div", {}, el("dt", {}, clean(name)), inTag("dd", value)));
    const spots = finding.spots.slice(0, SPOTS).map((spot, index) => el("li", {}, this.#tensorLink(finding.collection, spot.name, shown.names[index]),
      inTag("span", ` since step ${whole(spot.since_step)}${shown.spots[index] ? `, ${shown.spots[index]}` : ""}`)));
    const left = finding.spots.length - spots.length;
    return el("div", { class: "finding-body" },
      el("h2", {}, clean(shown.title)),
      el("p", { class: "soft" }, clean(shown.explanation)),
      el("p", { class: "soft" }, `At ${shown.when}`, shown.where ? `, ${clean(shown.where)}` : ""),
      told("meaning", finding.meaning),
      told("advice", `What to do: ${finding.advice}`),
      evidence.length ? el("dl", { class: "facts evidence" }, evidence) : null,
      spots.length ? el("h3", {}, "Where") : null,
      spots.length ? el("ul", { class: "spots" }, spots, left > 0 ? el("li", { class: "soft" }, `and ${left} more`) : null) : null,
      finding.collection === "gradients" ? el("p", {}, el("a", { href: to.whatif(id, { collection: finding.collection }) }, "What another format or scale would make of it")) : null);
  }

  #tensorLink(collection, name, text) {
    const there = (this.run.collections[collection] ?? []).includes(name);
    return there ? el("a", { href: to.tensor(this.page.id, collection, name) }, named(text, 56)) : named(text, 56);
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
    const { top } = this.detail.getBoundingClientRect();
    if (top > innerHeight * 0.8 || top < 0) this.detail.scrollIntoView({ block: "start" });
  }
}

/** The tensor that a clicked point of a figure stands for, as the figure's `meta` says; null for none. */
export function tensorOf(point, collections) {
  const { collection, rows, name } = point.meta ?? {};
  const row = Array.isArray(point.pointIndex) ? point.pointIndex[0] : point.pointIndex;
  const found = Array.isArray(rows) ? rows[row] : name;
  return (collections[collection] ?? []).includes(found) ? { collection, name: found } : null;
}

function told(kind, text) {
  const element = el("p", { class: kind });
  prose(element, text);
  return element;
}

function inTag(tag, text) {
  const element = el(tag);
  prose(element, text);
  return element;
}

function nothing(summary) {
  if (summary.state === "empty") return "Nothing was recorded yet. New samples appear by themselves.";
  return "No findings.";
}
