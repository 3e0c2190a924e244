import { html } from "../html.js";
import { activity, counts, frame, history, recentDone } from "../live.js";
import { Bar, Card, Empty, JobLink, Range, STATES, State, Tile } from "../parts.js";
import { Chart } from "../charts.js";
import { clock, count, span } from "../format.js";

export function Overview() {
  const live = frame.value,
    past = history.value,
    jobs = counts.value;
  if (!live) return html`<${Empty}>Loading…<//>`;
  const rate = sum(recentDone.value) / Math.max(1, recentDone.value.length);
  const inFlight = (jobs.RUNNING || 0) + (jobs.DISPATCHING || 0);
  const trouble = (jobs.FAILED || 0) + (jobs.BLOCKED || 0);
  return html`
    <div class="tiles many">
      <${Tile} label="In flight" value=${count(inFlight)} sub=${`${live.second.in_use} of ${live.second.capacity} units`} href="#/jobs?state=RUNNING" />
      <${Tile} label="Pending" value=${count(jobs.QUEUED || 0)} sub=${live.oldest_queued_sec == null ? "nothing waits" : `oldest ${span(live.oldest_queued_sec)}`} href="#/jobs?state=QUEUED" />
      <${Tile} label="Waiting to submit" value=${count(live.waiting)} tone=${live.waiting ? "bad" : ""} sub=${live.waiting ? "the queue is full" : "room for more"} />
      <${Tile} label="Done a second" value=${rate >= 10 ? count(Math.round(rate)) : rate.toFixed(1)} sub="over the last minute" href="#/jobs?state=DONE" />
      <${Tile} label="Wait" value=${span(live.wait?.[0])} sub=${live.wait ? `median; p95 ${span(live.wait[1])}` : "no start in the last minute"} />
      <${Tile} label="Attempt" value=${span(live.attempt?.[0])} sub=${live.attempt ? `median; p95 ${span(live.attempt[1])}` : "no end in the last minute"} />
      <${Tile} label="Needs attention" value=${count(trouble)} tone=${trouble ? "warn" : ""} sub=${`${jobs.FAILED || 0} failed, ${jobs.BLOCKED || 0} blocked`} href="#/jobs?state=FAILED,BLOCKED" />
      <${Tile} label="Machine" value=${live.quiet} tone=${{ QUIET: "good", NORMAL: "", BUSY: "warn", PANIC: "bad" }[live.quiet]} sub=${live.paused ? "everything is paused" : `busy ${live.second.busy.toFixed(1)} of 10`} href="#/machine" />
    </div>
    <${Range} />
    <div class="grid">
      <${Card} title="Throughput">
        <${Chart} label="Jobs submitted, done and failed a second" at=${past.at} unit=${(v) => `${v}/s`} lines=${[
          { label: "submitted", tone: "muted", values: past.submitted },
          { label: "done", tone: "accent", values: past.done, fill: true },
          { label: "failed", tone: "bad", values: past.failed },
        ]} />
      <//>
      <${Card} title="Capacity against use">
        <${Chart} label="Units free and in use" at=${past.at} lines=${[
          { label: "capacity", tone: "muted", values: past.capacity, stepped: true },
          { label: "in use", tone: "accent", values: past.in_use, fill: true, stepped: true },
        ]} />
      <//>
      <${Card} title="Wait">
        <${Chart} label="Time from ready to start" at=${past.at} unit=${span} lines=${[
          { label: "p50", tone: "accent", values: past.wait_p50 },
          { label: "p95", tone: "warn", values: past.wait_p95 },
        ]} />
      <//>
      <${Card} title="Attempt">
        <${Chart} label="Time from start to end" at=${past.at} unit=${span} lines=${[
          { label: "p50", tone: "accent", values: past.attempt_p50 },
          { label: "p95", tone: "warn", values: past.attempt_p95 },
        ]} />
      <//>
      <${Card} title="Jobs by state" wide>
        <${States} jobs=${jobs} />
      <//>
      <${Card} title="Activity" wide>
        <${Activity} />
      <//>
    </div>`;
}

const TONES = {
  QUEUED: "muted",
  DISPATCHING: "warn",
  RUNNING: "accent",
  DONE: "good",
  FAILED: "bad",
  BLOCKED: "bad",
  CANCELED: "line",
};

function States({ jobs }) {
  const shown = STATES.map((state) => [state, jobs[state]]).filter(([, n]) => n);
  const whole = shown.reduce((all, [, n]) => all + n, 0);
  if (!whole) return html`<${Empty}>No jobs yet. <code>penstock submit -- echo hello</code> makes one.<//>`;
  return html`<${Bar} whole=${whole} label="Jobs by state" parts=${shown.map(([state, n]) => ({ value: n, tone: TONES[state], label: `${state}: ${n}` }))} />
    <div class="row wrap">${shown.map(([state, n]) => html`<a class="plain" href=${`#/jobs?state=${state}`}><${State} state=${state} /> ${count(n)}</a>`)}</div>`;
}

function Activity() {
  const events = activity.value;
  if (!events.length) return html`<${Empty}>Nothing has happened yet.<//>`;
  return html`<ol class="activity">${events.slice(0, 14).map(
    (e) => html`<li key=${e.seq}>
    <time>${clock(e.at)}</time><span class="kind" data-kind=${e.kind}>${e.kind.toLowerCase().replaceAll("_", " ")}</span>
    ${e.job_id ? html`<${JobLink} id=${e.job_id} />` : ""}<span class="name" title=${e.name}>${e.name}</span><span class="muted">${e.reason.replaceAll("_", " ")}</span></li>`,
  )}</ol>`;
}

const sum = (list) => list.reduce((all, one) => all + (one || 0), 0);
