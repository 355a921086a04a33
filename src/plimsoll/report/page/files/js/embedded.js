// Answers of a report: the server's, made beforehand and packed into the file. What-if answers are put together here.

const ABOUT = 1 / 65535; // a share that is estimated as none, but may be some

/** Whether this page is a report, a file without a server. */
export const isReport = document.getElementById("answers") !== null;

let loading = null;

/** The text of a packed element. */
export async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** All answers: the run's, figures by question, and shares for what-if. */
function answers() {
  loading ??= unpacked("answers").then((text) => {
    const { run, templates, figures, bodies, whatif } = JSON.parse(text);
    const formats = new Map((whatif?.formats ?? []).map((each) => [each.format, withShares(each)]));
    return { run, templates, whatif: { ...whatif, formats }, bodies, figures: new Map(figures.map(([name, values, index]) => [question(name, Object.entries(values)), index])) };
  });
  return loading;
}

/** A figure and its arguments as a key: the order of arguments, and empty ones, do not matter. */
function question(name, entries) {
  const wellFormed = (text) => String(text).toWellFormed?.() ?? String(text);
  const given = entries.filter(([, value]) => value !== "" && value !== null).map(([key, value]) => [key, wellFormed(value)]);
  return JSON.stringify([name, ...given.sort(([a], [b]) => (a < b ? -1 : 1))]);
}

/** The run's id, which its addresses hold. */
export async function runId() {
  return (await answers()).run.id;
}

/** The answer to an address of the API; null where the file holds none. */
export async function embeddedAnswer(path) {
  const held = await answers();
  if (path === "/assets/templates.json") return held.templates;
  const [place, search] = path.split("?");
  const [, , , , part, figure] = place.split("/");
  const searchParams = new URLSearchParams(search);
  if (part === undefined) return held.run;
  if (part === "whatif") return whatIf(held.whatif, searchParams);
  const index = held.figures.get(question(figure, [...searchParams]));
  return index === undefined ? null : { figure: held.bodies[index] };
}

function shares(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Array.from({ length: bytes.length / 2 }, (_, i) => view.getUint16(2 * i, true) / 65535);
}

function withShares(each) {
  return { ...each, lost: shares(each.lost), overflow: shares(each.overflow) };
}

/** What one format would make of the run at a scale, in the form of the server's answer. */
function whatIf({ low, high, collection, formats }, asked) {
  const each = formats.get(asked.get("format"));
  if (each === undefined || asked.get("collection") !== collection) return null;
  const wanted = asked.get("shift") ?? each.best;
  const shift = Math.min(Math.max(Number(wanted), low), high);
  const at = shift - low, count = high - low + 1;
  const whole = (name) => ({ estimate: each.overall[name][at], low: each.overall[`${name}_low`][at], high: each.overall[`${name}_high`][at] });
  const single = (share) => (share === ABOUT ? { estimate: 0, low: 0, high: share } : { estimate: share, low: share, high: share });
  const rows = each.names.map((name, i) => ({
    name, window: each.windows[i], lost: single(each.lost[i * count + at]), overflow: single(each.overflow[i * count + at]),
  }));
  const harm = (row) => row.lost.estimate + row.overflow.estimate;
  const room = ({ window }) => (window ? window[1] - window[0] : -1);
  rows.sort((a, b) => harm(b) - harm(a) || room(a) - room(b));
  return {
    format: each.format, collection, sentence: each.sentence, shift, best_shift: each.best, block: each.block, stretches: each.stretches,
    overall: { lost: whole("lost"), overflow: whole("overflow"), window: each.window }, rows, more: each.left_out,
    over_scale: { shift: Array.from({ length: count }, (_, i) => low + i), lost: each.overall.lost, overflow: each.overall.overflow },
  };
}
