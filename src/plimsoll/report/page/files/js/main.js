// The page: which view an address means, and what surrounds every view.

import { ComparePage } from "./views/compare.js";
import { el, named, say } from "./dom.js";
import { isReport, runId } from "./embedded.js";
import { listen, take } from "./keys.js";
import { ListPage } from "./views/list.js";
import { parse, to } from "./router.js";
import { RunPage } from "./views/run.js";
import { switchBy } from "./theme.js";

const PAGES = { list: ListPage, run: RunPage, compare: ComparePage };
const byId = (id) => document.getElementById(id);

/** What a view may say to the page around it. */
const frame = {
  main: byId("content"),
  pause: byId("pause"),
  contents: byId("contents"),
  /** The document's title, and the trail: pairs of a text and an address (null: here). */
  place(title, trail) {
    document.title = `${title} - Plimsoll`;
    const steps = [["Plimsoll", trail.length && !isReport ? to.list() : null], ...trail];
    byId("trail").replaceChildren(...steps.map(([text, address], index) => {
      const content = named(text, index ? 48 : 20);
      return el("li", {}, address === null ? el("span", { "aria-current": isReport ? null : "page" }, content) : el("a", { href: address }, content));
    }));
  },
  /** The live sign: "live", "paused", "waiting", "ended", "idle", "lost" or "" (none). */
  live(state) {
    const words = { live: "Live", paused: "Paused", waiting: "Paused: there is more", ended: "Ended", idle: "Not closed", lost: "Reconnecting\u2026" };
    byId("live").dataset.state = state;
    say(byId("live"), words[state] ?? "");
  },
};

class NothingPage {
  constructor(around) {
    around.place("No such page", []);
    around.live("");
    around.main.replaceChildren(el("section", { class: "view" },
      el("h1", {}, "There is no such page"),
      el("p", {}, "This address means nothing here. ", el("a", { href: to.list() }, "See the list of runs"), ".")));
  }
  takes() { return false; }
  close() {}
}

let shown = null;

let only = null; // the id of the run that a report is of

function go() {
  const address = parse(location.hash);
  // Every address of a report that is none of its run's means its beginning.
  const route = only === null || address.view === "run" ? address : { view: "run", id: only, part: "overview", values: new URLSearchParams() };
  if (only !== null) route.id = only;
  if (shown?.takes(route)) return shown.go(route);
  shown?.close();
  frame.pause.hidden = true;
  const Page = PAGES[route.view] ?? NothingPage;
  shown = new Page(frame, route);
  scrollTo(0, 0);
}

byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address is the view's
  frame.main.focus();
});
switchBy(byId("theme"));
listen(byId("keys-dialog"), byId("keys-list"), byId("keys"));
addEventListener("hashchange", go);
if (isReport) {
  document.documentElement.classList.add("report");
  runId().then((id) => { only = id; go(); });
} else {
  take([{ keys: ["u"], says: "Up to the list of runs", act: () => { location.hash = to.list(); } }]);
  go();
}
