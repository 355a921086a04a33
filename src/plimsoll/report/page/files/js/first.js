// Before the first paint: the theme that was chosen here before, if one was. theme.js is where it is chosen.
try {
  const chosen = localStorage.getItem("plimsoll-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is forbidden in this browser: the system's theme it is.
}
document.documentElement.classList.add("js"); // without scripts no control is shown
