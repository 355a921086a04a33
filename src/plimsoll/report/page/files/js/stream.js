// Following: the server's stream of events. It is opened again after it broke, and closed while the page is not visible.

const WAITS = [500, 1000, 2000, 3000, 5000]; // milliseconds before another try

/** Calls `on.runs(data)`, `on.run(data)`, `on.state("open" | "lost")`, and `on.again()` when it is open once more. */
export class Stream {
  #source = null;
  #timer = null;
  #tries = 0;
  #opened = false;

  constructor(path, on) {
    this.path = path;
    this.on = on;
    this.seen = () => (document.hidden ? this.#shut() : this.#open());
    this.left = () => this.#shut();
    document.addEventListener("visibilitychange", this.seen);
    addEventListener("pagehide", this.left);
    addEventListener("pageshow", this.seen);
    if (!document.hidden) this.#open();
  }

  close() {
    document.removeEventListener("visibilitychange", this.seen);
    removeEventListener("pagehide", this.left);
    removeEventListener("pageshow", this.seen);
    this.#shut();
  }

  #open() {
    if (this.#source) return;
    clearTimeout(this.#timer);
    const source = (this.#source = new EventSource(this.path));
    source.onopen = () => {
      this.#tries = 0;
      this.on.state?.("open");
      if (this.#opened) this.on.again?.(); // a stream has no memory: what happened in between is lost
      this.#opened = true;
    };
    source.onerror = () => this.#again();
    for (const kind of ["runs", "run"]) {
      source.addEventListener(kind, (event) => this.on[kind]?.(JSON.parse(event.data)));
    }
  }

  #again() {
    this.#shut();
    this.on.state?.("lost");
    const wait = WAITS[Math.min(this.#tries, WAITS.length - 1)];
    this.#tries += 1;
    this.#timer = setTimeout(() => this.#open(), wait);
  }

  #shut() {
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#source = null;
  }
}
