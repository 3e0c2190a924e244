import { html } from "../html.js";
import { get, post } from "../api.js";
import { useWatched } from "../live.js";
import { Card, Empty, Failed, JobLink, State, When, confirm, toast } from "../parts.js";
import { count, percent, short } from "../format.js";

// The arrays and their progress.
export function Arrays() {
  const { answer, problem } = useWatched(
    () => get("arrays"),
    () => true,
  );
  if (!answer) return problem ? html`<${Failed} problem=${problem} />` : html`<${Empty}>Loading…<//>`;
  const act = async (array, verb, done) => {
    try {
      await post(`arrays/${encodeURIComponent(array.array_id)}/${verb}`);
      toast(`Array ${short(array.array_id)} ${done}.`);
    } catch (error) {
      toast(error.message, "bad");
    }
  };
  const cancel = async (array) => {
    if (await confirm(`Cancel array ${short(array.array_id)}?`, "Its jobs that have not ended are canceled, which is final.", "Cancel the array")) await act(array, "cancel", "canceled");
  };
  return html`<${Failed} problem=${problem} /><${Card} title="Arrays" wide>
    ${
      answer.arrays.length
        ? html`<div class="scroll"><table class="cards"><thead><tr><th>Array</th><th>Progress</th><th>Running or queued</th><th>Submitted</th></tr></thead>
      <tbody>${answer.arrays.map(
        (a) => html`<tr key=${a.array_id}><td class="whole"><span class="mono">${short(a.array_id)}</span> <${State} state=${a.state} /><span class="muted one-line" title=${a.title}>${a.addon_id} · ${a.title}</span>
          ${a.state === "RUNNING" && html`<button class="may-cancel" aria-label=${`Cancel array ${short(a.array_id)}`} onClick=${() => cancel(a)}>Cancel</button>`} ${a.failed > 0 && a.state !== "CANCELED" && html`<button class="may-submit" aria-label=${`Retry the failed indices of array ${short(a.array_id)}`} onClick=${() => act(a, "retry", "runs its failed indices again")}>Retry failed</button>`}</td>
        <td class="whole" data-label="Progress"><${Bar} array=${a} /><span class="muted">${count(a.done)} of ${count(a.total)} done${a.at_once ? `, ${a.at_once} at once` : ""}${a.canceled ? `, ${count(a.canceled)} canceled` : ""}</span>
          ${a.failed > 0 && html`<div>${count(a.failed)} failed: <span class="mono">${a.failed_indices}</span></div>`}</td>
        <td class="whole" data-label="Running or queued">${a.live_jobs.slice(0, 8).map((id) => html`<span class="chip" key=${id}><${JobLink} id=${id} /></span> `)}${a.live > 8 && html`and ${count(a.live - 8)} more`}</td>
        <td data-label="Submitted"><${When} iso=${a.created_at} /></td></tr>`,
      )}</tbody></table></div>`
        : html`<${Empty}>No arrays. <code>penstock submit --array 1-100%8 -- ./step.sh</code> submits one.<//>`
    }
  <//>`;
}

function Bar({ array }) {
  const part = (array.done + array.failed + array.canceled) / array.total;
  return html`<div class="progress" role="progressbar" aria-valuenow=${Math.round(part * 100)} aria-valuemin="0" aria-valuemax="100" aria-label=${`Progress of array ${short(array.array_id)}`}><span style=${{ width: percent(part).replace(" ", "") }}></span><b>${percent(part)}</b></div>`;
}
