// The requests that ended last: what they were, never what they said.
import { get } from "../api.js";
import { clock, number, rate, seconds } from "../format.js";
import { html, useEffect, useRef, useState } from "../lib.js";
import { Field, Table } from "../parts.js";

const KEPT = 500;

const matches = (one, words) =>
  words.every((word) => [one.path, one.model, one.adapter, one.key, String(one.status), one.request_id].some((text) => text?.toLowerCase().includes(word)));

function row(one) {
  const decode = one.first_token_seconds === null ? one.seconds : one.seconds - one.first_token_seconds;
  const speed = one.completion_tokens > 1 && decode > 0 ? one.completion_tokens / decode : null;
  return {
    key: one.number,
    cells: [
      clock(one.time),
      html`${one.method} <code>${one.path}</code>`,
      html`<span class="chip ${one.status >= 500 ? "bad" : one.status >= 400 || one.outcome ? "warn" : "good"}">${one.status}</span>${one.outcome && html` <small>${one.outcome}</small>`}`,
      one.model ?? "–",
      one.adapter ?? "–",
      one.prompt_tokens === null ? "–" : `${number(one.prompt_tokens)}${one.cached_tokens ? ` (${number(one.cached_tokens)} cached)` : ""}`,
      number(one.completion_tokens),
      seconds(one.first_token_seconds),
      seconds(one.seconds),
      rate(speed),
      one.key ?? "–",
      html`<code title=${one.request_id}>${one.request_id.slice(0, 8)}</code>`,
    ],
  };
}

function useRequests(held) {
  const [requests, setRequests] = useState([]);
  const [error, setError] = useState("");
  const last = useRef(0);
  useEffect(() => {
    if (held) return undefined;
    let alive = true;
    const ask = async () => {
      try {
        const { requests: found } = await get(`dashboard/requests?limit=${KEPT}&after=${last.current}`);
        if (!alive) return;
        last.current = found[0]?.number ?? last.current;
        if (found.length) setRequests((before) => [...found, ...before].slice(0, KEPT));
        setError("");
      } catch (failed) {
        if (alive) setError(failed.message);
      }
    };
    ask();
    const timer = setInterval(() => document.hidden || ask(), 2000);
    return () => {
      alive = false;
      clearInterval(timer);
    };
  }, [held]);
  return { requests, error };
}

export function Requests() {
  const [held, setHeld] = useState(false);
  const [filter, setFilter] = useState("");
  const { requests, error } = useRequests(held);
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = requests.filter((one) => matches(one, words)).slice(0, 200);
  return html`
    <div class="row">
      <${Field} label="Only those with">
        <input type="search" name="filter" placeholder="route, model, adapter, status, key" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      <//>
      <label class="check"><input type="checkbox" checked=${held} onChange=${(event) => setHeld(event.target.checked)} /> hold still</label>
      <span class="note">${number(shown.length)} of the last ${number(requests.length)}; what was asked and answered is not kept.</span>
    </div>
    ${error && html`<p class="notice bad" role="status">${error}</p>`}
    <${Table}
      caption="Recent requests"
      columns=${[["Ended"], ["Route"], ["Status"], ["Model"], ["Adapter"], ["Prompt, tokens", true], ["Answer, tokens", true], ["First token", true], ["Took", true], ["Tokens/s", true], ["Key"], ["Id"]]}
      rows=${shown.map(row)}
      empty=${words.length ? "No recent request is like that." : "No request has ended yet."}
    />
  `;
}
