// Line charts, drawn by uPlot: colours from the style sheet, a legend of ours with the values under the pointer.
import { clock } from "./format.js";
import { html, uPlot, useEffect, useMemo, useRef, useState, useTheme } from "./lib.js";

const HEIGHT = 150;
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]; // distances between lines, where values are whole numbers
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Vertical lines at `{x, kind}`; kinds are published, refused and rolled-back. */
function marksPlugin(marks) {
  const draw = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const { x, kind } of marks.current) {
      const place = plot.valToPos(x, "x", true);
      if (place < bbox.left || place > bbox.left + bbox.width) continue;
      ctx.strokeStyle = color(`--${kind}`);
      ctx.lineWidth = kind === "published" ? 1 : 2;
      ctx.setLineDash(kind === "published" ? [] : [5, 4]);
      ctx.beginPath();
      ctx.moveTo(place, kind === "published" ? bbox.top + bbox.height - 7 : bbox.top);
      ctx.lineTo(place, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };
  return { hooks: { draw: [draw] } };
}

function axis(more) {
  return {
    stroke: color("--muted"),
    grid: { stroke: color("--grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
    ...more,
  };
}

function options({ series, format, range, stacked, whole, labels, marks }, width, onIndex) {
  const bands = stacked ? series.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : undefined;
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { points: { size: 6 }, drag: { x: false, y: false }, y: false },
    scales: { x: { time: !labels }, y: { range: range ? () => range : (plot, low, high) => padded(low, high) } },
    axes: [
      axis({ values: (plot, ticks) => ticks.map((tick) => (labels ? (labels.current[tick] ?? "") : clock(tick))), space: 70, size: 26, ...(labels && { incrs: WHOLE }) }),
      axis({ values: (plot, ticks) => ticks.map((tick) => format(tick)), size: 58, ...(whole && { incrs: WHOLE }) }),
    ],
    bands,
    series: [
      {},
      ...series.map((label, i) => ({
        label,
        stroke: color(`--series-${i + 1}`),
        fill: stacked ? color(`--fill-${i + 1}`) : undefined,
        width: 1.75,
        points: { show: labels ? undefined : false, size: 5 },
        spanGaps: Boolean(labels),
      })),
    ],
    plugins: marks ? [marksPlugin(marks)] : [],
    hooks: { setCursor: [(plot) => onIndex(plot.cursor.idx ?? null)] },
  };
}

/** A little air around the values; a flat line in the middle. */
function padded(low, high) {
  if (low === null || high === null || low === undefined) return [0, 1];
  const air = (high - low || Math.abs(high) || 1) * 0.08;
  return [low >= 0 && low - air < 0 ? 0 : low - air, high + air];
}

/** Sums from the first series on, for areas that stand on each other. */
function stack(columns) {
  let below = columns[0].map(() => 0);
  return columns.map((column) => {
    below = column.map((value, i) => (value === null ? null : (below[i] ?? 0) + value));
    return below;
  });
}

/**
 * `x`: times in seconds, or with `labels` numbers 0, 1, … that these name. `columns`: an array for each of `series`.
 */
export function Chart({ title, note, series, x, columns, format, range, stacked, whole, labels, marks }) {
  const holder = useRef(null);
  const plot = useRef(null);
  const theme = useTheme();
  const [index, setIndex] = useState(null);
  const marksRef = useRef([]);
  const labelsRef = useRef([]);
  marksRef.current = marks ?? [];
  labelsRef.current = labels ?? [];
  const data = useMemo(() => [x, ...(stacked ? stack(columns) : columns)], [x, ...columns]);

  useEffect(() => {
    const shape = { series, format, range, stacked, whole, labels: labels && labelsRef, marks: marks && marksRef };
    plot.current = new uPlot(options(shape, holder.current.clientWidth || 300, setIndex), data, holder.current);
    const watcher = new ResizeObserver(() => {
      const width = holder.current?.clientWidth;
      if (width && width !== plot.current.width) plot.current.setSize({ width, height: HEIGHT });
    });
    watcher.observe(holder.current);
    return () => {
      watcher.disconnect();
      plot.current.destroy();
    };
  }, [theme, series.join("|"), Boolean(labels)]);
  useEffect(() => plot.current?.setData(data), [data]);

  // Under the pointer, or the newest; of what only some updates measure, the newest that there is.
  const newest = (column) => (labels ? (column.findLast((value) => value !== null) ?? null) : (column.at(-1) ?? null));
  const shown = series.map((label, i) => [label, format(index === null ? newest(columns[i]) : (columns[i][index] ?? null))]);
  const words = shown.map(([label, value]) => `${label} ${value}`).join(", ");
  return html`<figure class="chart">
    <figcaption>
      <h3>${title}</h3>
      ${note && html`<p class="note">${note}</p>`}
      <ul class="legend">
        ${shown.map(
          ([label, value], i) =>
            html`<li key=${label}><span class="swatch swatch-${i + 1}"></span>${label} <b>${value}</b></li>`,
        )}
      </ul>
    </figcaption>
    <div class="plot" ref=${holder} role="img" aria-label=${`Chart: ${title}. Newest: ${words}`}></div>
  </figure>`;
}
