// Runs before the page is drawn, so that it does not flash in the wrong colours. A choice is kept in this browser.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("parallm-theme");
  } catch {
    // Storage may be forbidden; the system's colours are used then.
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
