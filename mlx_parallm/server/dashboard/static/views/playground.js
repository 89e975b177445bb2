// Chat with a model or an adapter's version, or with two side by side; each token shows what else was likely.
import { chat, get } from "../api.js";
import { number, rate, seconds } from "../format.js";
import { html, useEffect, useRef, useState } from "../lib.js";
import { Field, likelihoodClass, Tokens, usePolling, visible } from "../parts.js";
import { PARAMETERS } from "../sampling.js";

const ALTERNATIVES = 5;
const OWN_INITIAL = { temperature: 0.7, max_tokens: 256 };
const INITIAL = Object.fromEntries(PARAMETERS.map(({ name, initial }) => [name, OWN_INITIAL[name] ?? initial ?? ""]));

/** All that can be talked to: [what the choice is called, fields of the request]. */
async function targets() {
  const [models, adapters] = await Promise.all([get("v1/models"), get("v1/adapters")]);
  const found = [["default", { model: "default" }]];
  for (const one of models.data.filter((model) => model.parent === null && ["chat", "vision"].includes(model.kind)))
    found.push([`${one.id}, alone`, { model: one.id, lora_adapter: "base" }]);
  for (const one of adapters.data)
    found.push([`${one.name}@${one.version}`, { model: one.parent, lora_adapter: `${one.name}@${one.version}` }]);
  return found;
}

const described = (tokens) =>
  tokens.map((one) => ({
    text: one.token,
    kind: likelihoodClass(one.logprob),
    words: `${visible(one.token)}: ${(100 * Math.exp(one.logprob)).toFixed(1)} %`,
  }));

function Alternatives({ token }) {
  if (!token) return html`<p class="detail">Point at a token, or move to it with Tab and the arrows: what else was likely?</p>`;
  return html`<table class="alternatives">
    <caption>In place of <b>${visible(token.token)}</b></caption>
    <tbody>
      ${(token.top_logprobs ?? []).map(
        (one, i) => html`<tr key=${i} class=${one.token === token.token && one.logprob === token.logprob ? "chosen" : ""}>
          <th scope="row"><code>${visible(one.token)}</code></th>
          <td class="num">${(100 * Math.exp(one.logprob)).toFixed(1)} %</td>
          <td><meter min="0" max="1" value=${Math.exp(one.logprob)} aria-label="Probability"></meter></td>
        </tr>`,
      )}
    </tbody>
  </table>`;
}

function Message({ message }) {
  const [active, setActive] = useState(null);
  if (message.role === "user") return html`<li class="message user"><h3>You</h3><p>${message.text}</p></li>`;
  const { tokens, usage, took, first, error, finish } = message;
  const speed = usage && took > first ? usage.completion_tokens / (took - first) : null;
  return html`<li class="message">
    <h3>${message.name}</h3>
    ${message.reasoning && html`<details><summary>Reasoning</summary><p>${message.reasoning}</p></details>`}
    ${tokens.length ? html`<${Tokens} tokens=${described(tokens)} label="Answer" onActive=${setActive} />` : html`<p>${message.text}</p>`}
    ${error && html`<p class="notice bad" role="alert">${error}</p>`}
    ${tokens.length > 0 && html`<${Alternatives} token=${tokens[active]} />`}
    ${usage && html`<p class="note">${number(usage.completion_tokens)} tokens, first after ${seconds(first)}, ${rate(speed)} tokens/s, ended by ${finish}</p>`}
  </li>`;
}

/** Streams one answer; `change` gets what is to be merged into its message. */
async function answer(target, messages, settings, change, signal) {
  const begun = performance.now();
  const passed = () => (performance.now() - begun) / 1000;
  const state = { text: "", reasoning: "", tokens: [], first: null, usage: null, finish: null };
  const sampling = Object.fromEntries(Object.entries(settings).filter(([, value]) => value !== "" && Number.isFinite(value)));
  const body = { ...target, ...sampling, messages, stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: ALTERNATIVES };
  try {
    await chat(
      body,
      (chunk) => {
        const choice = chunk.choices[0];
        state.first ??= passed();
        state.usage = chunk.usage ?? state.usage;
        state.finish = choice?.finish_reason ?? state.finish;
        state.text += choice?.delta?.content ?? "";
        state.reasoning += choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
        if (choice?.logprobs?.content) state.tokens = [...state.tokens, ...choice.logprobs.content];
        change({ ...state, took: passed() });
      },
      signal,
    );
  } catch (error) {
    change({ ...state, took: passed(), error: error.name === "AbortError" ? "Stopped." : error.message });
  }
}

function Settings({ settings, setSettings, system, setSystem }) {
  const set = (name) => (event) => setSettings({ ...settings, [name]: event.target.value === "" ? "" : event.target.valueAsNumber });
  return html`<details class="settings" open=${innerWidth > 900}>
    <summary>Sampling and instructions</summary>
    <div class="row">
      ${PARAMETERS.map(
        ({ name, meaning, limits }) => html`<${Field} key=${name} label=${name}>
          <input type="number" name=${name} title=${meaning} ...${limits} value=${settings[name]} onInput=${set(name)} />
        <//>`,
      )}
    </div>
    <${Field} label="Instructions (system message)">
      <textarea name="system" rows="2" value=${system} onInput=${(event) => setSystem(event.target.value)}></textarea>
    <//>
  </details>`;
}

function Choice({ label, name, value, set, choices, none }) {
  return html`<${Field} label=${label}>
    <select name=${name} value=${value} onChange=${(event) => set(event.target.value)}>
      ${none && html`<option value="">${none}</option>`}
      ${choices.map(([one]) => html`<option key=${one} value=${one}>${one}</option>`)}
    </select>
  <//>`;
}

const history = (messages) =>
  messages.filter((one) => one.text && !one.error).map((one) => ({ role: one.role, content: one.text }));

export function Playground() {
  const { data: choices, error } = usePolling(targets, 10000);
  const [names, setNames] = useState(["default", ""]);
  const [columns, setColumns] = useState([[], []]);
  const [settings, setSettings] = useState(INITIAL);
  const [system, setSystem] = useState("");
  const [text, setText] = useState("");
  const [busy, setBusy] = useState(null);
  useEffect(() => () => busy?.abort(), [busy]);
  const form = useRef(null);
  if (!choices) return html`<p class="empty">${error ?? "Asking …"}</p>`;
  const places = names[1] ? [0, 1] : [0];

  const merge = (place, part) =>
    setColumns((before) => before.map((column, i) => (i === place ? [...column.slice(0, -1), { ...column.at(-1), ...part }] : column)));
  const submit = async (event) => {
    event.preventDefault();
    const said = text.trim();
    if (!said || busy) return;
    const stop = new AbortController();
    setBusy(stop);
    setText("");
    const start = places.map((place) => [...columns[place], { role: "user", text: said, tokens: [] }]);
    setColumns((before) => before.map((column, i) => (start[i] ? [...start[i], { role: "assistant", name: names[i], text: "", tokens: [] }] : column)));
    await Promise.all(
      places.map((place) => {
        const target = choices.find(([name]) => name === names[place])?.[1] ?? { model: names[place] };
        const messages = [...(system.trim() ? [{ role: "system", content: system }] : []), ...history(start[place])];
        return answer(target, messages, settings, (part) => merge(place, part), stop.signal);
      }),
    );
    setBusy(null);
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.current.requestSubmit();
    }
  };
  return html`
    <div class="row">
      <${Choice} label="Talk to" name="first" value=${names[0]} set=${(name) => setNames([name, names[1]])} choices=${choices} />
      <${Choice} label="Compare with" name="second" value=${names[1]} set=${(name) => setNames([names[0], name])} choices=${choices} none="nobody" />
      <button type="button" disabled=${busy} onClick=${() => setColumns([[], []])}>Begin anew</button>
    </div>
    <${Settings} settings=${settings} setSettings=${setSettings} system=${system} setSystem=${setSystem} />
    <div class="columns ${places.length > 1 ? "two" : ""}">
      ${places.map(
        (place) => html`<section key=${place} aria-label=${names[place]}>
          ${places.length > 1 && html`<h2>${names[place]}</h2>`}
          <ol class="messages">${columns[place].map((message, i) => html`<${Message} key=${i} message=${message} />`)}</ol>
        </section>`,
      )}
    </div>
    <form class="say" onSubmit=${submit} ref=${form}>
      <${Field} label="Message (Enter sends, Shift+Enter begins a line)">
        <textarea name="message" rows="3" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${keys}></textarea>
      <//>
      ${busy
        ? html`<button type="button" onClick=${() => busy.abort()}>Stop</button>`
        : html`<button type="submit" class="primary" disabled=${!text.trim()}>Send</button>`}
    </form>
  `;
}
