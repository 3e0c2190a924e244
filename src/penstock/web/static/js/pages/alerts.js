import { html } from "../html.js";
import { get } from "../api.js";
import { useWatched } from "../live.js";
import { Card, Empty, Failed, JobLink, When } from "../parts.js";

export function Alerts() {
  const { answer, problem } = useWatched(() => get("alerts"));
  if (!answer) return problem ? html`<${Failed} problem=${problem} />` : html`<${Empty}>Loading…<//>`;
  return html`<${Failed} problem=${problem} /><${Card} title="Alerts" wide>
    ${
      answer.alerts.length
        ? html`<div class="scroll"><table class="cards"><thead><tr><th>When</th><th>Alert</th><th>Addon</th><th>Job</th><th>What happened</th></tr></thead>
      <tbody>${answer.alerts.map(
        (a) => html`<tr key=${a.seq}><td data-label="When"><${When} iso=${a.at} /></td><td data-label="Alert">${a.kind.replaceAll("_", " ")}</td>
        <td data-label="Addon">${a.addon_id || "–"}</td><td data-label="Job">${a.job_id ? html`<${JobLink} id=${a.job_id} />` : "–"}</td><td class="whole">${a.text}</td></tr>`,
      )}</tbody></table></div>`
        : html`<${Empty}>No alerts. A limit that is reached, a job that runs too long and the like appear here, and go to the owner.<//>`
    }
  <//>`;
}
