// The libraries, as the other files use them.
import { h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { render };
export { useCallback, useEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
export const html = htm.bind(h);
export const uPlot = globalThis.uPlot;
