// What this browser remembers between visits: pinned tensors, tags of runs. Nothing of it is sent to the server.

const MOST = 200; // entries of each kind; the oldest go first

/** The remembered entries of a kind, a map of texts to lists of texts. */
export function remembered(kind) {
  try {
    const entries = JSON.parse(localStorage.getItem(`plimsoll-${kind}`) ?? "[]");
    return new Map(entries.filter((entry) => Array.isArray(entry) && typeof entry[0] === "string" && Array.isArray(entry[1])));
  } catch {
    return new Map(); // storage is forbidden, or holds something else
  }
}

/** Remembers a list under a key; an empty one is forgotten. */
export function remember(kind, key, list) {
  const entries = remembered(kind);
  entries.delete(key);
  if (list.length) entries.set(key, list);
  try {
    localStorage.setItem(`plimsoll-${kind}`, JSON.stringify([...entries].slice(-MOST)));
  } catch {
    // Storage is forbidden or full: the choice lasts as long as the address that holds it.
  }
}
