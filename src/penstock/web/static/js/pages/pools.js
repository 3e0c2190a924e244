import { html } from "../html.js";
import { get } from "../api.js";
import { now, useWatched } from "../live.js";
import { Bar, Card, Empty, Failed } from "../parts.js";
import { Gantt } from "../gantt.js";
import { count, span, since } from "../format.js";

export function Pools() {
  const { answer, problem } = useWatched(
    () => get("programs"),
    () => true,
  );
  const programs = answer?.programs;
  if (!programs) return problem ? html`<${Failed} problem=${problem} />` : html`<${Empty}>Loading…<//>`;
  if (!programs.length)
    return html`<${Card} title="Pools and graphs" wide><${Empty}>No program is attached. A program calls <code>penstock.attach()</code> to show its pools and graphs here.<//><//>`;
  return html`<${Failed} problem=${problem} />${programs.map(
    (
      program,
      i,
    ) => html`<${Card} key=${i} title=${program.name} wide actions=${html`<span class="muted">${since(program.at, now.value) > 5 ? `silent for ${span(since(program.at, now.value))}` : ""}</span>`}>
    <div class="pools">${program.tasks.map((task, i) => html`<${Task} key=${i} task=${task} />`)}</div>
    ${program.tasks.filter((task) => task.lanes).map((task, i) => html`<${Gantt} key=${i} name=${task.name} lanes=${task.lanes} />`)}<//>`,
  )}`;
}

function Task({ task }) {
  const depth = task.max_queue_depth,
    full = depth ? task.pending_queue_depth / depth : 0;
  const most = Math.max(1, ...task.load_by_worker);
  // Of a graph only the load of its workers counts: its event loop may have a thousand nodes in flight.
  const room = task.kind === "graph" ? Math.max(1, task.load_by_worker.length, task.in_flight) : task.max_in_flight;
  return html`<article class="pool"><header><h3>${task.name}</h3><span class="muted">${task.kind}, ${task.policy}${task.paused ? ", paused" : ""}</span></header>
    <div class="meter"><span>in flight</span><${Bar} whole=${room || 1} label=${`in flight ${task.in_flight}`} parts=${[{ value: task.in_flight, tone: "accent", label: "in flight" }]} /><b>${count(task.in_flight)}${task.kind === "graph" ? "" : `/${count(task.max_in_flight)}`}</b></div>
    <div class="meter"><span>pending</span><${Bar} whole=${depth || Math.max(1, task.pending_queue_depth)} label=${`pending ${task.pending_queue_depth}`} parts=${[{ value: task.pending_queue_depth, tone: full > 0.8 ? "warn" : "good", label: "pending" }]} /><b data-tone=${full > 0.8 ? "warn" : ""}>${count(task.pending_queue_depth)}${depth ? `/${count(depth)}` : ""}</b></div>
    <div class="meter"><span>waiting</span><${Bar} whole=${Math.max(10, task.waiting_queue_depth)} label=${`waiting ${task.waiting_queue_depth}`} parts=${[{ value: task.waiting_queue_depth, tone: "bad", label: "waiting" }]} /><b data-tone=${task.waiting_queue_depth ? "bad" : ""}>${count(task.waiting_queue_depth)}</b></div>
    <div class="workers" role="img" aria-label="Load by worker">${task.load_by_worker.map((load, i) => html`<span key=${i} title=${`worker ${i + 1}: ${load}`}><i style=${{ height: `${(load / most) * 100}%` }}></i></span>`)}</div>
    <p class="muted">${Object.entries(task.workers)
      .filter(([, n]) => n)
      .map(([state, n]) => `${n} ${n === 1 ? "worker" : "workers"} ${state}`)
      .join(", ")} · ${Object.entries(task.totals)
      .filter(([, n]) => n)
      .slice(0, 6)
      .map(([name, n]) => `${name.replaceAll("_", " ")} ${count(n)}`)
      .join(" · ")}</p>
    ${task.last_crash && html`<p class="problem">${task.last_crash}</p>`}</article>`;
}
