import { html } from "../html.js";
import { get, post } from "../api.js";
import { useWatched } from "../live.js";
import { Bar, Card, Empty, Failed, Field, toast } from "../parts.js";
import { count, percent } from "../format.js";

const TONES = { warned: "warn", reached: "bad" };

export function Addons() {
  const { answer, problem } = useWatched(() => get("addons"));
  const addons = answer?.addons.filter((a) => a.addon_id !== "*");
  if (!addons) return problem ? html`<${Failed} problem=${problem} />` : html`<${Empty}>Loading…<//>`;
  const active = addons.filter((a) => a.average > 0.01 || a.jobs.QUEUED || a.jobs.RUNNING);
  const weights = active.reduce((all, a) => all + a.weight, 0) || 1,
    got = addons.reduce((all, a) => all + a.average, 0);
  const edit = async (addon_id, what) => {
    try {
      await post("addons/edit", { addon_id, ...what });
      toast(`${addon_id} changed.`);
    } catch (error) {
      toast(error.message, "bad");
      return false;
    }
  };
  return html`<${Failed} problem=${problem} /><${Card} title="Addons" wide>
    <p class="muted">Target: fair share by weight. Actual: recent use. The addon furthest below its target goes first.</p>
    ${
      addons.length
        ? html`<div class="scroll"><table class="cards"><thead><tr><th>Addon</th><th>Target and actual</th><th class="n">Queued</th><th class="n">Running</th><th class="n">Done</th><th class="n">Failed</th><th class="n">Units</th><th>Spent</th><th>Weight</th><th><span class="sr">Actions</span></th></tr></thead>
      <tbody>${addons.map((a) => {
        const on = active.includes(a),
          target = on ? a.weight / weights : 0,
          actual = got ? a.average / got : 0;
        return html`<tr key=${a.addon_id}><td class="whole"><a class="plain" href=${`#/jobs?addon=${encodeURIComponent(a.addon_id)}`}>${a.addon_id}</a>${a.paused && html` <span class="state" data-tone="warn">paused</span>`}</td>
          <td class="share whole"><${Bar} whole=${1} label=${`target ${Math.round(target * 100)} %`} parts=${[{ value: target, tone: "muted", label: "target" }]} /><${Bar} whole=${1} label=${`actual ${Math.round(actual * 100)} %`} parts=${[{ value: actual, tone: "accent", label: "actual" }]} /><span class="muted">target ${Math.round(target * 100)} %, actual ${Math.round(actual * 100)} %</span></td>
          <td class="n" data-label="Queued">${count(a.jobs.QUEUED || 0)}</td><td class="n" data-label="Running">${count(a.jobs.RUNNING || 0)}</td><td class="n" data-label="Done">${count(a.jobs.DONE || 0)}</td><td class="n" data-label="Failed">${count((a.jobs.FAILED || 0) + (a.jobs.BLOCKED || 0))}</td><td class="n" data-label="Units">${a.units}</td>
          <td class="whole" data-label="Spent">${a.budgets.length ? a.budgets.map((use) => html`<${Budget} key=${use.window} addon=${a.addon_id} use=${use} />`) : html`<span class="muted">–</span>`}</td>
          <td class="half" data-label="Weight"><span class="may-not-config">${a.weight}</span><${Field} class="may-config" type="number" min="1" max="10000" required aria-label=${`Weight of ${a.addon_id}`} value=${a.weight} onCommit=${(weight) => edit(a.addon_id, { weight: Number(weight) })} /></td>
          <td class="half last"><button class="may-config" onClick=${() => edit(a.addon_id, { paused: !a.paused })}>${a.paused ? "Resume" : "Pause"}</button></td></tr>`;
      })}</tbody></table></div>`
        : html`<${Empty}>No addon has submitted anything yet.<//>`
    }<//>`;
}

// The spent part of a budget, with a tick at which the owner is warned.
function Budget({ addon, use }) {
  const tone = TONES[use.mark] || "good";
  const words = `${addon} spent ${amount(use.spent)} ${use.limit == null ? "" : `of ${amount(use.limit)} `}this ${use.window}`;
  return html`<div class="use" title=${`${use.name}, until ${new Date(use.ends_at).toLocaleString([], { hour12: false })}`}><span class="muted">${use.window}</span>
    ${use.limit == null ? html`<span class="muted">no limit</span>` : html`<span class="limit"><${Bar} whole=${use.limit} label=${words} parts=${[{ value: use.spent, tone, label: percent(use.spent / use.limit) }]} /></span>`}
    <b data-tone=${use.mark ? tone : ""}>${amount(use.spent)}${use.limit == null ? "" : html`<span class="muted"> / ${amount(use.limit)}</span>`}</b></div>`;
}

const amount = (money) => (money && money < 0.01 ? money.toPrecision(2) : money.toFixed(2));
