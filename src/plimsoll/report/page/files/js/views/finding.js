// A finding: its words, its numbers, the layers that it names, and its figure.

import { address } from "../api.js";
import { clean, el, named } from "../dom.js";
import { isReport } from "../embedded.js";
import { Picture } from "../figures/picture.js";
import { to } from "../router.js";
import { badge, prose, title, whole } from "../words.js";

const LOCATIONS = 12; // layers that are listed at once; the others unfold

/** The keys of findings, whose indices may change while the run goes on. Those alike in rule, collection and step are numbered. */
export function keysOf(findings) {
  const seen = new Map();
  return findings.map(({ rule, collection, since_step: since }) => {
    const key = `${rule}|${collection}|${since}`, count = (seen.get(key) ?? 0) + 1;
    seen.set(key, count);
    return count > 1 ? `${key}|${count}` : key;
  });
}

export class FindingView {
  #text = null;

  constructor(page, onPick) {
    this.page = page;
    this.finding = null;
    this.index = -1;
    this.key = null;
    this.element = el(isReport ? "article" : "section", { class: "finding", tabindex: isReport ? "-1" : null });
    this.figure = new Picture({
      address: () => this.#address(), question: () => `finding ${this.key}`, onPick, level: isReport ? "h4" : "h3",
      height: () => this.page.run.figure_heights[this.index] ?? 400, title: () => title(this.finding?.figure ?? ""),
    });
  }

  close() { this.figure.close(); }

  refresh() { this.figure.refresh(); }

  /** Shows a finding, the one of this index. Returns whether anything of it is new. */
  show(finding, index) {
    Object.assign(this, { finding, index, key: keysOf(this.page.run.summary.findings)[index] });
    const text = JSON.stringify(finding);
    if (this.#text === text && this.element.contains(this.figure.element)) return false;
    const focused = this.element.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    this.#text = text;
    this.element.dataset.key = this.key;
    this.element.setAttribute("aria-label", `${finding.severity}: ${clean(finding.shown.title)}`);
    const body = this.#body();
    if (this.element.contains(this.figure.element)) this.element.firstElementChild.replaceWith(body);
    else this.element.replaceChildren(body, this.figure.element);
    this.figure.refresh();
    if (focused) [...body.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
    return true;
  }

  /** Shows a sentence in its place. */
  say(text) { this.element.replaceChildren(el("p", { class: "note" }, text)); }

  #address() {
    if (this.finding === null || this.#owner() !== this.index) return null;
    return address(["runs", this.page.id, "figure", this.finding.figure], { finding: this.index });
  }

  /** The first finding that has the same figure: itself, an earlier one of a report, or null where the report has no figure. */
  #owner() {
    return this.page.run.same_figure ? this.page.run.same_figure[this.index] : this.index;
  }

  #body() {
    const { id, run } = this.page;
    const { finding } = this;
    const { shown } = finding;
    const evidence = shown.evidence.map(([name, value]) => el("div", {}, el("dt", {}, clean(name)), withProse("dd", value)));
    const locations = finding.spots.map((spot, index) => (index < shown.names.length ? el("li", {}, this.#tensorLink(finding.collection, spot.name, shown.names[index]),
      withProse("span", ` since step ${whole(spot.since_step)}${shown.spots[index] ? `, ${shown.spots[index]}` : ""}`)) : null));
    const more = locations.slice(LOCATIONS).filter(Boolean);
    const unlisted = finding.spots.length - shown.names.length;
    const owner = this.#owner();
    const [heading, part] = isReport ? ["h3", "h4"] : ["h2", "h3"];
    return el("div", { class: "finding-body" },
      isReport ? badge(finding.severity) : null,
      el(heading, {}, clean(shown.title)),
      el("p", { class: "soft" }, clean(shown.explanation)),
      el("p", { class: "soft" }, `At ${shown.when}`, shown.where ? `, ${clean(shown.where)}` : ""),
      withProse("p", finding.meaning, "meaning"),
      shown.advice ? withProse("p", `What to do: ${shown.advice}`, "advice") : null,
      evidence.length ? el("dl", { class: "facts evidence" }, evidence) : null,
      locations.length ? el(part, {}, "Where") : null,
      locations.length ? el("ul", { class: "spots" }, locations.slice(0, LOCATIONS)) : null,
      more.length ? el("details", {}, el("summary", {}, `and ${whole(more.length)} more`), el("ul", { class: "spots" }, more)) : null,
      unlisted > 0 ? el("p", { class: "soft" }, `and ${whole(unlisted)} more that are not listed`) : null,
      owner !== null && owner < this.index
        ? el("p", { class: "soft" }, "Its figure is that of ", el("a", { href: to.finding(id, owner) }, `finding ${owner + 1}`), ".") : null,
      finding.collection === "gradients" && (run.whatif === undefined || run.whatif?.collection === "gradients")
        ? el("p", {}, el("a", { href: to.whatif(id, { collection: finding.collection }) }, "Try another format or scale")) : null);
  }

  #tensorLink(collection, name, text) {
    const recorded = (this.page.run.collections[collection] ?? []).includes(name);
    return recorded ? el("a", { href: to.tensor(this.page.id, collection, name) }, named(text, 56)) : named(text, 56);
  }
}

function withProse(tag, text, kind = null) {
  const element = el(tag, { class: kind });
  prose(element, text);
  return element;
}
