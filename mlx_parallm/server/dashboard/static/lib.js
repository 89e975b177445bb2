// The libraries, as the other files use them.
import { useEffect, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import { h, render } from "./vendor/preact.js";

export { render };
export { useCallback, useEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
export const html = htm.bind(h);
export const uPlot = globalThis.uPlot;

const theme = () => document.documentElement.dataset.theme;

/** "dark" or "light", as theme.js has it. */
export function useTheme() {
  const [now, setNow] = useState(theme);
  useEffect(() => {
    const change = () => setNow(theme());
    addEventListener("themechange", change);
    return () => removeEventListener("themechange", change);
  }, []);
  return now;
}
