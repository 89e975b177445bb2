// What the server is doing: one snapshot a second.
import { Chart } from "../chart.js";
import { bytes, number, percent, rate, seconds, short } from "../format.js";
import { html, useMemo } from "../lib.js";
import { Table, Tiles } from "../parts.js";

const milliseconds = (value) => seconds(value);
const share = (value) => percent(value);

const CHARTS = [
  { title: "Throughput", note: "Tokens a second", series: ["generated", "prompt", "cached"], names: ["generated", "prompt, computed", "prompt, from cache"], format: rate },
  { title: "Requests", note: "Right now", series: ["running", "queue"], names: ["rows running", "waiting"], format: (value) => number(value), whole: true },
  { title: "Batch fill", note: "Of the rows that can run together", series: ["fill"], names: ["mean of the steps"], format: share, range: [0, 1] },
  { title: "Time to first token", note: "Of requests that began in the last ten seconds", series: ["first_p50", "first_p90", "first_p99"], names: ["half", "90 %", "99 %"], format: milliseconds },
  { title: "Time between tokens", note: "Of steps in the last ten seconds", series: ["step_p50", "step_p90", "step_p99"], names: ["half", "90 %", "99 %"], format: milliseconds },
  { title: "Where the time goes", note: "Shares of the engines’ time", series: ["serving", "training", "predicting", "idle"], names: ["serving", "training", "predicting", "idle"], format: share, range: [0, 1], stacked: true },
];

function LiveChart({ chart, points }) {
  const x = useMemo(() => points.map((point) => point.time), [points]);
  const columns = useMemo(() => chart.series.map((name) => points.map((point) => point[name] ?? null)), [points]);
  return html`<${Chart} ...${chart} series=${chart.names} x=${x} columns=${columns} />`;
}

function Cache({ cache }) {
  const { memory, ssd } = cache;
  const hits = memory.lookups ? memory.hits / memory.lookups : null;
  const rows = [
    ["Memory", number(memory.lookups), number(memory.hits), percent(hits), `${number(memory.blocks_cached)} of ${number(memory.blocks_total)} blocks`, bytes(memory.bytes), `${number(memory.evictions)} evicted`],
    ["SSD", number(ssd.reads + ssd.misses), number(ssd.reads), percent(ssd.reads + ssd.misses ? ssd.reads / (ssd.reads + ssd.misses) : null), `${number(ssd.files)} files`, bytes(ssd.bytes), `${number(ssd.writes)} written, ${number(ssd.damaged + ssd.errors)} faults`],
  ];
  return html`<section>
    <h2>Prefix cache</h2>
    <${Tiles}
      label="What the cache has saved"
      items=${[
        ["Prompt tokens found", short(cache.saved_tokens)],
        ["Share of all prompt tokens", percent(cache.saved_share, 1)],
        ["Prefill saved, about", seconds(cache.saved_seconds)],
      ]}
    />
    <${Table}
      caption="Tiers of the prefix cache"
      columns=${[["Tier"], ["Looked up", true], ["Found", true], ["Hit rate", true], ["Holds"], ["Size", true], ["Since the start"]]}
      rows=${rows.map((cells) => ({ key: cells[0], cells }))}
    />
  </section>`;
}

const PARTS = {
  weights: "Weights",
  rows: "Running rows (keys and values)",
  blocks: "Cached blocks",
  adapters: "Adapters on the device",
  training: "Training",
  kept: "Freed memory that MLX keeps",
};

function Memory({ memory }) {
  const rows = Object.entries(PARTS).map(([name, label]) => ({
    key: name,
    cells: [
      label,
      bytes(memory[name]),
      html`<meter min="0" max=${memory.limit || 1} value=${memory[name]} aria-label=${`${label}, of the limit`}></meter>`,
    ],
  }));
  return html`<section>
    <h2>Memory</h2>
    <${Tiles}
      label="Memory of the process"
      items=${[
        ["Limit", bytes(memory.limit)],
        ["Held now", bytes(memory.active)],
        ["Most so far", bytes(memory.peak), `serving ${bytes(memory.serving_peak)}`],
        ["Keys and values now", bytes(memory.kv), `of ${bytes(memory.kv_limit)}`],
      ]}
    />
    <${Table} caption="Parts of the memory budget" columns=${[["Part"], ["May hold", true], ["Of the limit"]]} rows=${rows} />
  </section>`;
}

function Replicas({ replicas }) {
  const rows = Object.entries(replicas).map(([name, one]) => ({
    key: name,
    cells: [
      name,
      `${number(one.running)} of ${number(one.slots)}`,
      number(one.queue),
      rate(one.generated),
      seconds(one.first_token),
      percent(one.saved_share, 1),
      bytes(one.memory),
      short(one.requests),
    ],
  }));
  return html`<section>
    <h2>Replicas</h2>
    <p class="note">All numbers on this page are those of all replicas together; percentiles are the slowest one’s.</p>
    <${Table}
      caption="What each replica does"
      columns=${[["Replica"], ["Rows running", true], ["Waiting", true], ["Tokens/s", true], ["First token, half within", true], ["From cache", true], ["Memory", true], ["Answered", true]]}
      rows=${rows}
    />
  </section>`;
}

export function Live({ snapshot, points }) {
  if (!snapshot) return html`<p class="empty">Waiting for the first numbers …</p>`;
  const { rates } = snapshot;
  return html`
    <${Tiles}
      label="Right now"
      items=${[
        ["Generated", rate(rates.generated), "tokens/s"],
        ["Prompts computed", rate(rates.prompt), "tokens/s"],
        ["Rows running", `${snapshot.running} of ${snapshot.slots}`],
        ["Waiting", number(snapshot.queue)],
        ["First token, half within", seconds(snapshot.first_token.p50)],
        ["Between tokens, half within", seconds(snapshot.step.p50)],
        ["Requests answered", short(snapshot.totals.requests)],
        ["Turned away", number(snapshot.rejected)],
      ]}
    />
    <section class="charts">
      <h2 class="unseen">Charts</h2>
      ${CHARTS.map((chart) => html`<${LiveChart} key=${chart.title} chart=${chart} points=${points} />`)}
    </section>
    ${snapshot.replicas && html`<${Replicas} replicas=${snapshot.replicas} />`}
    <${Cache} cache=${snapshot.cache} />
    <${Memory} memory=${snapshot.memory} />
    <p class="note">Version ${snapshot.version}. Models: ${snapshot.models.join(", ") || "none loaded"}. Dashboards open: ${snapshot.viewers}.</p>
  `;
}
