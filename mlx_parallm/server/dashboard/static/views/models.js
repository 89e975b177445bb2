// Models: load, unload, pin. Adapters: versions, what the model's own name serves, rollback, pin.
import { get, post } from "../api.js";
import { bytes, date, number, percent } from "../format.js";
import { html, useState } from "../lib.js";
import { Confirm, Field, Notice, Table, Tiles, useAction, usePolling } from "../parts.js";

async function everything() {
  const [models, adapters, info] = await Promise.all([
    get("v1/models"),
    get("v1/adapters"),
    get("server_info").catch(() => null), // no model that generates is loaded
  ]);
  return { models: models.data.filter((one) => one.parent === null), adapters: adapters.data, info };
}

const label = (adapter) => `${adapter.name}@${adapter.version}`;

function modelRow(model, run, busy) {
  const change = (what, body) => () => run(() => post(`v1/models/${what}`, body), `${model.id}: asked for.`);
  const loaded = model.status === "ready";
  const status = model.status === "loading" ? `loading, ${percent(model.progress)}` : model.status;
  return {
    key: model.id,
    cells: [
      html`<b>${model.id}</b>`,
      model.kind,
      html`<span class="chip ${loaded ? "good" : model.status === "failed" ? "bad" : ""}">${status}</span>${model.error && html`<br /><small>${model.error}</small>`}`,
      number(model.max_model_len),
      model.pinned ? "yes" : "no",
      html`<span class="actions">
        ${loaded
          ? html`<${Confirm} label="Unload" question="Press again to unload" disabled=${busy} onConfirm=${change("unload", { model: model.id })} />`
          : html`<button type="button" disabled=${busy} onClick=${change("load", { model: model.id, wait: false })}>Load</button>`}
        <button type="button" disabled=${busy} onClick=${change("load", { model: model.id, pin: !model.pinned, wait: false })}>
          ${model.pinned ? "Unpin" : "Pin"}
        </button>
      </span>`,
    ],
  };
}

function LoadForm({ run, busy }) {
  const [fields, setFields] = useState({ model: "", path: "", pin: false });
  const set = (name) => (event) =>
    setFields({ ...fields, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const submit = (event) => {
    event.preventDefault();
    run(() => post("v1/models/load", { ...fields, wait: false }), `${fields.model}: loading has begun.`);
  };
  return html`<form class="row" onSubmit=${submit} aria-label="Load another model">
    <${Field} label="Name"><input name="model" required maxlength="256" value=${fields.model} onInput=${set("model")} /><//>
    <${Field} label="Folder, .gguf file or hub id"><input name="path" required value=${fields.path} onInput=${set("path")} /><//>
    <label class="check"><input type="checkbox" checked=${fields.pin} onChange=${set("pin")} /> keep in memory</label>
    <button type="submit" class="primary" disabled=${busy}>Load model</button>
  </form>`;
}

function adapterRow(adapter, run, busy) {
  const name = adapter.name;
  const version = adapter.version;
  const change = (path, body) => () => run(() => post(path, body));
  return {
    key: label(adapter),
    cells: [
      html`<b>${label(adapter)}</b>${adapter.current && html` <span class="chip good">current</span>`}`,
      adapter.parent,
      number(adapter.rank),
      bytes(adapter.bytes),
      `${number(adapter.requests)} (${number(adapter.pinned_requests)} now)`,
      number(adapter.generated_tokens),
      adapter.latency_mean === null ? "–" : `${adapter.latency_mean.toFixed(2)} s`,
      adapter.reward_mean === null ? "–" : `${adapter.reward_mean.toFixed(3)} (${number(adapter.rewards)})`,
      html`<code title=${adapter.digest}>${adapter.digest.slice(0, 10)}</code>`,
      adapter.source,
      date(adapter.created),
      html`<span class="actions">
        <button type="button" disabled=${busy} onClick=${change("model/switch-lora", { version: label(adapter), model: adapter.parent })}>Serve</button>
        ${!adapter.current &&
        html`<${Confirm} label="Roll back" question="Press again to roll back" disabled=${busy} onConfirm=${change("v1/adapters/rollback", { name, version })} />`}
        <button type="button" disabled=${busy} onClick=${change(`v1/adapters/${adapter.pinned ? "unpin" : "pin"}`, { name, version })}>
          ${adapter.pinned ? "Unpin" : "Pin"}
        </button>
      </span>`,
    ],
  };
}

function SplitForm({ model, adapters, run, busy }) {
  const choices = ["base", ...new Set(adapters.map((one) => one.name)), ...adapters.map(label)];
  const [first, setFirst] = useState("");
  const [second, setSecond] = useState("base");
  const [share, setShare] = useState(90);
  const select = (value, set) =>
    html`<select value=${value} onChange=${(event) => set(event.target.value)}>${choices.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select>`;
  const chosen = first || choices[1] || "base";
  const submit = (event) => {
    event.preventDefault();
    const one = { model: model.id, version: chosen };
    const split = { model: model.id, split: { [chosen]: share / 100, [second]: 1 - share / 100 } };
    run(() => post("model/switch-lora", share >= 100 || chosen === second ? one : split));
  };
  return html`<form class="row" onSubmit=${submit} aria-label=${`What ${model.id} serves`}>
    <${Field} label="Requests for the model’s own name get">${select(chosen, setFirst)}<//>
    <${Field} label="Share, %"><input type="number" min="1" max="100" step="1" value=${share} onInput=${(event) => setShare(event.target.valueAsNumber || 100)} /><//>
    <${Field} label="The others get">${select(second, setSecond)}<//>
    <button type="submit" class="primary" disabled=${busy}>Switch</button>
    <button type="button" disabled=${busy} onClick=${() => run(() => post("model/switch-lora", { model: model.id, version: "base" }))}>Model alone</button>
  </form>`;
}

export function Models() {
  const { data, error, again } = usePolling(everything, 3000);
  const [run, notice] = useAction(again);
  if (!data) return html`<p class="empty">${error ?? "Asking …"}</p>`;
  const served = data.info?.models ?? [];
  const withAdapters = served.filter((model) => data.adapters.some((one) => one.parent === model.id));
  return html`
    <${Notice} ...${error ? { kind: "bad", text: error } : notice} />
    <section>
      <h2>Models</h2>
      <${Table}
        caption="Models"
        columns=${[["Name"], ["Kind"], ["Status"], ["Context, tokens", true], ["Pinned"], ["Actions"]]}
        rows=${data.models.map((model) => modelRow(model, run, notice.busy))}
        empty="No model is known. Load one below, or start the server with --model-dir."
      />
      <h3>Load another model</h3>
      <${LoadForm} run=${run} busy=${notice.busy} />
    </section>
    <section>
      <h2>Adapters</h2>
      ${withAdapters.map(
        (model) => html`<div key=${model.id}>
          <${Tiles} label=${`What ${model.id} serves`} items=${Object.entries(model.serves).map(([name, share]) => [`${model.id} is answered by`, name, percent(share)])} />
          <${SplitForm} model=${model} adapters=${data.adapters.filter((one) => one.parent === model.id)} run=${run} busy=${notice.busy} />
        </div>`,
      )}
      <${Table}
        caption="Adapter versions"
        columns=${[["Version"], ["Model"], ["Rank", true], ["Size", true], ["Requests", true], ["Tokens", true], ["Latency", true], ["Reward", true], ["Digest"], ["Source"], ["Published"], ["Actions"]]}
        rows=${data.adapters.toReversed().map((adapter) => adapterRow(adapter, run, notice.busy))}
        empty="No adapter is loaded. --lora-path or /v1/adapters/load brings one, --enable-rl-training makes one."
      />
    </section>
  `;
}
