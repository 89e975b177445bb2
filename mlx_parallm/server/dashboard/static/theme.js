// Runs before the page is drawn, so that it does not flash in the wrong colours: those of the system, or those that
// were chosen in this browser. `themechange` is dispatched whenever they change.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem("parallm-theme");
  } catch {
    // Storage may be forbidden: a choice then lasts until the page is closed.
  }
  const apply = () => {
    document.documentElement.dataset.theme = chosen ?? (system.matches ? "dark" : "light");
    dispatchEvent(new Event("themechange"));
  };
  if (chosen !== "dark" && chosen !== "light") chosen = null;
  apply();
  system.addEventListener("change", apply);
  addEventListener("themechosen", (event) => {
    chosen = event.detail;
    try {
      localStorage.setItem("parallm-theme", chosen);
    } catch {
      // As above.
    }
    apply();
  });
})();
