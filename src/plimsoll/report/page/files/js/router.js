// Addresses: everything that can be looked at has one, in the part after `#`, each segment encoded.

const RUN_PARTS = new Set(["finding", "pictures", "tensor", "whatif", "events", "record"]);

function encoded(text) {
  const known = String(text);
  return encodeURIComponent(known.toWellFormed ? known.toWellFormed() : known);
}

function query(values = {}) {
  const kept = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return text ? `?${text}` : "";
}

/** The addresses of the page. */
export const to = {
  list: (values) => `#/${query(values)}`,
  run: (id) => `#/run/${encoded(id)}`,
  finding: (id, index) => `#/run/${encoded(id)}/finding/${index}`,
  tensor: (id, collection, name, values) =>
    `#/run/${encoded(id)}/tensor${collection ? `/${encoded(collection)}` : ""}${name ? `/${encoded(name)}` : ""}${query(values)}`,
  whatif: (id, values) => `#/run/${encoded(id)}/whatif${query(values)}`,
  events: (id) => `#/run/${encoded(id)}/events`,
  pictures: (id) => `#/run/${encoded(id)}/pictures`,
  record: (id) => `#/run/${encoded(id)}/record`,
  compare: (a, b, values) => `#/compare/${encoded(a)}/${encoded(b)}${query(values)}`,
};

/** What an address means; `view` is "unknown" for one that means nothing. */
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
  if (view === "compare" && rest.length === 2) return { view, a: rest[0], b: rest[1], values };
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

/** Writes another address over this one: no step back leads here. Nothing is told of it. */
export function replace(hash) {
  if (location.hash !== hash) history.replaceState(history.state, "", hash);
}
