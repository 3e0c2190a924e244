import { html } from "../html.js";
import { get, post } from "../api.js";
import { useWatched } from "../live.js";
import { Card, Empty, Failed, JobLink, State, When, toast } from "../parts.js";
import { short, span } from "../format.js";

// The schedules with their next and last moments, in the time zone of each.
export function Schedules() {
  const { answer, problem } = useWatched(
    () => get("schedules"),
    () => true,
  );
  if (!answer) return problem ? html`<${Failed} problem=${problem} />` : html`<${Empty}>Loading…<//>`;
  const act = async (name, verb, done) => {
    try {
      toast(done(await post(`schedules/${encodeURIComponent(name)}/${verb}`)));
    } catch (error) {
      toast(error.message, "bad");
    }
  };
  return html`<${Failed} problem=${problem} /><${Card} title="Schedules" wide>
    ${
      answer.schedules.length
        ? html`<div class="scroll"><table class="cards"><thead><tr><th>Schedule</th><th>When</th><th>Next</th><th>Last jobs</th></tr></thead>
      <tbody>${answer.schedules.map(
        (s) => html`<tr key=${s.name}><td class="whole"><a class="plain" href=${`#/jobs?q=${encodeURIComponent(`schedule:${s.name}`)}`}>${s.name}</a>${s.paused && html` <span class="state" data-tone="warn">paused</span>`}<span class="muted one-line" title=${s.title}>${s.addon_id} · ${s.title}</span>
          <button class="may-submit" aria-label=${`Run ${s.name} now`} onClick=${() => act(s.name, "run", (job) => `${s.name} runs now as job ${short(job.job_id)}.`)}>Run now</button> <button class="may-submit" aria-label=${`${s.paused ? "Resume" : "Pause"} ${s.name}`} onClick=${() => act(s.name, s.paused ? "resume" : "pause", () => `${s.name} ${s.paused ? "resumed" : "paused"}.`)}>${s.paused ? "Resume" : "Pause"}</button></td>
        <td class="whole" data-label="When">${times(s)}<br /><span class="muted">overlap ${s.overlap}, missed ${s.missed}</span></td>
        <td class="whole" data-label="Next"><${Next} schedule=${s} /></td>
        <td class="whole" data-label="Last jobs">${
          s.last.length
            ? s.last.slice(0, 5).map((l) => html`<div key=${l.job_id} title=${l.by ? `run by ${l.by}` : ""}>${wall(l.moment)} <${JobLink} id=${l.job_id} /> ${l.state ? html`<${State} state=${l.state} />` : html`<span class="muted">pruned</span>`}</div>`)
            : html`<span class="muted">none yet</span>`
        }</td></tr>`,
      )}</tbody></table></div>`
        : html`<${Empty}>No schedules. <code>penstock schedule add nightly --cron "0 6 * * *" -- ./report.sh</code> adds one.<//>`
    }
  <//>`;
}

function Next({ schedule }) {
  if (schedule.problem && !schedule.paused) return html`<span class="state" data-tone="bad">stuck</span> ${schedule.problem}`;
  if (schedule.waiting.length) return html`${schedule.waiting.length} waiting for the job before`;
  if (!schedule.next.length) return html`<span class="muted">${schedule.paused ? "paused" : "never again"}</span>`;
  const [first, ...more] = schedule.next;
  return html`<b>${wall(first)}</b> <span class="muted"><${When} iso=${first} /></span>
    ${more.map((moment) => html`<div class="muted" key=${moment}>${wall(moment)}</div>`)}`;
}

// A moment as the server sends it, in the time zone of the schedule.
const wall = (iso) => html`<span class="mono">${iso.slice(0, 16).replace("T", " ")}</span>`;

function times(schedule) {
  if (schedule.cron) return html`<code>${schedule.cron}</code> ${schedule.zone}`;
  return schedule.every_sec ? `every ${span(schedule.every_sec)}` : html`once, ${wall(schedule.at)} ${schedule.zone}`;
}
