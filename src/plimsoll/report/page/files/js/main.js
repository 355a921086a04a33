// The page: which view an address means, and the header around every view.

import { el, named, setText } from "./dom.js";
import { isReport, runId } from "./embedded.js";
import { prepare } from "./figures/picture.js";
import { zoomTo } from "./figures/steps.js";
import { listen, take } from "./keys.js";
import { follow, parse, to, visit, withState } from "./router.js";
import { switchBy } from "./theme.js";
import { ComparePage } from "./views/compare.js";
import { ListPage } from "./views/list.js";
import { RunPage } from "./views/run.js";

const PAGES = { list: ListPage, run: RunPage, compare: ComparePage };
const byId = (id) => document.getElementById(id);

/** What a view may use of the page around it. */
const frame = {
  main: byId("content"),
  pause: byId("pause"),
  contents: byId("contents"),
  /** Sets the document's title, and the trail: pairs of a text and an address (null: here). */
  place(title, trail) {
    document.title = `${title} - Plimsoll`;
    const steps = [["Plimsoll", trail.length && !isReport ? to.list() : null], ...trail];
    byId("trail").replaceChildren(...steps.map(([text, address], index) => {
      const content = named(text, index ? 48 : 20);
      return el("li", {}, address === null ? el("span", { "aria-current": isReport ? null : "page" }, content) : el("a", { href: address }, content));
    }));
  },
  /** Shows whether runs are being written: "live", "paused", "waiting", "ended", "idle", "lost" or "" (nothing). */
  live(state) {
    const words = { live: "Live", paused: "Paused", waiting: "Paused: there is more", ended: "Ended", idle: "Not closed", lost: "Reconnecting\u2026" };
    byId("live").dataset.state = state;
    setText(byId("live"), words[state] ?? "");
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
  const route = only === null || address.view === "run" ? address : { view: "run", id: only, part: "overview", values: address.values };
  if (only !== null) route.id = only;
  zoomTo(route.values);
  if (shown?.takes(route)) return shown.go(route);
  const first = shown === null;
  shown?.close();
  frame.pause.hidden = true;
  const Page = PAGES[route.view] ?? NothingPage;
  shown = new Page(frame, route);
  scrollTo(0, 0);
  // A screen reader would go on where the former view was. The first view is read from its beginning anyway.
  if (!first) frame.main.focus({ preventScroll: true });
}

/** A link within a run keeps what was chosen: whoever zoomed into a collapse looks at its tensors there. */
function followLink(event) {
  const link = event.target instanceof Element ? event.target.closest('a[href^="#/"]') : null;
  if (!link || event.defaultPrevented || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey || event.button !== 0) return;
  event.preventDefault();
  visit(withState(link.getAttribute("href")));
}

byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part of an address after # is the view's
  frame.main.focus();
});
document.addEventListener("click", followLink);
switchBy(byId("theme"));
listen(byId("keys-dialog"), byId("keys-list"), byId("keys"));
if (isReport) {
  document.documentElement.classList.add("report");
  runId().then((id) => { only = id; follow(go); });
} else {
  take([{ keys: ["u"], says: "Up to the list of runs", act: () => visit(to.list()) }]);
  follow(go);
  // Plotly is a third of a megabyte on the way: it comes while the run is read, and after the list is there.
  if (parse(location.hash).view === "list") setTimeout(prepare, 1000);
  else prepare();
}
