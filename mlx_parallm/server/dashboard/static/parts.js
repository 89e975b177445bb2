// What several views have in common.
import { html, useCallback, useEffect, useRef, useState } from "./lib.js";

/** Values with their names, side by side: `[name, value, hint?]`. */
export function Tiles({ items, label }) {
  return html`<div role="group" aria-label=${label}>
    <dl class="tiles">
      ${items.map(
        ([name, value, hint], i) => html`<div class="tile" key=${i}>
          <dt>${name}</dt>
          <dd>${value}${hint && html` <small>${hint}</small>`}</dd>
        </div>`,
      )}
    </dl>
  </div>`;
}

/** A table that scrolls sideways by itself where the page is narrow. `columns`: `[name, numeric?]`. */
export function Table({ caption, columns, rows, empty = "Nothing yet." }) {
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<div class="scroll" role="region" aria-label=${caption} tabindex="0">
    <table>
      <caption class="unseen">${caption}</caption>
      <thead>
        <tr>${columns.map(([name, numeric]) => html`<th scope="col" class=${numeric ? "num" : ""} key=${name}>${name}</th>`)}</tr>
      </thead>
      <tbody>
        ${rows.map(
          ({ key, cells, kind }) => html`<tr key=${key} class=${kind ?? ""}>
            ${cells.map((cell, i) => html`<td class=${columns[i][1] ? "num" : ""} key=${i}>${cell}</td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** A button whose action must be confirmed by a second press. */
export function Confirm({ label, question, onConfirm, disabled }) {
  const [armed, setArmed] = useState(false);
  useEffect(() => {
    if (!armed) return undefined;
    const timer = setTimeout(() => setArmed(false), 5000);
    return () => clearTimeout(timer);
  }, [armed]);
  const press = () => {
    setArmed(!armed);
    if (armed) onConfirm();
  };
  return html`<button
    type="button"
    class=${armed ? "danger" : ""}
    disabled=${disabled}
    onClick=${press}
    onBlur=${() => setArmed(false)}
  >
    ${armed ? question : label}
  </button>`;
}

/** Runs actions one at a time, and says how the last one ended. */
export function useAction(after) {
  const [state, setState] = useState({ busy: false, kind: "", text: "" });
  const run = useCallback(
    async (work, done) => {
      setState({ busy: true, kind: "", text: "" });
      try {
        const answer = await work();
        setState({ busy: false, kind: "good", text: done ?? answer?.message ?? "Done." });
      } catch (error) {
        setState({ busy: false, kind: "bad", text: error.message });
      }
      after?.();
    },
    [after],
  );
  return [run, state];
}

export function Notice({ kind, text }) {
  return html`<p class="notice ${kind}" role="status">${text}</p>`;
}

/** Asks again and again, while the view is open; `again` asks at once. */
export function usePolling(ask, milliseconds, reasons = []) {
  const [state, setState] = useState({ data: null, error: null });
  const alive = useRef(true);
  const again = useCallback(async () => {
    try {
      const data = await ask();
      if (alive.current) setState({ data, error: null });
    } catch (error) {
      if (alive.current) setState((before) => ({ ...before, error: error.message }));
    }
  }, reasons);
  useEffect(() => {
    alive.current = true;
    again();
    const timer = setInterval(() => document.hidden || again(), milliseconds);
    return () => {
      alive.current = false;
      clearInterval(timer);
    };
  }, [again]);
  return { ...state, again };
}

export function Field({ label, children }) {
  return html`<label class="field"><span>${label}</span>${children}</label>`;
}

const BOUNDS = [-0.02, -0.1, -0.3, -0.7, -1.5, -3, -6];

/** 0: as good as certain, up to 7: hardly to be expected. */
export const likelihoodClass = (logprob) =>
  logprob === null || logprob === undefined ? "" : `lp-${BOUNDS.filter((bound) => logprob < bound).length}`;

export const visible = (text) => (text === "" ? "∅" : text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥"));

/**
 * The tokens of a text; one of them is the one that the pointer or the keyboard is at (arrows, Home and End move).
 * `tokens`: {text, kind, words}; `words` is what a screen reader says of it.
 */
export function Tokens({ tokens, label, onActive }) {
  const [focused, setFocused] = useState(0);
  const holder = useRef(null);
  const go = (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -tokens.length, End: tokens.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(tokens.length - 1, focused + steps[event.key]));
    setFocused(next);
    holder.current.children[next]?.focus();
  };
  const at = (event) => {
    const place = event.target.dataset?.place;
    if (place !== undefined) onActive?.(Number(place));
    if (place !== undefined && event.type === "focusin") setFocused(Number(place));
  };
  return html`<div
    class="tokens"
    role="list"
    aria-label=${label}
    ref=${holder}
    onKeyDown=${go}
    onMouseOver=${at}
    onFocusIn=${at}
    onMouseLeave=${() => onActive?.(null)}
  >
    ${tokens.map(
      (token, i) => html`<span
        role="listitem"
        key=${i}
        class="token ${token.kind}"
        data-place=${i}
        tabindex=${i === Math.min(focused, tokens.length - 1) ? 0 : -1}
        aria-label=${token.words}
        title=${onActive ? undefined : token.words}
        >${visible(token.text)}</span
      >`,
    )}
  </div>`;
}
