// Two runs side by side: their verdicts, where they part first, their losses and scales on one axis.

import { address, get, onceAtATime, Problem } from "../api.js";
import { clean, el, keep, named, say } from "../dom.js";
import { take } from "../keys.js";
import { Picture } from "./picture.js";
import { replace, to } from "../router.js";
import { Stream } from "../stream.js";
import { badge, collectionNames, collectionWords, number, prose, setCollections, title, whole } from "../words.js";

const SHOWN = 20; // partings that are listed

export class ComparePage {
  constructor(frame, { a, b, values }) {
    Object.assign(this, { frame, a, b });
    this.load = onceAtATime(() => this.#load());
    frame.place("Compare", [["Compare", null]]);
    this.#build(values.get("collection") ?? "gradients");
    this.leaveKeys = take([{ keys: ["x"], says: "Swap the two", act: () => { location.hash = to.compare(this.b, this.a); } }]);
    const news = { run: (event) => this.#hear(event), again: () => this.load() };
    this.streams = [a, b].map((run, i) => new Stream(address(["stream"], { run }),
      { ...news, state: i ? undefined : (state) => { this.lost = state === "lost"; this.#sign(); } }));
    this.tokens = {};
    this.load();
  }

  takes(route) { return route.view === "compare" && route.a === this.a && route.b === this.b; }

  go() {}

  close() {
    this.closed = true;
    this.leaveKeys();
    for (const stream of this.streams) stream.close();
    for (const picture of this.pictures) picture.close();
    clearTimeout(this.timer);
  }

  #hear({ id, token }) {
    if (this.tokens[id] === token) return;
    const first = this.tokens[id] === undefined;
    this.tokens[id] = token;
    if (!first) this.load();
  }

  async #load() {
    clearTimeout(this.timer);
    if (this.closed) return;
    try {
      const answer = await get(address(["compare"], { a: this.a, b: this.b }));
      if (this.closed) return;
      this.#tell("");
      setCollections(answer);
      this.#fill(answer);
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      if (this.closed) return;
      this.#tell(`${problem.message} ${problem.advice}`.trim());
      if (problem.status === 0 || problem.status >= 500) this.timer = setTimeout(() => this.load(), 3000);
    }
  }

  #build(collection) {
    this.sides = ["A", "B"].map((letter) => this.#side(letter));
    this.sentence = el("h1", { class: "verdict", "aria-live": "polite" }, "Comparing the two runs\u2026");
    this.first = el("p", { class: "advice" });
    this.note = el("p", { class: "note", role: "alert", hidden: true });
    this.partings = el("tbody");
    this.parted = el("section", { "aria-labelledby": "partings-title", hidden: true }, el("h2", { id: "partings-title" }, "What parts first"),
      el("div", { class: "scrolls" }, el("table", {}, el("thead", {}, el("tr", {}, ["Tensor", "What", "A", "B", "Apart", "Allowed"].map((text, i) =>
        el("th", { scope: "col", class: i > 1 ? "number" : null }, text)))), this.partings)));
    this.changed = el("dl", { class: "settings" });
    this.others = el("section", { "aria-labelledby": "changed-title", hidden: true }, el("h2", { id: "changed-title" }, "What else differs"), this.changed);
    this.asked = collection;
    this.collection = el("select", { id: "compare-collection", onchange: () => this.#chosen() });
    this.#options();
    const figure = (name, values = () => ({})) => new Picture({
      address: () => address(["compare", "figure", name], { a: this.a, b: this.b, ...values() }), question: () => `${name} ${JSON.stringify(values())}`,
    });
    this.loss = figure("loss_and_scale");
    this.both = figure("before_after", () => ({ collection: this.collection.value }));
    this.both.heading.after(el("p", { class: "controls" }, el("label", { for: "compare-collection" }, "Of"), this.collection));
    this.pictures = [this.loss, this.both];
    this.frame.main.replaceChildren(el("article", { class: "view compare-view" },
      el("header", { class: "head" }, this.sentence, this.first, this.note),
      el("div", { class: "sides" }, this.sides.map(({ element }) => element)),
      el("p", { class: "controls" }, el("a", { href: to.compare(this.b, this.a) }, "Swap the two")),
      this.parted, el("section", { class: "pictures" }, this.loss.element, this.both.element), this.others));
  }

  #side(letter) {
    const state = el("div");
    const name = el("a");
    const verdict = el("p", { class: "meaning", "aria-live": "polite" });
    const facts = el("p", { class: "soft" });
    const element = el("section", { class: "side", "aria-label": `Run ${letter}` }, el("h2", {}, `${letter}  `, name), state, verdict, facts);
    return { element, state, name, verdict, facts };
  }

  /** The collections to choose from, without losing the choice. */
  #options() {
    const before = this.collection.value || this.asked;
    keep(this.collection, [...new Set([...collectionNames(), before])], (name) => name,
      (name) => el("option", { value: name }), (node, name) => say(node, clean(collectionWords(name))));
    this.collection.value = before;
  }

  #fill(answer) {
    this.answer = answer;
    this.#sign();
    this.#options();
    for (const [side, summary, id] of [[this.sides[0], answer.a, this.a], [this.sides[1], answer.b, this.b]]) {
      side.state.replaceChildren(badge(summary.state));
      side.name.setAttribute("href", to.run(id));
      side.name.replaceChildren(named(summary.name, 48));
      prose(side.verdict, summary.verdict);
      say(side.facts, `Last step ${summary.last_step < 0 ? "none" : whole(summary.last_step)}, ${summary.closed ? "closed" : "not closed"}`);
    }
    const names = [answer.a.name, answer.b.name].map((name) => clean(name).slice(0, 60));
    this.frame.place(`${names[0]} and ${names[1]}`, [[`${names[0]} and ${names[1]}`, null]]);
    prose(this.sentence, answer.sentence || "These two runs cannot be compared step by step.");
    this.#fillDiff(answer.diff);
    for (const picture of this.pictures) picture.refresh();
  }

  #fillDiff(diff) {
    say(this.first, diff === null ? "Where they part is not known. What each of them tells stands below." : "");
    this.first.hidden = diff !== null;
    const partings = (diff?.partings ?? (diff?.first ? [diff.first] : [])).slice(0, SHOWN);
    this.parted.hidden = partings.length === 0;
    keep(this.partings, partings, (each) => JSON.stringify(each), (each) => el("tr", {},
      el("th", { scope: "row" }, `step ${whole(each.step)}, ${clean(collectionWords(each.collection)).toLowerCase()} `, each.name ? this.#links(each) : ""),
      el("td", {}, clean(each.reason ?? each.kind ?? "").slice(0, 200)),
      ["a", "b", "distance", "allowed"].map((key) => el("td", { class: "number" }, each[key] === undefined ? "" : number(each[key])))));
    const rows = [
      ...(diff?.changed ?? []).map(({ name, a, b }) => [name, `A ${a}, B ${b}`]),
      ...[["only_a", "Only in A"], ["only_b", "Only in B"]].filter(([key]) => diff?.[key]?.length)
        .map(([key, text]) => [text, `${diff[key].slice(0, 10).join(", ")}${diff[key].length > 10 ? ` and ${diff[key].length - 10} more` : ""}`]),
    ];
    this.others.hidden = rows.length === 0;
    keep(this.changed, rows, ([name], index) => `${index} ${name}`, ([name, text]) =>
      el("div", {}, el("dt", {}, clean(name).slice(0, 100)), el("dd", {}, clean(text).slice(0, 500))));
  }

  #links({ collection, name }) {
    return [named(name, 44), " (", el("a", { href: to.tensor(this.a, collection, name) }, "A"), ", ", el("a", { href: to.tensor(this.b, collection, name) }, "B"), ")"];
  }

  #chosen() {
    replace(to.compare(this.a, this.b, { collection: this.collection.value }));
    this.both.refresh();
  }

  /** The live sign: of two runs that are not written any more there is nothing live. */
  #sign() {
    const { a, b, live } = this.answer ?? {};
    if (this.lost) this.frame.live("lost");
    else this.frame.live(live ? "live" : a === undefined ? "" : a.closed && b.closed ? "ended" : "idle");
  }

  #tell(text) {
    say(this.note, clean(text));
    this.note.hidden = text === "";
    if (text) prose(this.sentence, "The two runs cannot be compared.");
  }
}
