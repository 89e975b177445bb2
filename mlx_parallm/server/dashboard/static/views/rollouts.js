// Recent groups of answers side by side: rewards, and every token with its log-probability and policy version.
import { get } from "../api.js";
import { clock, number, short } from "../format.js";
import { html, useMemo, useRef, useState } from "../lib.js";
import { Field, likelihoodClass, Tokens, usePolling, visible } from "../parts.js";

const BINS = 5;
const PALETTE = 6;

/** Bins of equal width over the rewards that are shown: [low, high]. */
function binsOf(groups) {
  const rewards = groups.flatMap((group) => group.samples.map((sample) => sample.reward));
  const low = Math.min(...rewards);
  const high = Math.max(...rewards);
  if (!rewards.length || low === high) return rewards.length ? [[low, high]] : [];
  const width = (high - low) / BINS;
  return Array.from({ length: BINS }, (_, i) => [low + i * width, i === BINS - 1 ? high : low + (i + 1) * width]);
}

const inside = (reward, bin, last) => !bin || (reward >= bin[0] && (last ? reward <= bin[1] : reward < bin[1]));

function versionAt(spans, place) {
  const span = spans.find(([first, end]) => first <= place && place < end);
  return span ? span[2] : null;
}

function described(sample, colour) {
  return sample.tokens.map((text, i) => {
    const logprob = sample.logprobs?.[i] ?? null;
    const version = versionAt(sample.policy_spans, i);
    const kind = colour === "logprob" ? likelihoodClass(logprob) : version === null ? "" : `v-${version % PALETTE}`;
    const words = `${visible(text)}: log-probability ${logprob === null ? "unknown" : logprob.toFixed(3)}, version ${version ?? "unknown"}`;
    return { text, kind, words };
  });
}

function Sample({ sample, colour, number: place }) {
  const tokens = useMemo(() => described(sample, colour), [sample, colour]);
  const [active, setActive] = useState(null);
  const cut = sample.length > sample.tokens.length;
  return html`<article class="sample">
    <h3><span class="chip">reward ${short(sample.reward)}</span> <small>${number(sample.length)} tokens${cut ? ", the first shown" : ""}</small></h3>
    <${Tokens} tokens=${tokens} label=${`Answer ${place}`} onActive=${setActive} />
    <p class="detail">${active === null ? " " : tokens[active]?.words}</p>
  </article>`;
}

const STATES = { waiting: "waits to be learnt from", learnt: "learnt from", refused: "its update was refused" };

function Group({ group, samples, colour }) {
  const mean = group.samples.reduce((sum, one) => sum + one.reward, 0) / (group.samples.length || 1);
  const state = group.updates === null ? STATES[group.state] : `${STATES[group.state]}, update ${group.updates}`;
  return html`<section class="group">
    <h2>
      ${clock(group.time)} <code>${group.group_id.slice(0, 40)}</code>
      <span class="chip ${group.state === "learnt" ? "good" : group.state === "refused" ? "warn" : ""}">${state}</span>
      <small>mean reward ${short(mean)}</small>
    </h2>
    <details><summary>Prompt</summary><pre tabindex="0">${group.prompt}</pre></details>
    <div class="samples">
      ${samples.map((sample, i) => html`<${Sample} key=${sample.request_id ?? i} number=${i + 1} sample=${sample} colour=${colour} />`)}
    </div>
  </section>`;
}

function Legend({ colour, groups }) {
  if (colour === "logprob")
    return html`<ul class="legend" aria-label="Colours">
      <li><span class="token lp-0">certain</span></li>
      <li><span class="token lp-2">−0.2</span></li>
      <li><span class="token lp-4">−1</span></li>
      <li><span class="token lp-6">−4</span></li>
      <li><span class="token lp-7">below −6</span></li>
    </ul>`;
  const versions = [...new Set(groups.flatMap((group) => group.samples.flatMap((one) => one.policy_spans.map((span) => span[2]))))];
  return html`<ul class="legend" aria-label="Colours">
    ${versions.sort((a, b) => a - b).map((version) => html`<li key=${version}><span class="token v-${version % PALETTE}">version ${version}</span></li>`)}
  </ul>`;
}

export function Rollouts({ snapshot }) {
  const [adapter, setAdapter] = useState("");
  const [colour, setColour] = useState("logprob");
  const [bin, setBin] = useState("");
  const path = `dashboard/rollouts?limit=12${adapter ? `&adapter=${encodeURIComponent(adapter)}` : ""}`;
  const [held, setHeld] = useState(false);
  const seen = useRef("");
  if (!held)
    seen.current = Object.values(snapshot?.training ?? {}).map((one) => `${one.collected}/${one.updates}/${one.refused}`).join();
  const { data, error } = usePolling(() => get(path), 600000, [path, seen.current]);
  const bins = useMemo(() => binsOf(data?.groups ?? []), [data]);
  if (!data) return html`<p class="empty">${error ?? "Asking …"}</p>`;
  if (!data.adapters.length)
    return html`<p class="empty">This server does not train. Start it with <code>--enable-rl-training</code>.</p>`;
  const chosen = bin === "" ? null : (bins[Number(bin)] ?? null);
  const groups = data.groups
    .map((group) => ({ group, samples: group.samples.filter((one) => inside(one.reward, chosen, Number(bin) === bins.length - 1)) }))
    .filter(({ samples }) => samples.length);
  return html`
    <div class="row">
      ${data.adapters.length > 1 &&
      html`<${Field} label="Adapter">
        <select value=${adapter} onChange=${(event) => setAdapter(event.target.value)}>
          ${data.adapters.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select>
      <//>`}
      <${Field} label="Colour tokens by">
        <select name="colour" value=${colour} onChange=${(event) => setColour(event.target.value)}>
          <option value="logprob">log-probability</option>
          <option value="version">policy version</option>
        </select>
      <//>
      <${Field} label="Rewards">
        <select name="bin" value=${bin} onChange=${(event) => setBin(event.target.value)}>
          <option value="">all</option>
          ${bins.map(([low, high], i) => html`<option key=${i} value=${String(i)}>${short(low)} to ${short(high)}</option>`)}
        </select>
      <//>
      <label class="check"><input type="checkbox" checked=${held} onChange=${(event) => setHeld(event.target.checked)} /> hold still</label>
      <${Legend} colour=${colour} groups=${data.groups} />
    </div>
    ${error && html`<p class="notice bad" role="status">${error}</p>`}
    ${groups.length
      ? groups.map(({ group, samples }) => html`<${Group} key=${`${group.group_id}${group.time}`} group=${group} samples=${samples} colour=${colour} />`)
      : html`<p class="empty">No group of answers ${bin === "" ? "has come in yet" : "has such a reward"}.</p>`}
  `;
}
