// One step axis for all figures of a page: what is zoomed or pointed at in one of them is in the others too.

import { change } from "../router.js";

const members = new Set(); // pictures whose x axis is steps
const BETWEEN = "_"; // the two steps of an address; a comma would be encoded
let range = null; // the steps that are shown, [from, to]; null: all

/** The steps that are shown, or null for all. */
export function shownSteps() {
  return range;
}

/** Adds a picture. Returns a function that takes it out. */
export function join(picture) {
  members.add(picture);
  return () => members.delete(picture);
}

/** Shows these steps, or all for null, in every picture but the one in which it was chosen. The address keeps them. */
export function zoom(steps, origin = null) {
  if (String(steps) === String(range)) return;
  range = steps;
  change({ zoom: steps && steps.map((step) => Number(step.toPrecision(6))).join(BETWEEN) });
  for (const picture of members) if (picture !== origin) picture.zoomed();
}

/** Shows the steps that an address names. */
export function zoomTo(values) {
  const steps = (values.get("zoom") ?? "").split(BETWEEN).map(Number);
  const known = steps.length === 2 && steps.every(Number.isFinite) && steps[0] < steps[1] ? steps : null;
  if (String(known) === String(range)) return;
  range = known;
  // Later, since the same address may end a view, and Plotly must not draw a figure that is gone.
  setTimeout(() => { for (const picture of members) picture.zoomed(); });
}

/** Marks a step, or none for null, in every picture. */
export function point(step) {
  for (const picture of members) picture.pointed(step);
}
