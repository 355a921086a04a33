// Light and dark: the system's, or the one chosen here, which the browser keeps.

const ASKED = matchMedia("(prefers-color-scheme: dark)");
const told = new Set();

function chosen() {
  return document.documentElement.dataset.theme ?? null;
}

let paper = false;

/** Whether the page is being printed. */
export function printing() {
  return paper;
}

/** The theme that is shown: "light" or "dark"; on paper light. */
export function theme() {
  if (paper) return "light";
  return chosen() ?? (ASKED.matches ? "dark" : "light");
}

/** Calls when the theme has changed; gives back how to stop that. */
export function onTheme(call) {
  told.add(call);
  return () => told.delete(call);
}

let opened = [];
for (const [event, begins] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => {
    paper = begins;
    if (begins) opened = [...document.querySelectorAll("details:not([open])")]; // paper unfolds nothing
    for (const each of opened) each.open = begins;
    for (const call of told) call(theme());
  });
}

/** Makes a button the switch. */
export function switchBy(button) {
  const label = () => {
    const other = theme() === "dark" ? "light" : "dark";
    button.textContent = `${other === "dark" ? "Dark" : "Light"} theme`; // where it leads, as in the report
    button.setAttribute("aria-label", `Use the ${other} theme`);
  };
  const changed = () => {
    label();
    for (const call of told) call(theme());
  };
  button.addEventListener("click", () => {
    const next = theme() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("plimsoll-theme", next);
    } catch {
      // Storage is forbidden: the choice lasts as long as the page.
    }
    changed();
  });
  ASKED.addEventListener("change", () => chosen() ?? changed());
  label();
}
