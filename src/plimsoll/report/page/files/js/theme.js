// Light and dark: the system's theme, or the one chosen here, which the browser remembers.

const SYSTEM = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

function chosen() {
  return document.documentElement.dataset.theme ?? null;
}

let onPaper = false;

/** Whether the page is being printed. */
export function printing() {
  return onPaper;
}

/** The theme that is shown: "light" or "dark"; on paper light. */
export function theme() {
  if (onPaper) return "light";
  return chosen() ?? (SYSTEM.matches ? "dark" : "light");
}

/** Calls when the theme has changed. Returns a function that stops it. */
export function onTheme(call) {
  listeners.add(call);
  return () => listeners.delete(call);
}

let unfolded = [];
for (const [event, begins] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => {
    onPaper = begins;
    if (begins) unfolded = [...document.querySelectorAll("details:not([open])")]; // on paper nobody can unfold them
    for (const details of unfolded) details.open = begins;
    for (const call of listeners) call(theme());
  });
}

/** Makes a button the switch. */
export function switchBy(button) {
  const label = () => {
    const other = theme() === "dark" ? "light" : "dark";
    button.textContent = `${other === "dark" ? "Dark" : "Light"} theme`; // where the button leads
    button.setAttribute("aria-label", `Use the ${other} theme`);
  };
  const changed = () => {
    label();
    for (const call of listeners) call(theme());
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
  SYSTEM.addEventListener("change", () => chosen() ?? changed());
  label();
}
