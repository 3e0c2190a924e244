import { html, useEffect, useState } from "../html.js";
import { get, post } from "../api.js";
import { useWatched, watching } from "../live.js";
import { Card, Empty, Failed, JobLink, State, When, confirm, toast } from "../parts.js";
import { count, percent } from "../format.js";

// The batches and their progress.
export function Batches() {
  const { answer, problem } = useWatched(
    () => get("batches"),
    () => true,
  );
  if (!answer) return problem ? html`<${Failed} problem=${problem} />` : html`<${Empty}>Loading…<//>`;
  return html`<${Failed} problem=${problem} /><${Card} title="Batches" wide>
    ${
      answer.batches.length
        ? html`<div class="scroll"><table class="cards"><thead><tr><th>Batch</th><th>Progress</th><th>Submitted</th></tr></thead>
      <tbody>${answer.batches.map(
        (b) => html`<tr key=${b.name}><td class="whole"><a href=${placeOf(b.name)}>${b.name}</a> <${Standing} batch=${b} /><span class="muted one-line">${b.addon_id}</span> <${Actions} batch=${b} /></td>
        <td class="whole" data-label="Progress"><${Bar} batch=${b} /><span class="muted">${counts(b)}</span></td>
        <td data-label="Submitted"><${When} iso=${b.created_at} /></td></tr>`,
      )}</tbody></table></div>`
        : html`<${Empty}>No batches. <code>penstock batch submit nightly lines.txt</code> submits one.<//>`
    }
  <//>`;
}

const SHOWN = 100;

// One batch: its progress, its callbacks and its jobs.
export function Batch({ name }) {
  const [batch, setBatch] = useState(null),
    [jobs, setJobs] = useState([]),
    [problem, setProblem] = useState(null);
  useEffect(
    () =>
      watching(async () => {
        try {
          const [one, page] = await Promise.all([get(`batches/${encodeURIComponent(name)}`), get(`queue/jobs?${new URLSearchParams({ tag: `batch:${name}`, limit: SHOWN })}`)]);
          setBatch(one);
          setJobs(page.jobs);
          setProblem(null);
        } catch (error) {
          setProblem(error);
        }
      }),
    [name],
  );
  if (!batch) return problem ? html`<${Failed} problem=${problem} />` : html`<${Empty}>Loading…<//>`;
  return html`<${Failed} problem=${problem} />
    <${Card} title=${`Batch ${batch.name}`} wide>
      <p><${Standing} batch=${batch} /> <span class="muted">${batch.addon_id} · submitted <${When} iso=${batch.created_at} /></span></p>
      <${Bar} batch=${batch} /><p class="muted">${counts(batch)}</p>
      ${batch.open && html`<p>Open: it takes more jobs, and does not end before it is closed.</p>`}
      <p class="row"><${Actions} batch=${batch} /></p>
    <//>
    ${
      batch.callbacks.length > 0 &&
      html`<${Card} title="Callbacks" wide><ul class="plain">${batch.callbacks.map(
        (c) => html`<li key=${c.job_id}><span class="muted">${c.on === "end" ? "When all have ended" : "When the first has failed"}:</span> <${State} state=${c.state} /> <${JobLink} id=${c.job_id} /> ${c.title}</li>`,
      )}</ul><//>`
    }
    <${Card} title="Jobs" wide>${
      jobs.length
        ? html`<div class="scroll"><table class="cards"><thead><tr><th>State</th><th>Job</th><th>What</th><th>Why</th></tr></thead><tbody>${jobs.map(
            (job) => html`<tr key=${job.job_id}><td data-label="State"><${State} state=${job.state} /></td><td data-label="Job"><${JobLink} id=${job.job_id} /></td><td class="whole" data-label="What"><span class="one-line" title=${job.title}>${job.title}</span></td><td class="why whole muted" data-label=${job.why ? "Why" : undefined}>${job.why}</td></tr>`,
          )}</tbody></table></div>${batch.total > jobs.length && html`<p><a href=${`#/jobs?q=${encodeURIComponent(`batch:${name}`)}`}>All jobs of the batch</a></p>`}`
        : html`<${Empty}>${batch.total ? "Its jobs have been pruned; the counts stay." : "It has no jobs yet."}<//>`
    }<//>`;
}

export const placeOf = (name) => `#/batches/${encodeURIComponent(name)}`;

const Standing = ({ batch }) => (batch.open ? html`<span class="chip">open</span>` : html`<${State} state=${batch.state} />`);

function counts(b) {
  const words = [
    [b.failed, "failed"],
    [b.canceled, "canceled"],
    [b.live, "live"],
  ].filter(([n]) => n);
  return [`${count(b.done)} of ${count(b.total)} done`, ...words.map(([n, word]) => `${count(n)} ${word}`)].join(", ");
}

function Actions({ batch }) {
  const act = async (verb, done) => {
    try {
      await post(`batches/${encodeURIComponent(batch.name)}/${verb}`);
      toast(`Batch ${batch.name} ${done}.`);
    } catch (error) {
      toast(error.message, "bad");
    }
  };
  const cancel = async () => {
    if (await confirm("Cancel the batch?", "Its jobs that have not ended are canceled, which is final. The callback for its end runs.", "Cancel the batch")) await act("cancel", "canceled");
  };
  return html`${batch.open && html`<button class="may-submit" aria-label=${`Close batch ${batch.name}`} onClick=${() => act("close", "closed")}>Close</button>`} ${batch.state === "RUNNING" && html`<button class="may-cancel" aria-label=${`Cancel batch ${batch.name}`} onClick=${cancel}>Cancel</button>`} ${batch.failed > 0 && html`<button class="may-submit" aria-label=${`Retry the failed jobs of batch ${batch.name}`} onClick=${() => act("retry", "runs its failed jobs again")}>Retry failed</button>`}`;
}

function Bar({ batch }) {
  const part = batch.total ? (batch.total - batch.live) / batch.total : batch.state === "DONE" ? 1 : 0;
  return html`<div class="progress" role="progressbar" aria-valuenow=${Math.round(part * 100)} aria-valuemin="0" aria-valuemax="100" aria-label=${`Progress of batch ${batch.name}`}><span style=${{ width: percent(part).replace(" ", "") }}></span><b>${percent(part)}</b></div>`;
}
