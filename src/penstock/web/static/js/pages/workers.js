import { html } from "../html.js";
import { get } from "../api.js";
import { useWatched } from "../live.js";
import { Card, Empty, Failed, JobLink, When } from "../parts.js";
import { count } from "../format.js";

// A worker is known by the name that it gives with its claims. What it runs, and since when.
export function Workers() {
  const { answer, problem } = useWatched(
    () => get("leases?limit=500"),
    () => true,
  );
  if (!answer) return problem ? html`<${Failed} problem=${problem} />` : html`<${Empty}>Loading…<//>`;
  const workers = new Map();
  for (const lease of answer.leases) {
    const name = lease.worker || "(no name)";
    const key = `${name} ${lease.host}`;
    const one = workers.get(key) || { key, name, host: lease.host, leases: [], units: 0 };
    one.leases.push(lease);
    one.units += lease.cost_units;
    workers.set(key, one);
  }
  return html`<${Failed} problem=${problem} /><${Card} title="Workers" wide>
    ${
      workers.size
        ? html`<div class="scroll"><table class="cards"><thead><tr><th>Worker</th><th>Host</th><th class="n">Jobs</th><th class="n">Units</th><th>Runs</th></tr></thead>
      <tbody>${[...workers.values()].map(
        (w) => html`<tr key=${w.key}><td class="whole">${w.name}</td><td data-label="Host">${w.host}</td><td class="n" data-label="Jobs">${count(w.leases.length)}</td><td class="n" data-label="Units">${w.units}</td>
        <td class="whole runs">${w.leases.slice(0, 8).map((l) => html`<span class="chip" key=${l.lease_id}>${l.job_id ? html`<${JobLink} id=${l.job_id} />` : "lease without a job"} <span class="one-line" title=${l.title}>${l.title || l.job_type}</span> <${When} iso=${l.started_at || l.admitted_at} /></span> `)}${w.leases.length > 8 && html`and ${w.leases.length - 8} more`}</td></tr>`,
      )}</tbody></table></div>`
        : html`<${Empty}>No worker runs a job now. <code>penstock run echo hello</code> gives the scheduler's own runner one.<//>`
    }
  <//>`;
}
