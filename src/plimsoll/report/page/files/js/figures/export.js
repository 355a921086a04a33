// The numbers of a figure as CSV, and the figure as JSON. Both are made from what is drawn, so they need no server.

import { readMarkup } from "./markup.js";

const ARRAYS = {
  i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array,
};
const POWERS = "2<sup>"; // the labels of an axis whose numbers are exponents of two begin with it
// A spreadsheet takes a text that begins with one of these for a formula, and texts come from whoever wrote the run.
const FORMULA = /^[=+\-@\t\r]/;

/** Values of a trace: lists are as they are, packed arrays (Plotly's `bdata`) are unpacked, two-dimensional ones row by row. */
function values(data) {
  if (!data || data.bdata === undefined) return Array.from(data ?? []);
  const bytes = Uint8Array.from(atob(data.bdata), (letter) => letter.charCodeAt(0));
  const flat = Array.from(new ARRAYS[data.dtype](bytes.buffer));
  if (data.shape === undefined) return flat;
  const width = Number(String(data.shape).split(",").at(-1));
  return Array.from({ length: flat.length / width }, (_, row) => flat.slice(row * width, (row + 1) * width));
}

const text = (markup) => readMarkup(String(markup ?? "")).trim();
const isPowers = (axis) => (axis?.ticktext ?? []).some((label) => String(label).startsWith(POWERS));
const axisOf = (layout, letter, trace) => layout[`${letter}axis${(trace[`${letter}axis`] ?? letter).slice(1)}`];

function cell(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (typeof value === "number") return String(value);
  const safe = FORMULA.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** Rows of a heat map: column, row and value. The value is what hovering shows, where colours stand for its root or its power. */
function ofHeatMap(trace, layout) {
  const x = values(trace.x), rows = layout.meta?.rows ?? values(trace.y);
  const exact = trace.customdata !== undefined && trace.customdata !== null;
  const z = values(exact ? trace.customdata : trace.z);
  const bar = layout[trace.coloraxis ?? "coloraxis"]?.colorbar;
  const percents = (bar?.ticktext ?? []).some((label) => String(label).includes("%"));
  const unit = exact && percents ? " (%)" : isPowers(bar) ? " (log2)" : "";
  const yTitle = isPowers(layout.yaxis) ? "binade (log2)" : text(layout.yaxis?.title?.text) || "row";
  const lines = z.flatMap((row, i) => [...row].map((value, j) => [x[j], text(rows[i] ?? i), value])).filter(([, , value]) => value !== null && !Number.isNaN(value));
  return [[text(layout.xaxis?.title?.text) || "x", yTitle, `${text(bar?.title?.text) || "value"}${unit}`], ...lines];
}

/** Rows of lines over one axis: its value, then one column for each line. */
function ofLines(traces, layout) {
  const columns = traces.map((trace) => new Map(values(trace.x).map((x, i) => [x, values(trace.y)[i]])));
  const places = [...new Set(columns.flatMap((column) => [...column.keys()]))].filter((x) => x !== null).sort((a, b) => a - b);
  const heads = traces.map((trace) => `${text(trace.name)}${isPowers(axisOf(layout, "y", trace)) ? " (log2)" : ""}`);
  return [[text(layout.xaxis?.title?.text) || "x", ...heads], ...places.map((x) => [x, ...columns.map((column) => column.get(x))])];
}

/** The numbers of a figure as rows; the first has the headings. */
export function rowsOf({ data, layout }) {
  const drawn = data.filter((trace) => trace.meta?.table !== false && trace.visible !== false);
  const heat = drawn.filter((trace) => trace.type === "heatmap");
  if (heat.length === 1) return ofHeatMap(heat[0], layout);
  if (heat.length) return heat.flatMap((trace, i) => ofHeatMap(trace, layout).map((row, j) => [j ? text(trace.name) : "series", ...row]).slice(i ? 1 : 0));
  const numeric = drawn.every((trace) => trace.type === "scatter" && values(trace.x).every((x) => x === null || typeof x === "number"));
  if (numeric && layout.yaxis?.type !== "category") return ofLines(drawn.filter((trace) => trace.name), layout);
  const lines = drawn.flatMap((trace) => values(trace.x).map((x, i) => [text(trace.name ?? ""), typeof x === "number" ? x : text(x), pick(values(trace.y)[i])]));
  return [["series", text(layout.xaxis?.title?.text) || "x", text(layout.yaxis?.title?.text) || "y"], ...lines];
}

const pick = (value) => (typeof value === "string" ? text(value) : value);

export const csv = (figure) => `${rowsOf(figure).map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;

/** The figure as Plotly reads it again, in any language. */
export const json = ({ data, layout }) => JSON.stringify({ data, layout });

/** Hands a text over as a file. */
export function download(name, content, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000); // the browser may not have begun to read it
}
