import { html, useEffect, useState } from "../html.js";
import { get, post } from "../api.js";
import { frame, history, watching } from "../live.js";
import { Bar, Card, Empty, Failed, JobLink, Since, Tile, toast } from "../parts.js";
import { Chart } from "../charts.js";
import { count, percent, span } from "../format.js";

const TONES = ["accent", "good", "warn", "violet", "muted", "bad"];

export function Machine() {
  const [capacity, setCapacity] = useState(null),
    [leases, setLeases] = useState([]),
    [problem, setProblem] = useState(null);
  useEffect(
    () =>
      watching(
        async () => {
          try {
            const [a, b] = await Promise.all([get("capacity"), get("leases")]);
            setCapacity(a);
            setLeases(b.leases);
            setProblem(null);
          } catch (error) {
            setProblem(error);
          }
        },
        () => true,
      ),
    [],
  );
  const beat = frame.value,
    past = history.value;
  if (!capacity) return problem ? html`<${Failed} problem=${problem} />` : html`<${Empty}>Looking…<//>`;
  const addons = [...new Set(leases.map((l) => l.addon_id))].sort();
  const tone = (addon) => TONES[addons.indexOf(addon) % TONES.length];
  const paused = beat?.paused;
  const flip = async () => {
    try {
      await post(paused ? "resume" : "pause");
      toast(paused ? "Starting again." : "Nothing new starts. What runs goes on.");
    } catch (error) {
      toast(error.message, "bad");
    }
  };
  return html`<${Failed} problem=${problem} />
    <div class="tiles">
      <${Tile} label="State" value=${capacity.quiet} sub=${capacity.quiet_sec > 1e8 ? "fixed by a setting" : `for ${span(capacity.quiet_sec)}`} tone=${{ QUIET: "good", BUSY: "warn", PANIC: "bad" }[capacity.quiet] || ""} />
      <${Tile} label="Busy score" value=${capacity.busy.toFixed(1)} sub=${capacity.busy_by ? `decided by ${capacity.busy_by}` : "of 10"} />
      <${Tile} label="Capacity now" value=${capacity.capacity} sub=${`of ${capacity.most} at its quietest`} />
      <${Tile} label="In use" value=${capacity.in_use} sub=${`${capacity.free} units free`} />
    </div>
    <div class="grid">
      <${Card} title="What each unit is spent on" wide actions=${html`<button class=${paused ? "primary" : ""} onClick=${flip}>${paused ? "Resume" : "Pause everything"}</button>`}>
        <${Bar} whole=${Math.max(capacity.most, capacity.in_use)} label=${`${capacity.in_use} units in use`} parts=${leases.map((l) => ({ value: l.cost_units, tone: tone(l.addon_id), label: `${l.addon_id} ${l.job_type}: ${l.cost_units} units` }))} />
        ${
          leases.length
            ? html`<div class="scroll"><table><thead><tr><th></th><th>Job</th><th>Addon</th><th>Type</th><th class="n">Units</th><th>Phase</th><th>For</th><th>Progress</th><th>Worker</th></tr></thead>
          <tbody>${leases.map((l) => html`<tr key=${l.lease_id}><td><i class="dot" data-tone=${tone(l.addon_id)}></i></td><td>${l.job_id ? html`<${JobLink} id=${l.job_id} />` : "a lease alone"}</td><td>${l.addon_id}</td><td>${l.job_type}</td><td class="n">${l.cost_units}</td><td>${l.phase}${l.reason ? `: ${l.reason.replaceAll("_", " ")}` : ""}</td><td><${Since} iso=${l.started_at || l.admitted_at} /></td><td>${percent(l.progress)}</td><td>${l.worker}</td></tr>`)}</tbody></table></div>`
            : html`<${Empty}>Nothing is in flight.<//>`
        }<//>
      <${Card} title="Pressure">
        ${capacity.readings.length ? html`<table><thead><tr><th>Signal</th><th class="n">Value</th><th>Taken</th></tr></thead><tbody>${capacity.readings.map((r) => html`<tr key=${r.name} class=${r.fresh ? "" : "stale"}><td>${r.name}</td><td class="n">${r.value < 10 ? r.value.toFixed(2) : count(Math.round(r.value))}</td><td><${Since} iso=${r.at} /> ago${r.fresh ? "" : ", stale"}</td></tr>`)}</tbody></table>` : html`<${Empty}>The capacity is fixed by a setting: nothing is measured.<//>`}<//>
      <${Card} title="Busy, and what it leaves">
        <${Chart} label="Busy score" at=${past.at} lines=${[{ label: "busy", tone: "warn", values: past.busy, fill: true }]} height=${130} />
        <${Chart} label="Capacity and use" at=${past.at} lines=${[
          { label: "capacity", tone: "muted", values: past.capacity, stepped: true },
          { label: "in use", tone: "accent", values: past.in_use, fill: true, stepped: true },
        ]} height=${130} /><//>
      <${Card} title="Decisions" wide><${Decisions} beat=${beat} /><//>
    </div>`;
}

function Decisions({ beat }) {
  const reasons = Object.entries(beat?.denials || {}).sort((a, b) => b[1] - a[1]);
  if (!reasons.length) return html`<${Empty}>No head of a line has been refused in the last quarter of an hour.<//>`;
  return html`<table><thead><tr><th>Refused because</th><th class="n">In the last 15 min</th></tr></thead><tbody>${reasons.map(([reason, n]) => html`<tr key=${reason}><td>${reason.replaceAll("_", " ")}</td><td class="n">${count(n)}</td></tr>`)}</tbody></table>`;
}
