// Runs before anything is painted: a page with scripts shows its controls, and the theme chosen before.
document.documentElement.classList.add("js");
try {
  const theme = localStorage.getItem("plimsoll-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch (error) {
  // Pages from files may have no storage: then the system's theme it is.
}
