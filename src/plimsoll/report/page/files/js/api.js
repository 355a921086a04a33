// Answers of the server, or of the report's own file, as data. A refusal is a sentence and what to do.

import { embeddedAnswer, isReport } from "./embedded.js";

const ADVICE = {
  0: "It may have been stopped: start it again with plimsoll serve. This page tries again by itself.",
  401: "Open the address that plimsoll serve printed; it holds the token.",
  403: "Open the address that plimsoll serve printed.",
  404: "It may have been moved or deleted. See the list of runs.",
  409: "It changed while it was read. This page tries again by itself.",
  503: "The server is busy. This page tries again by itself.",
};

/** A request that failed: `status` (0: no answer), a message, and `advice`. */
export class Problem extends Error {
  constructor(status, message, hasAdvice = false) {
    super(message);
    this.status = status;
    this.advice = hasAdvice ? "" : (ADVICE[status] ?? "See what plimsoll serve has printed.");
  }

  /** The message and the advice as one text. */
  get text() { return `${this.message} ${this.advice}`.trim(); }
}

/** A segment of a path. The run that is the served folder itself is ".", which browsers take out of an address: it is "./". */
function quoted(segment) {
  const text = String(segment);
  return text === "." ? ".%2F" : encodeURIComponent(text.toWellFormed ? text.toWellFormed() : text);
}

/** The address of a part of the API. Values that are lists stand in it several times. */
export function address(segments, values = {}) {
  const path = segments.map(quoted).join("/");
  const entries = Object.entries(values).flatMap(([name, value]) => [value].flat().map((single) => [name, single]))
    .filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(entries.map(([name, value]) => [name, String(value)])).toString();
  return `/api/${path}${search ? `?${search}` : ""}`;
}

/** The data at an address. Raises `Problem`; an aborted request raises its `AbortError`. */
export async function get(path, signal) {
  if (isReport) {
    const data = await embeddedAnswer(path);
    if (data === null) throw new Problem(0, "This is not in the report.", true);
    return data;
  }
  let answer;
  try {
    answer = await fetch(path, { signal, headers: { accept: "application/json" }, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server does not answer.");
  }
  const data = await answer.json().catch((error) => {
    if (error.name === "AbortError") throw error;
    return null;
  });
  if (answer.ok && data !== null) return data;
  throw new Problem(answer.status, data?.error ?? `The server answered ${answer.status} ${answer.statusText}.`, Boolean(data?.error));
}

/** Makes a task run once at a time. Asked for while it runs, it runs once more afterwards, so that no request is lost. */
export function onceAtATime(task) {
  let running = false, again = false;
  return async function run() {
    if (running) { again = true; return; }
    running = true;
    try {
      await task();
    } finally {
      running = false;
      if (again) { again = false; run(); }
    }
  };
}

/** Asks one question after another and answers the latest only; earlier requests are aborted. */
export class Latest {
  #asked = null;

  /** The data of all addresses, or null where a later question (or `drop`) came in between. */
  async ask(paths) {
    this.#asked?.abort();
    const mine = (this.#asked = new AbortController());
    try {
      const data = await Promise.all(paths.map((path) => get(path, mine.signal)));
      return this.#asked === mine ? data : null;
    } catch (error) {
      if (error.name === "AbortError" || this.#asked !== mine) return null;
      throw error;
    }
  }

  drop() {
    this.#asked?.abort();
    this.#asked = null;
  }
}
