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

/** All answers: the run's, scalars by name, figures by question, and shares for what-if. */
function answers() {
  loading ??= unpacked("answers").then((text) => {
    const { run, templates, scalars, figures, bodies, whatif } = JSON.parse(text);
    const formats = new Map((whatif?.formats ?? []).map((format) => [format.format, withShares(format)]));
    return {
      run, templates, bodies, scalars: new Map(scalars.map((scalar) => [scalar.name, scalar])), whatif: { ...whatif, formats },
      figures: new Map(figures.map(([name, values, index]) => [question(name, Object.entries(values)), index])),
    };
  });
  return loading;
}

/** A figure and its arguments as a key: the order of arguments, and empty ones, do not matter. */
function question(name, entries) {
  const wellFormed = (text) => String(text).toWellFormed?.() ?? String(text);
  const texts = entries.filter(([, value]) => value !== "" && value !== null).map(([key, value]) => [key, wellFormed(value)]);
  return JSON.stringify([name, ...texts.sort(([a], [b]) => (a < b ? -1 : 1))]);
}

/** The run's id, which its addresses hold. */
export async function runId() {
  return (await answers()).run.id;
}

/** The answer to an address of the API; null where the file holds none. */
export async function embeddedAnswer(path) {
  const packed = await answers();
  if (path === "/assets/templates.json") return packed.templates;
  const [place, search] = path.split("?");
  const [, , , , part, figure] = place.split("/");
  const values = new URLSearchParams(search);
  if (part === undefined) return packed.run;
  if (part === "whatif") return whatIf(packed.whatif, values);
  if (part === "scalar") return packed.scalars.get(values.get("name")) ?? null;
  const index = packed.figures.get(question(figure, [...values]));
  return index === undefined ? null : { figure: packed.bodies[index] };
}

function shares(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Array.from({ length: bytes.length / 2 }, (_, i) => view.getUint16(2 * i, true) / 65535);
}

function withShares(format) {
  return { ...format, lost: shares(format.lost), overflow: shares(format.overflow) };
}

/** What one format would make of the run at a scale, in the form of the server's answer. */
function whatIf({ low, high, collection, formats }, asked) {
  const format = formats.get(asked.get("format"));
  if (format === undefined || asked.get("collection") !== collection) return null;
  const wanted = asked.get("shift") ?? format.best;
  const shift = Math.min(Math.max(Number(wanted), low), high);
  const at = shift - low, count = high - low + 1;
  const whole = (name) => ({ estimate: format.overall[name][at], low: format.overall[`${name}_low`][at], high: format.overall[`${name}_high`][at] });
  const single = (share) => (share === ABOUT ? { estimate: 0, low: 0, high: share } : { estimate: share, low: share, high: share });
  const rows = format.names.map((name, i) => ({
    name, window: format.windows[i], lost: single(format.lost[i * count + at]), overflow: single(format.overflow[i * count + at]),
  }));
  const harm = (row) => row.lost.estimate + row.overflow.estimate;
  const room = ({ window }) => (window ? window[1] - window[0] : -1);
  rows.sort((a, b) => harm(b) - harm(a) || room(a) - room(b));
  return {
    format: format.format, collection, sentence: format.sentence, shift, best_shift: format.best, block: format.block, stretches: format.stretches,
    overall: { lost: whole("lost"), overflow: whole("overflow"), window: format.window }, rows, more: format.left_out,
    over_scale: { shift: Array.from({ length: count }, (_, i) => low + i), lost: format.overall.lost, overflow: format.overall.overflow },
  };
}
