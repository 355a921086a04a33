// The scalars of a run: what the watch records of every step, and what the training logged.

import { isReport } from "../embedded.js";
import { lineOf, ScalarGrid } from "../figures/scalar_grid.js";

export class ScalarsPart {
  constructor(page) {
    this.page = page;
    this.grid = new ScalarGrid({ level: isReport ? "h3" : "h2", runs: () => [{ id: page.id, name: page.run.name, line: lineOf(0), scalars: page.run.scalars }] });
    this.element = this.grid.element;
    this.leaveKeys = page.take([{ keys: ["/"], says: "Search the scalars", act: () => this.grid.search.focus() }]);
  }

  close() {
    this.leaveKeys();
    this.grid.close();
  }

  go(route) { this.grid.go(route.values); }

  renew(run) { this.grid.renew(run.scalars); }
}
