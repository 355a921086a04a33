// Runs side by side: their verdicts, where each diverges from the first, their scalars on one axis, and what differs.

import { address, get, onceAtATime, Problem } from "../api.js";
import { clean, el, named, renderList, setOptions, setText, short } from "../dom.js";
import { Picture } from "../figures/picture.js";
import { lineOf, ScalarGrid } from "../figures/scalar_grid.js";
import { take } from "../keys.js";
import { remembered } from "../memory.js";
import { change, to, visit } from "../router.js";
import { Stream } from "../stream.js";
import { badge, collectionNames, collectionWords, number, prose, setCollections, whole } from "../words.js";
import { tagKey } from "./list.js";

const SHOWN = 20; // divergences that are listed
const MOST_SETTINGS = 200; // rows
const LETTERS = "ABCDEFGHIJKL";
const STEPS = "steps"; // the collection of a divergence that is of no tensor

export class ComparePage {
  constructor(frame, { ids, values }) {
    Object.assign(this, { frame, ids, answers: [] });
    this.load = onceAtATime(() => this.#load());
    frame.place("Compare", [["Compare", null]]);
    this.#build(values);
    this.leaveKeys = take([{ keys: ["x"], says: "Swap the first two", act: () => visit(to.compare([ids[1], ids[0], ...ids.slice(2)])) }]);
    this.tokens = {};
    this.stream = new Stream(address(["stream"], { run: ids }), {
      run: (news) => this.#onNews(news), again: () => this.load(), state: (state) => { this.lost = state === "lost"; this.#sign(); },
    });
    this.load();
  }

  takes(route) { return route.view === "compare" && String(route.ids) === String(this.ids); }

  go({ values }) { this.#state(values); }

  close() {
    this.closed = true;
    this.leaveKeys();
    this.stream.close();
    this.both.close();
    this.scalars.close();
    clearTimeout(this.timer);
  }

  #onNews({ id, token }) {
    if (this.tokens[id] === token) return;
    const first = this.tokens[id] === undefined;
    this.tokens[id] = token;
    if (!first) this.load();
  }

  /** Reads each run with the first one. */
  async #load() {
    clearTimeout(this.timer);
    if (this.closed) return;
    try {
      const [a, ...others] = this.ids;
      const answers = await Promise.all(others.map((b) => get(address(["compare"], { a, b }))));
      if (this.closed) return;
      this.#tell("");
      setCollections(answers[0]);
      this.answers = answers;
      this.#fill();
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      if (this.closed) return;
      this.#tell(problem.text);
      if (problem.status === 0 || problem.status >= 500) this.timer = setTimeout(() => this.load(), 3000);
    }
  }

  #build(values) {
    this.sides = this.ids.map((id, place) => this.#side(id, place));
    this.sentence = el("h1", { class: "verdict", "aria-live": "polite" }, "Comparing the runs\u2026");
    this.advice = el("p", { class: "advice" });
    this.note = el("p", { class: "note", role: "alert", hidden: true });
    this.others = el("select", { id: "compare-other", onchange: () => this.#chosen() });
    this.choice = el("p", { class: "controls", hidden: this.ids.length === 2 }, el("label", { for: "compare-other" }, "A against"), this.others);
    this.rows = el("tbody");
    this.diverged = el("section", { "aria-labelledby": "diverged-title", hidden: true }, el("h2", { id: "diverged-title" }, "First divergence"),
      el("div", { class: "scrolls" }, el("table", { class: "cards" }, el("thead", {}, el("tr", {}, ["Step", "Where", "What", "A", "B", "Difference", "Allowed"].map((text, i) =>
        el("th", { scope: "col", class: i === 0 || i > 2 ? "number" : null }, text)))), this.rows)));
    this.changed = el("table", { class: "cards" });
    this.only = el("dl", { class: "settings" });
    this.differs = el("section", { "aria-labelledby": "changed-title", hidden: true }, el("h2", { id: "changed-title" }, "Settings and versions that differ"), el("div", { class: "scrolls" }, this.changed), this.only);
    this.collection = el("select", { id: "compare-collection", onchange: () => this.#chosen() });
    this.both = new Picture({
      address: () => (this.#bothHave(this.collection.value) ? address(["compare", "figure", "before_after"], { a: this.ids[0], b: this.others.value, collection: this.collection.value }) : null),
      question: () => `${this.others.value} ${this.collection.value}`, level: "h2", height: () => 600,
    });
    this.both.heading.after(el("p", { class: "controls" }, el("label", { for: "compare-collection" }, "Of"), this.collection));
    this.scalars = new ScalarGrid({ runs: () => this.#runs(), id: "compare" });
    this.frame.main.replaceChildren(el("article", { class: "view compare-view" },
      el("header", { class: "head" }, this.sentence, this.advice, this.note),
      el("div", { class: "sides" }, this.sides.map(({ element }) => element)),
      el("section", { "aria-labelledby": "scalars-title" }, el("h2", { id: "scalars-title" }, "Scalars"), this.scalars.element),
      this.choice, this.diverged, el("section", { class: "pictures wide" }, this.both.element), this.differs));
    this.#state(values);
  }

  /** Takes over the state that an address holds. */
  #state(values) {
    this.hidden = new Set(values.getAll("hide"));
    this.asked = { collection: values.get("collection") ?? "gradients", other: this.ids.includes(values.get("with")) ? values.get("with") : this.ids[1] };
    this.tags = new Map(this.ids.map((id) => [id, values.getAll("tag").filter((text) => text.startsWith(`${id}:`)).map((text) => text.slice(id.length + 1))]));
    for (const { id, box } of this.sides) box.checked = !this.hidden.has(id);
    this.#options();
    this.scalars.go(values);
    if (!this.answers.length) return;
    this.#fillPair();
    this.both.refresh();
  }

  #side(id, place) {
    const line = lineOf(place);
    const state = el("span");
    const name = el("a", { href: to.run(id) });
    const tags = el("span", { class: "tags" });
    const verdict = el("p", { class: "meaning", "aria-live": "polite" });
    const facts = el("p", { class: "soft" });
    const apart = el("p", { hidden: this.ids.length === 2 });
    const box = el("input", { type: "checkbox", checked: true, onchange: () => this.#hide(id, !box.checked) });
    const others = this.ids.filter((other) => other !== id);
    const element = el("section", { class: "side", "aria-label": `Run ${LETTERS[place]}` },
      el("h2", {}, el("span", { class: `swatch ${line.dash}`, style: `--line: ${line.color}`, "aria-hidden": "true" }), `${LETTERS[place]}  `, name, tags),
      state, verdict, apart, facts,
      el("p", { class: "controls" }, el("label", {}, box, " Show"),
        place ? el("a", { href: to.compare([id, ...others]) }, this.ids.length === 2 ? "Swap the two" : "Make it the first") : null,
        this.ids.length > 2 ? el("a", { href: to.compare(others) }, "Leave out") : null));
    return { id, element, state, name, tags, verdict, facts, apart, box };
  }

  /** The runs as the scalars need them. */
  #runs() {
    const summaries = this.#summaries();
    return this.ids.map((id, place) => ({
      id, name: summaries[place]?.name ?? id, line: lineOf(place), scalars: summaries[place]?.scalars ?? [], hidden: this.hidden.has(id),
    }));
  }

  #bothHave(collection) {
    const summaries = this.#summaries();
    return [0, this.ids.indexOf(this.others.value)].every((place) => summaries[place]?.tensors[collection]);
  }

  #summaries() {
    return this.answers.length ? [this.answers[0].a, ...this.answers.map(({ b }) => b)] : [];
  }

  #hide(id, hide) {
    if (hide) this.hidden.add(id);
    else this.hidden.delete(id);
    change({ hide: [...this.hidden] });
    this.scalars.redraw();
  }

  /** The collections and runs to choose from, without losing the choice. */
  #options() {
    const names = new Map(this.#runs().map((run) => [run.id, run.name]));
    setOptions(this.others, this.ids.slice(1), this.asked.other, (id) => `${LETTERS[this.ids.indexOf(id)]} ${short(names.get(id) ?? id, 40)}`);
    const offered = collectionNames().filter((name) => this.#bothHave(name));
    const collection = this.answers.length && !offered.includes(this.asked.collection) ? offered[0] ?? "" : this.asked.collection;
    setOptions(this.collection, offered, collection, collectionWords);
  }

  #fill() {
    this.#sign();
    this.#options();
    const summaries = this.#summaries();
    const tags = remembered("tags");
    const asked = [...this.tags.values()].some((list) => list.length); // the address has tags
    for (const [place, side] of this.sides.entries()) {
      const summary = summaries[place];
      side.state.replaceChildren(badge(summary.state));
      side.name.replaceChildren(named(summary.name, 48));
      const own = asked ? this.tags.get(side.id) : tags.get(tagKey({ id: side.id, created: summary.created })) ?? [];
      side.tags.replaceChildren(...own.map((tag) => el("span", { class: "tag" }, short(tag, 24))));
      prose(side.verdict, summary.verdict);
      prose(side.apart, place === 0 ? "The others are compared with this run." : this.#apart(place));
      setText(side.facts, `Last step ${summary.last_step < 0 ? "none" : whole(summary.last_step)}, ${summary.closed ? "closed" : "not closed"}`);
    }
    // Whoever gets the address sees the tags of this browser.
    const shown = this.sides.flatMap(({ id, tags: element }) => [...element.children].map((tag) => `${id}:${tag.textContent}`));
    if (!asked && shown.length) change({ tag: shown });
    const names = summaries.map(({ name }) => clean(short(name, 60)));
    const title = names.length === 2 ? `${names[0]} and ${names[1]}` : `${names[0]} and ${names.length - 1} more`;
    this.frame.place(title, [[title, null]]);
    this.scalars.renew([...new Set(summaries.flatMap(({ scalars }) => scalars))]);
    this.#fillPair();
    this.#fillSettings(summaries);
    this.both.refresh();
  }

  /** The first run and the chosen one. */
  #fillPair() {
    const place = this.ids.indexOf(this.others.value);
    const { diff, sentence } = this.answers[place - 1];
    prose(this.sentence, this.ids.length > 2 ? `${whole(this.ids.length)} runs, each compared with ${clean(short(this.answers[0].a.name, 40))}`
      : sentence || "These two runs cannot be compared step by step.");
    setText(this.advice, diff === null ? "Their values cannot be compared step by step. Their verdicts and scalars are below." : "");
    this.advice.hidden = diff !== null;
    const rows = (diff?.partings ?? []).slice(0, SHOWN);
    this.diverged.hidden = rows.length === 0;
    const letter = LETTERS[place];
    setText(this.diverged.querySelectorAll("th")[4], letter);
    const cells = ["A", letter, "Difference", "Allowed"];
    renderList(this.rows, rows, (row) => `${letter}${JSON.stringify(row)}`, (row) => el("tr", {},
      el("td", { class: "number", "data-label": "Step" }, whole(row.step)),
      el("th", { scope: "row", "data-label": "Where" }, row.collection === STEPS ? "Optimizer step" : clean(collectionWords(row.collection)), " ", row.name ? this.#links(row, letter) : ""),
      prosed(el("td", { "data-label": "What" }), short(lettered(row.reason ?? row.kind ?? "", letter), 200)),
      ["a", "b", "distance", "allowed"].map((key, i) => el("td", { class: "number", "data-label": cells[i] }, row[key] === undefined ? "" : number(row[key])))));
    const only = [["only_a", "Only in A"], ["only_b", `Only in ${letter}`]].filter(([key]) => diff?.[key]?.length)
      .map(([key, text]) => [text, `${diff[key].slice(0, 10).join(", ")}${diff[key].length > 10 ? ` and ${diff[key].length - 10} more` : ""}`]);
    renderList(this.only, only, ([name], index) => `${index} ${name}`, ([name]) => el("div", {}, el("dt", {}, name), el("dd")),
      (node, [, text]) => setText(node.lastElementChild, clean(text).slice(0, 500)));
  }

  /** Each setting and version in which some run differs from the first. */
  #fillSettings(summaries) {
    const all = summaries.map(({ settings, versions }) => new Map([...flat(settings), ...flat(versions, "versions.")]));
    const names = [...new Set(all.flatMap((values) => [...values.keys()]))].filter((name) => all.some((values) => values.get(name) !== all[0].get(name)));
    this.differs.hidden = names.length === 0 && this.only.children.length === 0;
    const heads = ["Setting", ...summaries.map(({ name }, i) => `${LETTERS[i]} ${short(name, 20)}`)];
    this.changed.replaceChildren(el("thead", {}, el("tr", {}, heads.map((text) => el("th", { scope: "col" }, clean(text))))),
      el("tbody", {}, names.slice(0, MOST_SETTINGS).map((name) => el("tr", {}, el("th", { scope: "row", "data-label": "Setting" }, named(name, 60)),
        all.map((values, i) => el("td", { "data-label": heads[i + 1] }, named(values.get(name) ?? "\u2013", 60)))))));
    this.changed.hidden = names.length === 0;
  }

  /** Where a run diverges from the first one. The server compares two runs and calls the second one B. */
  #apart(place) {
    const { diff, sentence } = this.answers[place - 1];
    const reason = diff?.first?.reason;
    if (!sentence || !reason || !sentence.endsWith(`${reason}.`)) return sentence || "Cannot be compared step by step.";
    return `${sentence.slice(0, -reason.length - 1)}${lettered(reason, LETTERS[place])}.`;
  }

  #links({ collection, name }, letter) {
    return [named(name, 44), " (", el("a", { href: to.tensor(this.ids[0], collection, name) }, "A"), ", ", el("a", { href: to.tensor(this.others.value, collection, name) }, letter), ")"];
  }

  #chosen() {
    this.asked = { collection: this.collection.value, other: this.others.value };
    this.#options(); // of the other run other collections may be there
    change({ collection: this.collection.value === "gradients" ? null : this.collection.value, with: this.others.value === this.ids[1] ? null : this.others.value });
    this.#fillPair();
    this.both.refresh();
  }

  /** Shows whether a run is being written. */
  #sign() {
    if (this.lost) return this.frame.live("lost");
    const summaries = this.#summaries();
    this.frame.live(this.answers.some(({ live }) => live) ? "live" : summaries.length === 0 ? "" : summaries.every(({ closed }) => closed) ? "ended" : "idle");
  }

  #tell(text) {
    setText(this.note, clean(text));
    this.note.hidden = text === "";
    if (!text) return;
    prose(this.sentence, "The runs cannot be compared.");
    this.note.append(" ", el("a", { href: to.list() }, "See the list of runs"), ".");
  }
}

const lettered = (reason, letter) => reason.replaceAll(/\bB\b/g, letter);

/** Settings as texts by name; nested ones have a name with dots. */
function flat(settings, prefix = "") {
  return Object.entries(settings).flatMap(([name, value]) => (value !== null && typeof value === "object" && !Array.isArray(value) ? flat(value, `${prefix}${name}.`)
    : [[`${prefix}${name}`, value === null ? "none" : typeof value === "string" ? value : JSON.stringify(value)]]));
}

function prosed(element, text) {
  prose(element, text);
  return element;
}
