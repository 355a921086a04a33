// Addresses: every view and its state have one, in the part after `#`, each segment encoded.

const RUN_PARTS = new Set(["finding", "pictures", "scalars", "tensor", "whatif", "events", "record"]);
// What can be chosen in a part of a run's page, by the names of an address.
const STATE = { overview: ["layers"], tensor: ["find", "pin", "formats"], scalars: ["find", "x", "smooth", "log"], whatif: ["sort"] };
const PART_OF = { finding: "overview", pictures: "overview" };
export const MOST_COMPARED = 12; // runs in one comparison: more lines cannot be distinguished

function encoded(text) {
  const known = String(text);
  return encodeURIComponent(known.toWellFormed ? known.toWellFormed() : known);
}

/** The query of an address: lists stand in it several times, empty values not at all. One state has one address, so names are sorted. */
function query(values = {}) {
  const entries = Object.entries(values).sort(([a], [b]) => (a < b ? -1 : 1)).flatMap(([name, value]) => [value].flat().map((single) => [name, single]));
  const text = new URLSearchParams(entries.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => [name, String(value)])).toString();
  return text ? `?${text}` : "";
}

/** The addresses of the page. */
export const to = {
  list: (values) => `#/${query(values)}`,
  run: (id) => `#/run/${encoded(id)}`,
  finding: (id, index) => `#/run/${encoded(id)}/finding/${index}`,
  scalars: (id, values) => `#/run/${encoded(id)}/scalars${query(values)}`,
  tensor: (id, collection, name, values) =>
    `#/run/${encoded(id)}/tensor${collection ? `/${encoded(collection)}` : ""}${name ? `/${encoded(name)}` : ""}${query(values)}`,
  whatif: (id, values) => `#/run/${encoded(id)}/whatif${query(values)}`,
  events: (id) => `#/run/${encoded(id)}/events`,
  pictures: (id) => `#/run/${encoded(id)}/pictures`,
  record: (id) => `#/run/${encoded(id)}/record`,
  compare: (ids, values) => `#/compare/${ids.map(encoded).join("/")}${query(values)}`,
};

/** The meaning of an address; `view` is "unknown" where it has none. */
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#/, "").split("?", 2);
  const values = new URLSearchParams(search);
  let segments;
  try {
    segments = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    return { view: "unknown", values };
  }
  const [view, ...rest] = segments;
  if (!view) return { view: "list", values };
  const ids = [...new Set(rest)];
  if (view === "compare" && ids.length >= 2 && ids.length <= MOST_COMPARED) return { view, ids, values };
  if (view === "run" && rest.length >= 1) return runRoute(rest, values);
  return { view: "unknown", values };
}

function runRoute([id, part, ...rest], values) {
  const route = { view: "run", id, part: part ?? "overview", values };
  if (part === undefined) return route;
  if (!RUN_PARTS.has(part)) return { view: "unknown", values };
  if (part === "finding") return /^\d{1,4}$/.test(rest[0] ?? "") ? { ...route, finding: Number(rest[0]) } : { view: "unknown", values };
  if (part === "tensor") return { ...route, collection: rest[0] ?? null, name: rest[1] ?? null };
  return route;
}

let shown = null; // the address whose view is shown
let show = () => {};

/** Calls `view` now, and whenever there is another address to show. */
export function follow(view) {
  show = () => {
    if (location.hash === shown) return;
    shown = location.hash;
    view();
  };
  addEventListener("hashchange", show);
  show();
}

/** Goes to an address, and shows it at once: the browser reports it later, and a key pressed before that would act on the former view. */
export function visit(hash) {
  location.hash = hash;
  show();
}

/** Puts another address in place of the present one. No step back leads to the former one, and no view is asked to change. */
export function replace(hash) {
  if (location.hash === hash) return;
  const isShown = location.hash === shown;
  history.replaceState(history.state, "", hash);
  if (isShown) shown = location.hash;
}

/** Changes values of the present address, as `replace` does. A value of null, "" or [] is taken out. */
export function change(values) {
  const [path, search = ""] = location.hash.split("?", 2);
  const present = {};
  for (const [name, value] of new URLSearchParams(search)) (present[name] ??= []).push(value);
  replace(`${path || "#/"}${query({ ...present, ...values })}`);
}

/** The values of the present address. */
export function values() {
  return parse(location.hash).values;
}

/** An address of the run that is shown, with the steps that are shown, and with what else was chosen in the same part. */
export function withState(hash) {
  const [here, there] = [parse(location.hash), parse(hash)];
  if (there.view !== "run" || there.id !== here.id) return hash;
  const part = PART_OF[there.part] ?? there.part;
  const names = ["zoom", ...(part === (PART_OF[here.part] ?? here.part) ? STATE[part] ?? [] : [])].filter((name) => !there.values.has(name));
  const values = Object.fromEntries(names.map((name) => [name, here.values.getAll(name)]));
  const more = query(values);
  return hash.includes("?") ? hash + more.replace("?", "&") : hash + more;
}
