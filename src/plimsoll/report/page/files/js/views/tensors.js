// The tensors: a list that can be searched, the spectrogram of the chosen one with formats' limits, and those that are pinned.

import { address } from "../api.js";
import { el, named, renderList, setOptions, setText } from "../dom.js";
import { isReport } from "../embedded.js";
import { Picture } from "../figures/picture.js";
import { remember, remembered } from "../memory.js";
import { change, to, visit, withState } from "../router.js";
import { HINT, matcher } from "../search.js";
import { collectionWords, counted, tensorWords, whole } from "../words.js";

const MOST = 500; // names shown at once
const MOST_PINS = 12; // figures below the chosen one
const HEIGHT = 460; // pixels of a spectrogram
const PINS = "pins"; // of all runs: a sweep has the same tensors in each

const keyOf = (collection, name) => `${collection}/${name}`;
const splitKey = (key) => [key.slice(0, key.indexOf("/")), key.slice(key.indexOf("/") + 1)];

export class TensorPart {
  constructor(page) {
    this.page = page;
    this.pins = [];
    this.collection = el("select", { id: "tensor-collection", onchange: () => this.#toCollection(this.collection.value) });
    this.search = el("input", { type: "search", id: "tensor-search", placeholder: "Search names", "aria-label": "Search tensors", title: HINT,
      autocomplete: "off", spellcheck: "false", oninput: () => this.#searched(), onkeydown: (event) => this.#fromSearch(event) });
    this.pinned = el("ul", { class: "names pinned", "aria-label": "Pinned tensors" });
    this.list = el("ul", { class: "names" });
    this.tally = el("p", { class: "soft", role: "status" });
    this.boxes = el("div", { class: "boxes" });
    this.formats = el("fieldset", { class: "formats" }, el("legend", {}, "Show limits of"), this.boxes,
      el("p", { class: "soft" }, "Default: the format it was recorded in, or FP16 for wider ones."));
    this.picture = this.#spectrogram(() => this.collectionName, () => this.name, "h2");
    this.formats.hidden = isReport; // it holds each spectrogram once
    this.pin = el("button", { type: "button", onclick: () => this.#togglePin(this.collectionName, this.name) });
    this.links = el("p", { class: "controls" });
    this.kept = el("p", { class: "soft" });
    this.note = el("p", { class: "note", hidden: true });
    this.others = el("div", { class: "pinned-figures" });
    this.element = el("div", { class: "tensors" },
      el("section", { class: "picker", "aria-label": "Tensors" },
        el("label", { for: "tensor-collection", class: "unseen" }, "Collection"), this.collection, this.search, this.tally, this.pinned, this.list),
      el("section", { class: "chosen", "aria-label": "The tensor" }, this.note, this.picture.element, this.formats, this.links, this.kept, this.others));
    this.leaveKeys = page.take([
      { keys: ["/"], says: "Search the tensors", act: () => this.search.focus() },
      { keys: ["j"], says: "Next tensor", act: () => this.#step(1) },
      { keys: ["k"], says: "Previous tensor", act: () => this.#step(-1) },
      { keys: ["p"], says: "Pin the tensor, or unpin it", act: () => this.#togglePin(this.collectionName, this.name) },
      { keys: ["ArrowDown"], act: () => this.#focus(1) },
      { keys: ["ArrowUp"], act: () => this.#focus(-1) },
    ]);
  }

  close() {
    this.leaveKeys();
    this.picture.close();
    for (const { picture } of this.others.children) picture.close();
  }

  go(route) {
    this.route = route;
    const { collections, first_tensor: first } = this.run;
    const beginning = route.collection === null && first !== null && collections[first.collection]?.includes(first.name) ? first : null;
    this.collectionName = route.collection ?? beginning?.collection ?? Object.keys(collections).find((name) => collections[name]?.length) ?? null;
    this.name = route.name ?? beginning?.name ?? this.#first();
    this.collection.value = this.collectionName ?? "";
    const known = (collections[this.collectionName] ?? []).includes(this.name);
    this.note.hidden = known;
    setText(this.note, known ? "" : Object.keys(collections).length === 0 ? "No tensor was recorded. New ones appear by themselves." : "This tensor is not in the record. Choose one from the list.");
    if (!known) this.name = null;
    this.search.value = route.values.get("find") ?? "";
    const asked = route.values.get("formats");
    for (const box of this.formats.querySelectorAll("input")) box.checked = asked !== null && asked.split(",").includes(box.value);
    this.pins = (route.values.has("pin") ? route.values.getAll("pin") : [...remembered(PINS).keys()]).slice(0, MOST_PINS);
    this.picture.refresh();
    this.#list();
    this.#links();
    const current = this.list.querySelector("[aria-current]");
    if (current) this.list.scrollTop = Math.max(current.offsetTop - this.list.offsetTop - this.list.clientHeight / 2, 0);
  }

  renew(run) {
    this.run = run;
    setText(this.kept, run.tensors_kept ?? "");
    setOptions(this.collection, Object.keys(run.collections), this.collectionName ?? "", collectionWords);
    renderList(this.boxes, run.formats, (name) => name,
      (name) => el("label", {}, el("input", { type: "checkbox", value: name, onchange: () => this.#limits() }), name));
    if (!this.route) return;
    if (this.name === null) return this.go(this.route);
    this.collection.value = this.collectionName;
    this.#list();
    this.picture.refresh();
    for (const { picture } of this.others.children) picture.refresh();
  }

  #spectrogram(collection, name, level) {
    return new Picture({
      address: () => (name() === null ? null : address(["runs", this.page.id, "figure", "spectrogram"],
        { collection: collection(), name: name(), formats: this.#chosenFormats().join(",") })),
      question: () => JSON.stringify([collection(), name()]), level, height: () => HEIGHT,
      title: () => (name() === null ? "" : tensorWords({ collection: collection(), name: name() })),
    });
  }

  /** The first tensor of the collection: the one to look at first, where it is in this collection. */
  #first() {
    const names = this.run.collections[this.collectionName] ?? [];
    const { first_tensor: first } = this.run;
    return first?.collection === this.collectionName && names.includes(first.name) ? first.name : names[0] ?? null;
  }

  #chosenFormats() {
    return [...this.formats.querySelectorAll("input:checked")].map((box) => box.value);
  }

  #limits() {
    change({ formats: this.#chosenFormats().join(",") });
    this.picture.refresh();
    for (const { picture } of this.others.children) picture.refresh();
  }

  #to(collection, name) {
    visit(withState(to.tensor(this.page.id, collection, name)));
  }

  /** Weights, gradients and updates of one parameter have one name: it stays chosen. */
  #toCollection(collection) {
    const names = this.run.collections[collection] ?? [];
    this.#to(collection, names.includes(this.name) ? this.name : null);
  }

  #searched() {
    change({ find: this.search.value });
    this.#list();
  }

  #matching() {
    const names = this.run.collections[this.collectionName] ?? [];
    const search = matcher(this.search.value, names);
    return { ...search, names: names.filter(search.test) };
  }

  #list() {
    const { names, kind, problem } = this.#matching();
    const shown = names.slice(0, MOST);
    const row = (collection, name) => el("li", {}, el("a", { href: to.tensor(this.page.id, collection, name) }, named(name, 44)));
    renderList(this.list, shown, (name) => keyOf(this.collectionName, name), (name) => row(this.collectionName, name),
      (node, name) => node.firstElementChild.toggleAttribute("aria-current", name === this.name));
    const pins = this.#knownPins();
    this.pinned.hidden = pins.length === 0;
    renderList(this.pinned, pins, (key) => key, (key) => {
      const node = row(...splitKey(key));
      node.firstElementChild.append(el("span", { class: "soft" }, ` ${collectionWords(splitKey(key)[0]).toLowerCase()}`));
      return node;
    }, (node, key) => node.firstElementChild.toggleAttribute("aria-current", key === keyOf(this.collectionName, this.name)));
    const by = kind === "all" || kind === "words" ? "" : ` by ${kind}`;
    setText(this.tally, problem ?? (names.length === 0 && this.search.value ? `No tensor matches. ${HINT}`
      : names.length > MOST ? `The first ${MOST} of ${whole(names.length)}${by}: search for others` : `${counted(names.length, "tensor")}${by}`));
    this.#showPins(pins);
  }

  #knownPins() {
    return this.pins.filter((key) => { const [collection, name] = splitKey(key); return this.run.collections[collection]?.includes(name); });
  }

  #showPins(pins) {
    const isPinned = pins.includes(keyOf(this.collectionName, this.name));
    setText(this.pin, isPinned ? "Unpin" : "Pin");
    this.pin.setAttribute("aria-pressed", String(isPinned));
    const before = [...this.others.children];
    renderList(this.others, pins.filter((key) => key !== keyOf(this.collectionName, this.name)), (key) => key, (key) => {
      const [collection, name] = splitKey(key);
      const picture = this.#spectrogram(() => collection, () => name, "h3");
      picture.refresh();
      return picture.element;
    });
    for (const { isConnected, picture } of before) if (!isConnected) picture.close();
  }

  /** Pins a tensor, or unpins it: in this browser, for all runs, and in the address, for whoever gets it. */
  #togglePin(collection, name) {
    if (name === null) return;
    const key = keyOf(collection, name), add = !this.pins.includes(key);
    this.pins = add ? [...this.pins, key].slice(-MOST_PINS) : this.pins.filter((pin) => pin !== key);
    remember(PINS, key, add ? [""] : []);
    change({ pin: this.pins });
    this.#list();
  }

  #links() {
    const { id } = this.page;
    const asked = this.run.whatif; // of a report: the collection that it can answer about
    const answers = this.name !== null && (asked === undefined || asked?.collection === this.collectionName);
    this.links.replaceChildren(...(this.name === null ? [] : [this.pin]),
      ...(answers ? [el("a", { href: to.whatif(id, { collection: this.collectionName, name: this.name }) }, "Try another format or scale")] : []));
  }

  /** Shows the next tensor of the list, or the previous one. */
  #step(by) {
    const { names } = this.#matching();
    const next = names[Math.min(Math.max(names.indexOf(this.name) + by, 0), names.length - 1)];
    if (next !== undefined && next !== this.name) this.#to(this.collectionName, next);
  }

  #focus(by) {
    if (!this.list.contains(document.activeElement)) return false;
    const links = [...this.list.querySelectorAll("a")];
    links[Math.min(Math.max(links.indexOf(document.activeElement) + by, 0), links.length - 1)].focus();
  }

  #fromSearch(event) {
    if (event.key === "ArrowDown") this.list.querySelector("a")?.focus();
    else if (event.key === "Enter") this.list.querySelector("a")?.click();
    else if (event.key === "Escape" && this.search.value) { this.search.value = ""; this.#searched(); }
    else return;
    event.preventDefault();
  }
}
