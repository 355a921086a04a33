// The tensors: a list that can be searched, and the spectrogram of the one that is chosen, with formats' load lines.

import { address } from "../api.js";
import { el, keep, named, say } from "../dom.js";
import { isReport } from "../embedded.js";
import { Picture } from "./picture.js";
import { replace, to } from "../router.js";
import { collectionWords, many, whole } from "../words.js";

const MOST = 500; // names shown at once

export class TensorPart {
  constructor(page) {
    this.page = page;
    this.collection = el("select", { id: "tensor-collection", onchange: () => this.#to(this.collection.value, null) });
    this.search = el("input", { type: "search", id: "tensor-search", placeholder: "Search names", "aria-label": "Search tensors",
      autocomplete: "off", spellcheck: "false", oninput: () => this.#list(), onkeydown: (event) => this.#fromSearch(event) });
    this.list = el("ul", { class: "names" });
    this.tally = el("p", { class: "soft", role: "status" });
    this.boxes = el("div", { class: "boxes" });
    this.formats = el("fieldset", { class: "formats" }, el("legend", {}, "Load lines of"), this.boxes,
      el("p", { class: "soft" }, "With none chosen: of the format that it was recorded in."));
    this.picture = new Picture({
      address: () => (this.name === null ? null : address(["runs", page.id, "figure", "spectrogram"],
        { collection: this.collectionName, name: this.name, formats: this.#chosen().join(",") })),
      question: () => JSON.stringify([this.collectionName, this.name]), level: "h2",
    });
    this.formats.hidden = isReport; // it holds each spectrogram once
    this.links = el("p", { class: "controls" });
    this.kept = el("p", { class: "soft" });
    this.note = el("p", { class: "note", hidden: true });
    this.element = el("div", { class: "tensors" },
      el("section", { class: "picker", "aria-label": "Tensors" },
        el("label", { for: "tensor-collection", class: "unseen" }, "Collection"), this.collection, this.search, this.tally, this.list),
      el("section", { class: "chosen", "aria-label": "The tensor" }, this.note, this.picture.element, this.formats, this.links, this.kept));
    this.leaveKeys = page.take([
      { keys: ["/"], says: "Search the tensors", act: () => this.search.focus() },
      { keys: ["j"], says: "Next tensor", act: () => this.#step(1) },
      { keys: ["k"], says: "Tensor before", act: () => this.#step(-1) },
      { keys: ["ArrowDown"], act: () => this.#focus(1) },
      { keys: ["ArrowUp"], act: () => this.#focus(-1) },
    ]);
  }

  close() {
    this.leaveKeys();
    this.picture.close();
  }

  go(route) {
    this.route = route;
    const { collections } = this.run;
    const first = Object.keys(collections).find((name) => collections[name]?.length) ?? null;
    this.collectionName = route.collection ?? first;
    this.name = route.name ?? collections[this.collectionName]?.[0] ?? null;
    this.collection.value = this.collectionName ?? "";
    const known = (collections[this.collectionName] ?? []).includes(this.name);
    this.note.hidden = known;
    say(this.note, known ? "" : first === null ? "No tensor was recorded. New ones appear by themselves." : "This tensor is not in the record. Choose one from the list.");
    if (!known) this.name = null;
    const asked = route.values.get("formats");
    for (const box of this.formats.querySelectorAll("input")) box.checked = asked !== null && asked.split(",").includes(box.value);
    this.picture.refresh();
    this.#list();
    this.#links();
    const current = this.list.querySelector("[aria-current]");
    if (current) this.list.scrollTop = Math.max(current.offsetTop - this.list.offsetTop - this.list.clientHeight / 2, 0);
  }

  renew(run) {
    this.run = run;
    say(this.kept, run.tensors_kept ?? "");
    keep(this.collection, Object.keys(run.collections), (name) => name, (name) => el("option", { value: name }, collectionWords(name)));
    keep(this.boxes, run.formats, (name) => name,
      (name) => el("label", {}, el("input", { type: "checkbox", value: name, onchange: () => this.#lines() }), name));
    if (!this.route) return;
    if (this.name === null) return this.go(this.route);
    this.collection.value = this.collectionName;
    this.#list();
    this.picture.refresh();
  }

  #chosen() {
    return [...this.formats.querySelectorAll("input:checked")].map((box) => box.value);
  }

  #lines() {
    replace(to.tensor(this.page.id, this.collectionName, this.name, { formats: this.#chosen().join(",") }));
    this.picture.refresh();
  }

  #to(collection, name) {
    location.hash = to.tensor(this.page.id, collection, name);
  }

  #shown() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return (this.run.collections[this.collectionName] ?? []).filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  }

  #list() {
    const names = this.#shown();
    const shown = names.slice(0, MOST);
    keep(this.list, shown, (name) => `${this.collectionName} ${name}`,
      (name) => el("li", {}, el("a", { href: to.tensor(this.page.id, this.collectionName, name) }, named(name, 44))),
      (node, name) => node.firstElementChild.toggleAttribute("aria-current", name === this.name));
    say(this.tally, names.length > MOST ? `The first ${MOST} of ${whole(names.length)}: search for others` : many(names.length, "tensor"));
  }

  #links() {
    const { id } = this.page;
    const asked = this.run.whatif; // of a report: what it can answer
    const link = this.name === null || (asked !== undefined && asked?.collection !== this.collectionName) ? [] : [el("a", { href: to.whatif(id, { collection: this.collectionName, name: this.name }) }, "What another format or scale would make of it")];
    this.links.replaceChildren(...link);
  }

  /** The tensor after this one, or before. */
  #step(by) {
    const names = this.#shown();
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
    else if (event.key === "Escape" && this.search.value) { this.search.value = ""; this.#list(); }
    else return;
    event.preventDefault();
  }
}
