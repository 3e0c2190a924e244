// The forms to submit a job (a command, or a job for an addon's worker) and to run a job again with other arguments.
import { html, useState } from "./html.js";
import { post } from "./api.js";
import { FormDialog, toast, typedJson } from "./parts.js";
import { json, short } from "./format.js";

const done = ({ job_id: id }) => {
  toast(`Submitted ${short(id)}.`);
  location.hash = `#/jobs/${id}`;
};

export function Submit({ onClose }) {
  const [kind, setKind] = useState("script");
  const send = async (given) => {
    const script = kind === "script";
    done(
      await post("queue/jobs/submit", {
        addon_id: given.addon,
        job_type: script ? "penstock.shell" : given.type,
        payload: script ? { script: given.script } : typedJson(given.payload),
        cost_units: Number(given.cost),
        priority: Number(given.priority),
        run_when: given.when,
      }),
    );
  };
  return html`<${FormDialog} title="Submit a job" verb="Submit" onSend=${send} onClose=${onClose}>
    <label>Kind <select value=${kind} onChange=${(e) => setKind(e.target.value)}><option value="script">Shell command</option><option value="type">Job for a worker</option></select></label>
    ${
      kind === "script"
        ? html`<label>Command <textarea name="script" rows="3" required placeholder="make build"></textarea></label>`
        : html`<label>Type <input name="type" required /></label><label>Payload (JSON) <textarea name="payload" rows="5"></textarea></label>`
    }
    <label>Addon <input name="addon" required defaultValue="page" value="page" /></label>
    <div class="row wrap"><label>Cost (units) <input name="cost" type="number" min="1" max="100" value="10" required /></label>
      <label>Priority <input name="priority" type="number" min="1" max="100" value="50" required /></label>
      <label>Run when <select name="when"><option value="any">at any load</option><option value="normal" selected>at normal load</option><option value="quiet">when the machine is quiet</option></select></label></div>
  <//>`;
}

export function Rerun({ job, onClose }) {
  const send = async (given) =>
    done(
      await post(`queue/jobs/${job.job_id}/rerun`, {
        payload: typedJson(given.payload),
        cost_units: Number(given.cost),
        priority: Number(given.priority),
      }),
    );
  return html`<${FormDialog} title="Run again as a new job" verb="Submit" onSend=${send} onClose=${onClose}>
    <p class="muted">A new job with the same request. This job stays as it is.</p>
    <label>Payload (JSON) <textarea name="payload" rows="8" defaultValue=${json(job.payload)}>${json(job.payload)}</textarea></label>
    <div class="row wrap"><label>Cost (units) <input name="cost" type="number" min="1" max="100" value=${job.cost_units} required /></label>
      <label>Priority <input name="priority" type="number" min="1" max="100" value=${job.priority} required /></label></div>
  <//>`;
}
