// Search for names. As in `plimsoll` and `Run.spectra` an exact name or a glob finds whole names; words find parts of names.

const LONGEST = 200; // characters of a pattern: enough for any name, and a bound on what a link can make a browser do
const GLOB = /[*?[]/;
const REGEX = /^\.\*|[\^$|()\\+]/; // signs that mean nothing in a glob, and hardly occur in names

export const HINT = "Words find names that contain all of them. A glob (*norm1*, blocks.?.mlp) or a regular expression (weight$, /q|k|v/) finds more.";

/** A glob as Python's fnmatch reads it: case matters, * and ? take dots as well. */
function globbed(pattern) {
  const source = pattern.replace(/\[(!?)([^\]]+)\]|[*?]|[^*?[]+|\[/g, (part, not, letters) => {
    if (part === "*") return ".*";
    if (part === "?") return ".";
    if (letters !== undefined) return `[${not ? "^" : ""}${letters.replace(/[\\\]^]/g, "\\$&")}]`;
    return part.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&");
  });
  return new RegExp(`^${source}$`, "su");
}

/** What a search text asks for: `test` of a name, and `kind`: "all", "words", "glob" or "regular expression". `problem` says why a text asks for nothing. */
export function matcher(text, names = []) {
  const wanted = text.trim().slice(0, LONGEST);
  if (!wanted) return { kind: "all", test: () => true };
  if (names.includes(wanted)) return { kind: "words", test: (name) => name === wanted };
  const slashed = /^\/(.+)\/$/.exec(wanted);
  try {
    if (slashed || REGEX.test(wanted)) {
      const pattern = new RegExp(slashed ? slashed[1] : wanted, "u");
      return { kind: "regular expression", test: (name) => pattern.test(name) };
    }
    if (GLOB.test(wanted)) {
      const pattern = globbed(wanted);
      return { kind: "glob", test: (name) => pattern.test(name) };
    }
  } catch {
    return { kind: "regular expression", test: () => false, problem: `This is not a regular expression: ${wanted}` };
  }
  const words = wanted.toLowerCase().split(/\s+/);
  return { kind: "words", test: (name) => { const lower = name.toLowerCase(); return words.every((word) => lower.includes(word)); } };
}
