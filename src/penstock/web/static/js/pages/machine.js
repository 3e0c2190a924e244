import { html } from "../html.js";
import { get, post } from "../api.js";
import { frame, history, useWatched } from "../live.js";
import { Bar, Card, confirm, Empty, Failed, JobLink, Since, Tile, toast } from "../parts.js";
import { Chart } from "../charts.js";
import { count, percent, span } from "../format.js";

const TONES = ["accent", "good", "warn", "violet", "muted", "bad"];
const PHASES = { leased: "running" };
const QUIET = { QUIET: "good", BUSY: "warn", PANIC: "bad" };

export function Machine() {
  const { answer, problem } = useWatched(
    () => Promise.all([get("capacity"), get("leases"), get("hosts"), get("types")]),
    () => true,
  );
  const live = frame.value,
    past = history.value;
  if (!answer) return problem ? html`<${Failed} problem=${problem} />` : html`<${Empty}>Loading…<//>`;
  const [capacity, { leases }, hosts, { types }] = answer;
  const addons = [...new Set(leases.map((l) => l.addon_id))].sort();
  const tone = (addon) => TONES[addons.indexOf(addon) % TONES.length];
  const paused = live?.paused;
  const flip = async () => {
    try {
      await post(paused ? "resume" : "pause");
      toast(paused ? "Resumed everything." : "No more jobs start. Running jobs continue.");
    } catch (error) {
      toast(error.message, "bad");
    }
  };
  return html`<${Failed} problem=${problem} />
    <div class="tiles">
      <${Tile} label="State" value=${capacity.quiet} sub=${capacity.quiet_sec === null ? "fixed by a setting" : `for ${span(capacity.quiet_sec)}`} tone=${QUIET[capacity.quiet] || ""} />
      <${Tile} label="Busy score" value=${capacity.busy.toFixed(1)} sub=${capacity.quiet_sec === null ? "not measured" : capacity.busy_by ? `decided by ${capacity.busy_by}` : "of 10"} />
      <${Tile} label="Capacity now" value=${capacity.capacity} sub=${`of ${capacity.most} at its quietest`} />
      <${Tile} label="In use" value=${capacity.in_use} sub=${`${capacity.free === 1 ? "1 unit" : `${count(capacity.free)} units`} free`} />
    </div>
    <div class="grid">
      <${Card} title="Units by job" wide actions=${html`<button class=${paused ? "primary may-config" : "may-config"} onClick=${flip}>${paused ? "Resume" : "Pause everything"}</button>`}>
        <${Bar} whole=${Math.max(capacity.most, capacity.in_use)} label=${`${capacity.in_use} units in use`} parts=${leases.map((l) => ({ value: l.cost_units, tone: tone(l.addon_id), label: `${l.addon_id} ${l.job_type}: ${l.cost_units} units` }))} />
        ${
          leases.length
            ? html`<div class="scroll"><table class="cards"><thead><tr><th><span class="sr">Actions</span></th><th>Job</th><th>What</th><th>Addon</th><th class="n">Units</th><th class="spare">Phase</th><th>For</th><th>Progress</th><th class="spare">Worker</th></tr></thead>
          <tbody>${leases.map((l) => html`<tr key=${l.lease_id}><td class="mark"><i class="dot" data-tone=${tone(l.addon_id)}></i></td><td>${l.job_id ? html`<${JobLink} id=${l.job_id} />` : "a lease alone"}</td><td class="what whole" title=${l.title}>${l.title || l.job_type}</td><td data-label="Addon">${l.addon_id}</td><td class="n" data-label="Units">${l.cost_units}</td><td class="spare">${PHASES[l.phase] || l.phase}${l.reason ? `: ${l.reason.replaceAll("_", " ")}` : ""}</td><td data-label="For"><${Since} iso=${l.started_at || l.admitted_at} /></td><td data-label="Progress">${percent(l.progress) || "–"}</td><td class="spare">${l.worker}</td></tr>`)}</tbody></table></div>`
            : html`<${Empty}>Nothing is in flight.<//>`
        }<//>
      <${Hosts} ...${hosts} />
      ${
        capacity.readings.length > 0 &&
        html`<${Card} title="Pressure">
        <table><thead><tr><th>Signal</th><th class="n">Value</th><th>Taken</th></tr></thead><tbody>${capacity.readings.map((r) => html`<tr key=${r.name} class=${r.fresh ? "" : "stale"}><td>${r.name}</td><td class="n">${r.value < 10 ? r.value.toFixed(2) : count(Math.round(r.value))}</td><td><${Since} iso=${r.at} /> ago${r.fresh ? "" : ", stale"}</td></tr>`)}</tbody></table><//>
      <${Card} title="Busy">
        <${Chart} label="Busy score" at=${past.at} lines=${[{ label: "busy", tone: "warn", values: past.busy, fill: true }]} height=${150} /><//>`
      }
      <${Card} title="Capacity against use" wide>
        ${!capacity.readings.length && html`<p class="muted">The capacity is fixed by a setting: the machine is not measured.</p>`}
        <${Chart} label="Capacity and use" at=${past.at} lines=${[
          { label: "capacity", tone: "muted", values: past.capacity, stepped: true },
          { label: "in use", tone: "accent", values: past.in_use, fill: true, stepped: true },
        ]} height=${150} /><//>
      <${Card} title="Job types" wide><${Types} types=${types} /><//>
      <${Card} title="Decisions" wide><${Decisions} live=${live} /><//>
    </div>`;
}

function Decisions({ live }) {
  const reasons = Object.entries(live?.denials || {}).sort((a, b) => b[1] - a[1]);
  if (!reasons.length) return html`<${Empty}>No job was refused in the last 15 minutes.<//>`;
  return html`<table><thead><tr><th>Refused because</th><th class="n">In the last 15 min</th></tr></thead><tbody>${reasons.map(([reason, n]) => html`<tr key=${reason}><td>${reason.replaceAll("_", " ")}</td><td class="n">${count(n)}</td></tr>`)}</tbody></table>`;
}

const TYPES_SHOWN = 20;

// The learned figures of the most frequent job types, and the share of their starts within the predicted range (80 % is right).
function Types({ types }) {
  if (!types.length) return html`<${Empty}>Nothing was learned yet: that begins with the first job that ends.<//>`;
  const shown = [...types].sort((a, b) => b.attempts - a.attempts).slice(0, TYPES_SHOWN);
  const range = (t) => (t.duration_sec == null ? "–" : `${span(t.duration_low_sec)} to ${span(t.duration_high_sec)}`);
  return html`<div class="scroll"><table class="cards"><thead><tr><th>Type</th><th>Addon</th><th class="n">Attempts</th><th class="n">Duration</th><th>10–90 %</th><th class="n">Per hour</th><th class="n">Predicted starts</th><th class="n">In range</th><th class="n">Median error</th></tr></thead>
    <tbody>${shown.map(
      (t) => html`<tr key=${`${t.addon_id} ${t.job_type} ${t.size}`}><td data-label="Type">${t.job_type}${t.size && html` <span class="muted">${t.size}</span>`}</td><td data-label="Addon">${t.addon_id}</td><td class="n" data-label="Attempts">${count(t.attempts)}</td><td class="n" data-label="Duration">${span(t.duration_sec)}</td><td data-label="10–90 %">${range(t)}</td><td class="n" data-label="Per hour">${count(Math.round(t.arrivals_per_hour))}</td><td class="n" data-label="Predicted starts">${count(t.predictions)}</td><td class="n" data-label="In range">${percent(t.coverage) || "–"}</td><td class="n" data-label="Median error">${t.error_sec == null ? "–" : `${span(t.error_sec)}, ${percent(t.error_share)} of the wait`}</td></tr>`,
    )}</tbody></table></div>
    ${types.length > TYPES_SHOWN && html`<p class="muted">${count(types.length - TYPES_SHOWN)} more: <code>penstock stats</code> lists all.</p>`}`;
}

// The hosts that share the jobs. The jobs of a lost host return to the queue when their leases expire.
function Hosts({ here, hosts }) {
  const flip = async ({ host, draining }) => {
    if (!draining && !(await confirm(`Drain ${host}?`, "It starts no more jobs, also after a restart. Its running jobs continue.", "Drain"))) return;
    try {
      await post(draining ? "hosts/undrain" : "hosts/drain", { host });
      toast(draining ? `${host} starts jobs again.` : `${host} starts no more jobs.`);
    } catch (error) {
      toast(error.message, "bad");
    }
  };
  return html`<${Card} title="Hosts" wide>
    <div class="scroll"><table class="cards"><thead><tr><th>Host</th><th>State</th><th>Units in use</th><th>Machine</th><th>Seen</th><th>Up</th><th>Labels</th><th>Version</th><th><span class="sr">Actions</span></th></tr></thead>
    <tbody>${hosts.map(
      (h) => html`<tr key=${h.host} class=${h.state === "lost" ? "stale" : ""}>
      <td class="half">${/^https?:/.test(h.url || "") && h.host !== here ? html`<a href=${h.url} rel="noreferrer">${h.host}</a>` : h.host}${h.host === here && html` <span class="muted">(here)</span>`}</td>
      <td class="half last"><span class="state" data-tone=${h.state === "lost" ? "bad" : h.draining ? "warn" : "good"}>${h.state}${h.draining ? ", draining" : ""}</span></td>
      <td class="share whole"><${Bar} whole=${Math.max(1, h.capacity, h.units)} label=${`${h.host}: ${h.units} of ${h.capacity} units in use`} parts=${[{ value: h.units, tone: "accent", label: `${h.units} units` }]} /><span class="muted">${h.units} of ${h.capacity}</span></td>
      <td data-label="Machine">${h.quiet}</td><td data-label="Seen"><${Since} iso=${h.seen_at} /> ago</td><td data-label="Up"><${Since} iso=${h.started_at} /></td><td class="whole" data-label="Labels">${h.labels.join(" ") || "–"}</td><td class="half" data-label="Version">${h.version}</td>
      <td class="half last"><button class="may-config" onClick=${() => flip(h)} aria-label=${`${h.draining ? "Undrain" : "Drain"} ${h.host}`}>${h.draining ? "Undrain" : "Drain"}</button></td></tr>`,
    )}</tbody></table></div><//>`;
}
