// How training goes, over its updates.
import { get, post } from "../api.js";
import { Chart } from "../chart.js";
import { clock, number, percent, seconds, short } from "../format.js";
import { html, useMemo, useState } from "../lib.js";
import { Field, Notice, Table, Tiles, useAction, usePolling } from "../parts.js";

const CHARTS = [
  { title: "Reward", note: "Mean of an update’s answers, and their spread", fields: ["reward_mean", "reward_std"], series: ["mean", "standard deviation"], format: short },
  { title: "KL divergence", note: "To the model without the adapter, nats a token, where it was measured", fields: ["kl"], series: ["KL"], format: short },
  { title: "Loss", fields: ["loss"], series: ["loss"], format: short },
  { title: "Entropy", note: "Of the drawn tokens, estimated, nats", fields: ["entropy"], series: ["entropy"], format: short },
  { title: "Clip fraction", note: "Of the tokens whose ratio was clipped", fields: ["clip_fraction"], series: ["clipped"], format: percent },
  { title: "Staleness", note: "Versions between drawing and learning, mean", fields: ["staleness"], series: ["versions"], format: short },
  { title: "Trainer and sampler", note: "Log-probabilities of the same tokens: largest difference, and mean divergence", fields: ["max_logprob_gap", "mismatch_kl"], series: ["largest gap", "divergence"], format: short },
  { title: "Groups without a signal", note: "Share of answers whose group has one reward for all", fields: ["flat_share"], series: ["without a signal"], format: percent, range: [0, 1] },
];

/** Vertical marks: an update that was published or refused, an alarm's rollback, and one that somebody asked for. */
function marksOf(history) {
  const marks = [];
  history.forEach((entry, i) => {
    if (entry.rolled_back) marks.push({ x: i, kind: "rolled-back" });
    else if (entry.refused) marks.push({ x: i, kind: "refused" });
    else if (entry.published) marks.push({ x: i, kind: "published" });
    if (i && entry.published && entry.updates <= history[i - 1].updates && !entry.rolled_back)
      marks.push({ x: i - 0.5, kind: "rolled-back" });
  });
  return marks;
}

function Charts({ history }) {
  const shared = useMemo(() => {
    const entries = history.map((one) => ({ ...one, flat_share: (one.flat_trajectories ?? 0) / (one.trajectories || 1) }));
    return {
      x: entries.map((_, i) => i),
      labels: entries.map((one) => String(one.updates)),
      marks: marksOf(entries),
      entries,
    };
  }, [history.length, history.at(-1)?.time]);
  return html`<section class="charts">
    <h2 class="unseen">Charts over updates</h2>
    ${CHARTS.map(
      (chart) => html`<${Chart}
        key=${chart.title}
        ...${chart}
        x=${shared.x}
        labels=${shared.labels}
        marks=${shared.marks}
        columns=${chart.fields.map((name) => shared.entries.map((one) => one[name] ?? null))}
      />`,
    )}
  </section>`;
}

const outcome = (entry) =>
  entry.rolled_back
    ? html`<span class="chip bad">rolled back</span> ${entry.rolled_back}`
    : entry.refused
      ? html`<span class="chip warn">refused</span> ${entry.refused}`
      : entry.published
        ? html`<span class="chip good">published</span>`
        : "not published";

function Updates({ history }) {
  const rows = history
    .slice(-25)
    .reverse()
    .map((one, i) => ({
      key: `${one.time}-${i}`,
      cells: [clock(one.time), number(one.updates), number(one.policy_version), outcome(one), number(one.trajectories), short(one.reward_mean), short(one.loss), short(one.kl), seconds(one.seconds)],
    }));
  return html`<section>
    <h2>Last updates</h2>
    <${Table}
      caption="Last updates"
      columns=${[["Time"], ["Updates", true], ["Version", true], ["Outcome"], ["Answers", true], ["Reward", true], ["Loss", true], ["KL", true], ["Took", true]]}
      rows=${rows}
      empty="No update yet."
    />
  </section>`;
}

function Controls({ status, paused, run, busy, onAdapter }) {
  const adapter = status.current_lora;
  return html`<div class="row">
    ${status.adapters.length > 1 &&
    html`<${Field} label="Adapter">
      <select value=${adapter} onChange=${(event) => onAdapter(event.target.value)}>
        ${status.adapters.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>
    <//>`}
    <button type="button" disabled=${busy} onClick=${() => run(() => post("pause", { mode: "keep" }), "Generation is paused: running answers wait, and no new rollouts are drawn.")}>
      Pause generation
    </button>
    <button type="button" disabled=${busy} onClick=${() => run(() => post("resume"), "Generation goes on.")}>Resume</button>
    <button type="button" disabled=${busy || !status.trajectories_ready} onClick=${() => run(() => post("v1/training/update", { adapter }), "An update was made.")}>
      Update now
    </button>
    <button type="button" disabled=${busy} onClick=${() => run(() => post("training/checkpoint", { adapter }), "A checkpoint is written.")}>
      Write checkpoint
    </button>
    ${paused && html`<span class="chip warn">paused</span>`}
  </div>`;
}

export function Training({ snapshot }) {
  const [adapter, setAdapter] = useState("");
  const path = `v1/training/status${adapter ? `?adapter=${encodeURIComponent(adapter)}` : ""}`;
  const { data, error, again } = usePolling(() => get(path), 2000, [path]);
  const [run, notice] = useAction(again);
  if (!data) return html`<p class="empty">${error ?? "Asking …"}</p>`;
  if (!data.training_enabled)
    return html`<p class="empty">This server does not train. Start it with <code>--enable-rl-training</code>.</p>`;
  return html`
    <${Notice} ...${error ? { kind: "bad", text: error } : notice} />
    <${Controls} status=${data} paused=${snapshot?.paused} run=${run} busy=${notice.busy} onAdapter=${setAdapter} />
    <${Tiles}
      label="Training now"
      items=${[
        ["Adapter", `${data.current_lora}@${data.policy_version}`],
        ["Updates published", number(data.updates_published), `${number(data.updates_refused)} refused, ${number(data.rollbacks)} rolled back`],
        ["Reward", short(data.reward_mean)],
        ["KL", short(data.kl)],
        ["Answers collected", short(data.trajectories_collected), `${short(data.trajectories_ready)} ready`],
        ["Answers without a signal", short(data.trajectories_flat)],
        ["Too old, dropped", `${short(data.trajectories_stale)}, ${short(data.trajectories_dropped)}`],
        ["Serving’s share", percent(data.measured_inference_share), `wanted ${percent(data.inference_share)}`],
      ]}
    />
    <ul class="legend marks" aria-label="Marks in the charts">
      <li><span class="mark published"></span>published</li>
      <li><span class="mark refused"></span>refused</li>
      <li><span class="mark rolled-back"></span>rolled back</li>
    </ul>
    <${Charts} history=${data.history} />
    <${Updates} history=${data.history} />
  `;
}
