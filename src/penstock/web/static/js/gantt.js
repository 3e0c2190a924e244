// The Gantt chart of a graph run: a row for each worker, a bar for each node, and before each bar a line for the time in the queue.
import { html } from "./html.js";
import { count, span } from "./format.js";

const TONES = { compute: "accent", io: "violet", process: "good", cluster: "warn" };
const LANES = ["compute", "io", "loop", "process", "cluster"];
const ROWS = 24;

export function Gantt({ name, lanes }) {
  const whole = Math.max(lanes.seconds, 1e-6);
  const rows = rowsOf(lanes.bars),
    shown = rows.slice(0, ROWS);
  const going = lanes.status === "running";
  const title = `${name}: run ${lanes.run} of ${lanes.graph}, ${going ? "for" : `${lanes.status} in`} ${span(lanes.seconds)}`;
  return html`<figure class="gantt" aria-label=${title}>
    <figcaption><h3>${lanes.graph}</h3><span class="muted">run ${lanes.run} in ${name}</span>
      <span class="state" data-tone=${going ? "accent" : lanes.status === "ok" ? "good" : "bad"}>${lanes.status}</span>
      <span class="muted">${span(lanes.seconds)} · ${count(lanes.nodes)} nodes${lanes.left_out ? ` · ${count(lanes.left_out)} earlier not shown` : ""}</span>
      <span class="key">${[...new Set(lanes.bars.map((bar) => bar.lane))].map((lane) => html`<span><i class="dot" data-tone=${TONES[lane] || "muted"}></i>${lane}</span>`)}${lanes.bars.some((bar) => bar.critical) && html`<span><i class="dot critical" data-tone="muted"></i>critical path</span>`}</span></figcaption>
    <div class="rows">${shown.map(
      ([worker, bars]) => html`<span class="who" key=${`worker ${worker}`}>${worker.replace(/-(\d+)$/, " $1")}</span>
      <div class="lane" key=${worker}>${bars.map((bar, i) => html`<${Node} key=${i} bar=${bar} whole=${whole} />`)}</div>`,
    )}
      <span></span><div class="axis" aria-hidden="true">${ticks(whole).map((at) => html`<span style=${{ left: `${(at / whole) * 100}%` }}>${span(at)}</span>`)}</div></div>
    ${rows.length > shown.length && html`<p class="muted">and ${rows.length - shown.length} more workers</p>`}</figure>`;
}

function Node({ bar, whole }) {
  const part = (seconds) => `${Math.max(0, Math.min(100, (seconds / whole) * 100))}%`;
  const ended = bar.ended ?? whole,
    waited = Math.max(0, bar.started - bar.ready);
  const words = `${bar.node}: ${bar.ended == null ? "for " : ""}${span(ended - bar.started)}${waited > 0.0005 ? `, ready ${span(waited)} before` : ""}${bar.failed ? ", failed" : ""}`;
  return html`${waited > 0 && html`<i class="ready" style=${{ left: part(bar.ready), width: part(waited) }}></i>`}
    <span class=${bar.critical ? "critical" : ""} data-tone=${bar.failed ? "bad" : TONES[bar.lane] || "muted"} data-going=${bar.ended == null ? "" : undefined} title=${words} role="img" aria-label=${words}
      style=${{ left: part(bar.started), width: part(ended - bar.started) }}>${bar.node}</span>`;
}

// The rows in the order of the lanes: compute, io, event loop, pools.
function rowsOf(bars) {
  const rows = new Map();
  for (const bar of bars) {
    if (!rows.has(bar.worker)) rows.set(bar.worker, []);
    rows.get(bar.worker).push(bar);
  }
  const rank = (worker) => LANES.indexOf(worker.replace(/-\d+$/, ""));
  return [...rows].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }));
}

// At most five ticks, at 1, 2 or 5 times a power of ten; none whose label would leave the chart.
function ticks(whole) {
  const rough = whole / 5,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= rough);
  return Array.from({ length: Math.floor((whole * 0.95) / step) + 1 }, (_, n) => n * step);
}
