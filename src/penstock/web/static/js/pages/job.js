import { html, useEffect, useRef, useState } from "../html.js";
import { get, post } from "../api.js";
import { now, watching } from "../live.js";
import { Output } from "../output.js";
import { Rerun } from "../submit.js";
import { Card, Empty, Failed, Field, State, When, confirm, toast } from "../parts.js";
import { ZONE, clock, exact, json, moment, money, percent, short, span } from "../format.js";
import { placeOf } from "./batches.js";

export function Job({ id }) {
  const [job, setJob] = useState(null),
    [why, setWhy] = useState(null),
    [events, setEvents] = useState([]),
    [dependencies, setDependencies] = useState({ parents: [], children: [] }),
    [problem, setProblem] = useState(null),
    [again, setAgain] = useState(false);

  const moving = useRef(false); // progress and spending change without events

  useEffect(() => {
    const aborter = new AbortController(),
      signal = aborter.signal;
    const load = async () => {
      try {
        const [a, b, c, d] = await Promise.all([
          get(`queue/jobs/${id}`, { signal }),
          get(`queue/jobs/${id}/explain`, { signal }),
          allEvents(id, signal),
          get(`queue/jobs/${id}/dependencies`, { signal }),
        ]);
        setJob(a);
        setWhy(b);
        setEvents(c);
        setDependencies(d);
        setProblem(null);
        moving.current = a.state === "RUNNING";
      } catch (error) {
        if (error.name !== "AbortError") setProblem(error);
      }
    };
    const quit = watching(load, () => moving.current);
    return () => {
      quit();
      aborter.abort();
    };
  }, [id]);

  if (!job) return problem ? html`<${Failed} problem=${problem} />` : html`<${Empty}>Loading…<//>`;
  const act = async (verb) => {
    if (
      verb === "cancel" &&
      !(await confirm(
        "Cancel this job?",
        job.state === "RUNNING"
          ? "A running job is told to stop, and killed if it does not. A canceled job cannot be retried."
          : "A canceled job cannot be retried.",
        "Cancel the job",
      ))
    )
      return;
    try {
      const { state } = await post(`queue/jobs/${id}/${verb}`);
      toast(verb === "retry" ? "Back in the queue." : state === "CANCELED" ? "Canceled." : "Told to stop.");
    } catch (error) {
      toast(error.message, "bad");
    }
  };
  const came = job.error || job.result != null || job.checkpoint != null;
  return html`
    <header class="jobhead">
      <div><h1><${State} state=${job.state} /> ${job.title}</h1><p class="muted">${job.job_type} of <a class="plain" href=${`#/jobs?addon=${encodeURIComponent(job.addon_id)}`}>${job.addon_id}</a> · <span class="id wide" title="Full id">${job.job_id}</span></p></div>
      <div class="row">
        ${job.state === "QUEUED" && html`<${Priority} job=${job} /> <${RunWhen} job=${job} />`}
        ${job.allowed.includes("retry") && html`<button class="primary may-submit" onClick=${() => act("retry")}>Retry</button>`}
        <button class="may-submit" onClick=${() => setAgain(true)}>Run again…</button>
        ${job.allowed.includes("cancel") && html`<button class="danger may-cancel" onClick=${() => act("cancel")}>Cancel</button>`}
      </div>
    </header>
    <${Failed} problem=${problem} />
    ${job.progress != null && job.state === "RUNNING" && html`<div class="progress" role="progressbar" aria-valuenow=${Math.round(job.progress * 100)} aria-valuemin="0" aria-valuemax="100" aria-label="Progress"><span style=${{ width: percent(job.progress).replace(" ", "") }}></span><b>${percent(job.progress)}</b></div>`}
    <div class="grid">
      <${Card} title="Why" wide><p class="explain"><${Sentences} text=${why?.text} /></p>
        ${why?.next_step && html`<p class="muted">Next: ${why.next_step}${why.next_at ? `, about ${clock(why.next_at)}` : ""}.${why.way_out && !why.text.includes(why.way_out) && html` What would change it: <code>${why.way_out}</code>`}</p>`}
        ${why?.likely_start_at && html`<p class="muted">Likely start ${why.likely_start_low_at ? `between ${clock(why.likely_start_low_at)} and ${clock(why.likely_start_high_at)}` : `about ${clock(why.likely_start_at)}`}${why.recorded ? "" : " (computed just now)"}.</p>`}<//>
      <${Card} title="Timeline" wide><${Timeline} job=${job} events=${events} /><//>
      ${dependencies.parents.length + dependencies.children.length > 0 && html`<${Card} title="Before and after" wide><${Family} job=${job} dependencies=${dependencies} /><//>`}
      <${Card} title="Request" wide=${!came}>
        <dl class="facts">
          <${Fact} name="Cost" value=${`${job.cost_units} units`} /><${Fact} name="Priority" value=${job.priority + (job.preemptible ? "" : ", not preemptible")} /><${Fact} name="Run when" value=${job.run_when + (job.quiet_for_sec ? `, quiet for ${span(job.quiet_for_sec)}` : "")} />
          <${Fact} name="Created" value=${html`<${When} iso=${job.created_at} />`} /><${Fact} name="Not before" value=${Date.parse(job.next_earliest_start_at) > now.value && html`<${When} iso=${job.next_earliest_start_at} />`} /><${Fact} name="Deadline" value=${job.deadline_at && html`<${When} iso=${job.deadline_at} />`} />
          <${Fact} name="Runtime limit" value=${job.max_runtime_sec && span(job.max_runtime_sec)} /><${Fact} name="Hard cap" value=${job.max_active_sec && span(job.max_active_sec)} />
          <${Fact} name="Spending limit" value=${job.cost_limit && money(job.cost_limit, job.unit)} /><${Fact} name="Spent" value=${job.spent ? money(job.spent, job.unit) : null} />
          <${Fact} name="Tags" value=${job.tags.join(", ")} /><${Fact} name="Key" value=${job.idempotency_key} /><${Fact} name="Worker" value=${job.worker} /><${Fact} name="Process" value=${job.pid} />
        </dl>
        <h3>Payload</h3><${Json} value=${job.payload} /><//>
      ${
        came &&
        html`<${Card} title="Result">
        ${job.error && html`<pre class="error">${job.error}</pre>`}
        ${job.result != null && html`<h3>Value</h3><${Json} value=${job.result} />`}
        ${job.checkpoint != null && html`<h3>Checkpoint</h3><${Json} value=${job.checkpoint} />`}<//>`
      }
      ${job.job_type.startsWith("penstock.") && html`<${Output} job=${job} />`}
      <${Card} title=${`Attempts (${job.attempts})`}><${Attempts} events=${events} /><//>
      <${Card} title="Events"><ol class="activity">${[...events].reverse().map((e) => html`<li key=${`${e.n} ${e.kind}`}><time title=${exact(e.at)}>${clock(e.at)}</time><span class="kind" data-kind=${e.kind}>${e.kind.toLowerCase().replaceAll("_", " ")}</span><span class="muted">${e.reason.replaceAll("_", " ")}${e.data.by && e.kind !== "DENIED" ? ` by ${e.data.by}` : ""}</span></li>`)}</ol><//>
    </div>${again && html`<${Rerun} job=${job} onClose=${() => setAgain(false)} />`}`;
}

// A text of the server, with commands between backquotes.
const Sentences = ({ text }) => (text || "").split("`").map((part, i) => (i % 2 ? html`<code key=${i}>${part}</code>` : part));

const Fact = ({ name, value }) => (value == null || value === "" || value === false ? null : html`<div><dt>${name}</dt><dd>${value}</dd></div>`);

/** Where a relative is shown: a job, or an array or a batch that the job waits for. */
const relativeOf = ({ job_id: id, job_type: type }) => (id.startsWith("batch:") ? placeOf(id.slice(6)) : type === "array" ? "#/arrays" : `#/jobs/${id}`);

const SHOWN = 8, // jobs on each side; of the others only the number
  ROW = 34,
  BOX = 220,
  GAP = 60;

/** The jobs that this one waits for, itself, and the jobs that wait for it, from left to right. */
function Family({ job, dependencies }) {
  const sides = [dependencies.parents, [{ ...job, status: "", condition: "" }], dependencies.children].map((side) => ({ jobs: side.slice(0, SHOWN), more: side.length - SHOWN }));
  const rows = Math.max(...sides.map(({ jobs, more }) => jobs.length + (more > 0)));
  const height = rows * ROW,
    middle = height / 2;
  const top = (side, at) => middle + (at - (sides[side].jobs.length + (sides[side].more > 0) - 1) / 2) * ROW;
  const left = (side) => side * (BOX + GAP);
  const lines = [0, 2].flatMap((side) =>
    sides[side].jobs.map((one, at) => {
      const [x1, y1, x2, y2] = side ? [left(1) + BOX, middle, left(2), top(2, at)] : [BOX, top(0, at), left(1), middle];
      return html`<path key=${`${side}${one.job_id}`} d=${`M${x1},${y1}C${x1 + GAP / 2},${y1} ${x2 - GAP / 2},${y2} ${x2},${y2}`} fill="none" stroke="currentColor" stroke-opacity=${one.status === "open" ? 0.8 : 0.3} stroke-dasharray=${one.status === "void" ? "3 3" : ""} />`;
    }),
  );
  const boxes = sides.flatMap(({ jobs, more }, side) => [
    ...jobs.map((one, at) => html`<foreignObject key=${one.job_id} x=${left(side)} y=${top(side, at) - ROW / 2} width=${BOX} height=${ROW}><a class="plain" href=${relativeOf(one)} title=${`${one.title}${one.condition ? `, ${one.condition}: ${one.status}` : ""}`} style=${{ display: "block", overflow: "hidden", whiteSpace: "nowrap", textOverflow: "ellipsis", lineHeight: `${ROW}px` }}><${State} state=${one.state} /> ${one.title}</a></foreignObject>`),
    more > 0 ? html`<text key=${`more${side}`} x=${left(side)} y=${top(side, jobs.length) + 4} fill="currentColor">and ${more} more</text>` : null,
  ]);
  return html`<${Relatives} sides=${sides} />
    <div class="family" tabindex="0" role="group" aria-label="Jobs before and after this one"><svg width=${3 * BOX + 2 * GAP} height=${height} aria-hidden="false">${lines}${boxes}</svg></div>`;
}

/** The same as two lists, where the window has no room for three columns. */
const Relatives = ({ sides }) =>
  html`<div class="relatives">${[
    ["Waits for", sides[0]],
    ["Others wait for it", sides[2]],
  ].map(([title, { jobs, more }]) => jobs.length > 0 && html`<h3>${title}</h3><ul>${jobs.map((one) => html`<li key=${one.job_id}><a class="plain" href=${relativeOf(one)}><${State} state=${one.state} /> ${one.title}</a></li>`)}${more > 0 && html`<li class="muted">and ${more} more</li>`}</ul>`)}</div>`;

const Json = ({ value }) => html`<pre class="json" tabindex="0">${json(value)}</pre>`;

function Priority({ job }) {
  const set = async (priority) => {
    try {
      await post(`queue/jobs/${job.job_id}/edit`, { priority: Number(priority) });
      toast("Priority changed.");
    } catch (error) {
      toast(error.message, "bad");
      return false;
    }
  };
  return html`<label class="inline may-submit">Priority <${Field} type="number" min="1" max="100" required value=${job.priority} onCommit=${set} /></label>`;
}

function RunWhen({ job }) {
  const set = async (select) => {
    try {
      await post(`queue/jobs/${job.job_id}/edit`, { run_when: select.value });
      toast("Load changed.");
    } catch (error) {
      toast(error.message, "bad");
      select.value = job.run_when;
    }
  };
  return html`<label class="inline may-submit">Run when <select value=${job.run_when} onChange=${(e) => set(e.target)}>${["any", "normal", "quiet"].map((load) => html`<option key=${load}>${load}</option>`)}</select></label>`;
}

// The timeline of a job: the times in which it was queued, reserved and running.
function Timeline({ job, events }) {
  if (!events.length) return null;
  const moves = events.filter((e) => e.state);
  const end = job.ended_at ? Date.parse(job.ended_at) : now.value;
  const stretches = [];
  moves.forEach((e, i) => {
    const from = Date.parse(e.at),
      to = i + 1 < moves.length ? Date.parse(moves[i + 1].at) : end;
    const last = stretches[stretches.length - 1];
    if (last && last.state === e.state) last.to = Math.max(to, from);
    else stretches.push({ state: e.state, from, to: Math.max(to, from) });
  });
  const shown = stretches.filter((s) => ["QUEUED", "DISPATCHING", "RUNNING"].includes(s.state));
  const begin = Date.parse(events[0].at),
    whole = Math.max(1, end - begin);
  const total = (state) => shown.filter((s) => s.state === state).reduce((all, s) => all + s.to - s.from, 0) / 1000;
  return html`<svg class="timeline" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img" aria-label="Where the time went">
      ${shown.map((s) => html`<rect data-state=${s.state} x=${((s.from - begin) / whole) * 1000} width=${Math.max(2, ((s.to - s.from) / whole) * 1000)} y="3" height="20" rx="2"><title>${`${s.state} ${span((s.to - s.from) / 1000)}`}</title></rect>`)}
    </svg>
    <div class="row muted"><span title=${ZONE}>${moment(events[0].at)}</span><span class="grow"></span><span title=${ZONE}>${job.ended_at ? moment(job.ended_at) : "now"}</span></div>
    <div class="row wrap muted"><span><i class="dot" data-state="QUEUED"></i> queued ${span(total("QUEUED"))}</span>${total("DISPATCHING") > 0 && html`<span><i class="dot" data-state="DISPATCHING"></i> reserved ${span(total("DISPATCHING"))}</span>`}<span><i class="dot" data-state="RUNNING"></i> running ${span(total("RUNNING"))}</span><span class="grow"></span><span>times in ${ZONE}</span></div>`;
}

function Attempts({ events }) {
  const attempts = new Map();
  for (const e of events) {
    if (!e.dispatch_id) continue;
    const one = attempts.get(e.dispatch_id) || { id: e.dispatch_id, from: e.at, worker: "" };
    if (e.kind === "RUNNING") {
      one.ran = e.at;
      one.worker = e.data.worker || "";
    }
    if (["DONE", "FAILED", "REQUEUED", "CANCELED", "BLOCKED"].includes(e.kind)) {
      one.to = e.at;
      one.end = e.reason || e.kind;
      one.error = e.data.error;
    }
    attempts.set(e.dispatch_id, one);
  }
  if (!attempts.size) return html`<${Empty}>It has not been started yet.<//>`;
  return html`<div class="scroll"><table><thead><tr><th>#</th><th>Started</th><th>Took</th><th>Worker</th><th>Ended</th></tr></thead><tbody>${[
    ...attempts.values(),
  ].map(
    (one) => html`<tr key=${one.id}>
    <td>${one.id.split(".").pop()}</td><td>${clock(one.ran || one.from)}</td><td>${span(((one.to ? Date.parse(one.to) : now.value) - Date.parse(one.ran || one.from)) / 1000)}</td><td>${one.worker || short(one.id)}</td><td>${(one.end || "running").replaceAll("_", " ")}</td></tr>${one.error && html`<tr key=${`${one.id} error`} class="attempt-error"><td></td><td colspan="4"><pre class="error" tabindex="0">${one.error}</pre></td></tr>`}`,
  )}</tbody></table></div>`;
}

async function allEvents(id, signal) {
  const page = await get(`events?job_id=${id}&limit=500`, { signal });
  return page.events;
}
