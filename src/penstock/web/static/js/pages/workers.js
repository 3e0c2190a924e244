import { html } from "../html.js";
import { get } from "../api.js";
import { useWatched } from "../live.js";
import { Card, Empty, Failed, JobLink, Since } from "../parts.js";
import { count } from "../format.js";

// The workers, by the name in their claims: their jobs, and how many more each can take.
export function Workers() {
  const { answer, problem } = useWatched(
    () => get("leases?limit=500"),
    () => true,
  );
  if (!answer) return problem ? html`<${Failed} problem=${problem} />` : html`<${Empty}>Loading…<//>`;
  const workers = new Map();
  const known = (name, host) => {
    const key = `${name} ${host}`;
    if (!workers.has(key)) workers.set(key, { key, name: name || "(no name)", host, leases: [], units: 0, takes: "" });
    return workers.get(key);
  };
  for (const lease of answer.leases) {
    const one = known(lease.worker, lease.host);
    one.leases.push(lease);
    one.units += lease.cost_units;
  }
  for (const free of answer.free_workers) {
    const jobs = [free.job_types.join(", "), free.addon_id && `of ${free.addon_id}`].filter(Boolean).join(" ");
    known(free.worker, free.host).takes = `${count(free.free)} more${jobs && `: ${jobs}`}`;
  }
  return html`<${Failed} problem=${problem} /><${Card} title="Workers" wide>
    ${
      workers.size
        ? html`<div class="scroll"><table class="cards"><thead><tr><th>Worker</th><th>Host</th><th class="n">Jobs</th><th class="n">Units</th><th>Running</th><th>Can take</th></tr></thead>
      <tbody>${[...workers.values()].map(
        (w) => html`<tr key=${w.key}><td class="whole">${w.name}</td><td data-label="Host">${w.host}</td><td class="n" data-label="Jobs">${count(w.leases.length)}</td><td class="n" data-label="Units">${w.units}</td>
        <td class="whole runs">${w.leases.slice(0, 8).map((l) => html`<span class="chip" key=${l.lease_id}>${l.job_id ? html`<${JobLink} id=${l.job_id} />` : "lease without a job"} <span class="one-line" title=${l.title}>${l.title || l.job_type}</span> <${Since} iso=${l.started_at || l.admitted_at} /></span> `)}${w.leases.length > 8 && html`and ${w.leases.length - 8} more`}${!w.leases.length && "idle"}</td><td class="whole" data-label="Can take">${w.takes || "no more"}</td></tr>`,
      )}</tbody></table></div>`
        : html`<${Empty}>No worker runs a job, and none waits for one. <code>penstock run echo hello</code> gives the scheduler's own runner one.<//>`
    }
  <//>`;
}
