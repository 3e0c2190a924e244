import { html, useEffect, useRef, useState } from "../html.js";
import { get, inTurns, post } from "../api.js";
import { counts, watching } from "../live.js";
import { Card, Empty, Failed, Field, JobLink, STATES, Since, State, confirm, toast } from "../parts.js";
import { count, moment, percent } from "../format.js";

const PAGE = 100;
const QUESTIONS = {
  cancel: ["Cancel", "A canceled job is final: it cannot be retried."],
  retry: ["Retry", "Queued again, with fresh attempts and limits."],
};

// Filters live in the address, so that a view can be kept and sent.
export function Jobs({ query }) {
  const [rows, setRows] = useState(null),
    [next, setNext] = useState(null),
    [problem, setProblem] = useState(null);
  const [chosen, setChosen] = useState(new Set());
  const shown = useRef(PAGE);
  const filter = {
    state: query.get("state") || "",
    addon: query.get("addon") || "",
    type: query.get("type") || "",
    q: query.get("q") || "",
  };
  const key = JSON.stringify(filter);

  useEffect(() => {
    setRows(null);
    setChosen(new Set());
    shown.current = PAGE;
    const aborter = new AbortController();
    const load = async () => {
      try {
        const page = await find(filter, shown.current, aborter.signal);
        setRows(page.jobs);
        setNext(page.next);
        setProblem(null);
      } catch (error) {
        if (error.name !== "AbortError") setProblem(error);
      }
    };
    const quit = watching(load);
    return () => {
      quit();
      aborter.abort();
    };
  }, [key]);

  const more = async () => {
    shown.current = Math.min(500, shown.current + PAGE);
    const page = await find(filter, shown.current);
    setRows(page.jobs);
    setNext(page.next);
  };
  const set = (name, value) => {
    const to = new URLSearchParams(query);
    if (value) to.set(name, value);
    else to.delete(name);
    location.hash = `#/jobs${String(to) ? `?${to}` : ""}`;
  };
  const states = new Set(filter.state.split(",").filter(Boolean));
  const flip = (state) => {
    states.has(state) ? states.delete(state) : states.add(state);
    set("state", [...states].join(","));
  };
  const flipRow = (id) => {
    const to = new Set(chosen);
    to.has(id) ? to.delete(id) : to.add(id);
    setChosen(to);
  };
  const picked = (rows || []).filter((job) => chosen.has(job.job_id));
  const able = (verb) => picked.filter((job) => job.allowed.includes(verb));

  const all = async (verb, jobs) => {
    const many = jobs.length === 1 ? "1 job" : `${jobs.length} jobs`;
    const [word, means] = QUESTIONS[verb];
    if (!(await confirm(`${word} ${many}?`, means, `${word} ${many}`))) return;
    const done = await inTurns(jobs, (job) => post(`queue/jobs/${job.job_id}/${verb}`));
    const bad = done.filter((one) => one.error);
    const good = done.length - bad.length;
    if (good) toast(`${verb === "cancel" ? "Canceled" : "Retried"} ${good === 1 ? "1 job" : `${good} jobs`}.`);
    if (bad.length) toast(`${bad.length} refused: ${bad[0].error.message}`, "bad");
    setChosen(new Set());
  };

  return html`<${Card} title="Jobs" wide actions=${html`
      <${Search} value=${filter.q} onSearch=${(q) => set("q", q)} />
      <${Field} aria-label="Addon" placeholder="addon" value=${filter.addon} onCommit=${(addon) => set("addon", addon)} />
      <${Field} aria-label="Job type" placeholder="type" value=${filter.type} onCommit=${(type) => set("type", type)} />`}>
    <div class="row wrap filters" role="group" aria-label="States">
      ${STATES.map((state) => html`<button aria-pressed=${states.has(state)} class="chip" onClick=${() => flip(state)}><${State} state=${state} /> ${count(counts.value[state] || 0)}</button>`)}
      ${(filter.state || filter.addon || filter.type || filter.q) && html`<a class="chip" href="#/jobs">clear</a>`}
    </div>
    ${
      picked.length > 0 &&
      html`<div class="row bulk" role="toolbar" aria-label="Selected jobs"><strong>${picked.length} chosen</strong>
      <button disabled=${!able("cancel").length} onClick=${() => all("cancel", able("cancel"))}>Cancel ${able("cancel").length || ""}</button>
      <button disabled=${!able("retry").length} onClick=${() => all("retry", able("retry"))}>Retry ${able("retry").length || ""}</button>
      <button class="quiet" onClick=${() => setChosen(new Set())}>Clear selection</button></div>`
    }
    <${Failed} problem=${problem} />
    ${rows && !rows.length && html`<${Empty}>No matching jobs.<//>`}
    ${
      rows?.length > 0 &&
      html`<div class="scroll"><table>
      <thead><tr><th><input type="checkbox" aria-label="Select all shown" checked=${picked.length === rows.length} onChange=${(e) => setChosen(new Set(e.target.checked ? rows.map((job) => job.job_id) : []))} /></th>
        <th>Job</th><th>State</th><th>Addon</th><th class="spare">Type</th><th class="n spare">Units</th><th class="n spare">Priority</th><th class="n spare">Attempts</th><th>Age</th><th>Reason or progress</th></tr></thead>
      <tbody>${rows.map((job) => html`<${Row} key=${job.job_id} job=${job} chosen=${chosen.has(job.job_id)} onChoose=${flipRow} />`)}</tbody>
    </table></div>
    ${next != null && rows.length < 500 && html`<div class="row"><button onClick=${more}>More</button></div>`}`
    }
  <//>`;
}

function Row({ job, chosen, onChoose }) {
  return html`<tr>
    <td><input type="checkbox" aria-label=${`Choose ${job.job_id}`} checked=${chosen} onChange=${() => onChoose(job.job_id)} /></td>
    <td><${JobLink} id=${job.job_id} /></td><td><${State} state=${job.state} /></td>
    <td><a class="plain" href=${`#/jobs?addon=${encodeURIComponent(job.addon_id)}`}>${job.addon_id}</a></td><td class="spare">${job.job_type}</td>
    <td class="n spare">${job.cost_units}</td><td class="n spare">${job.priority}</td><td class="n spare">${job.attempts}</td>
    <td><${Since} iso=${job.created_at} /></td><td class="muted">${standing(job)}</td></tr>`;
}

// Why it waits, or how far it has come, in a word or two.
function standing(job) {
  if (job.state === "RUNNING") return percent(job.progress);
  if (job.state !== "QUEUED") return "";
  const start = job.next_earliest_start_at;
  return start && new Date(start) > new Date() ? `not before ${moment(start)}` : job.denied.replaceAll("_", " ");
}

function Search({ value, onSearch }) {
  return html`<${Field} type="search" aria-label="Search by id or tag" placeholder="part of an id, or a tag" value=${value} onCommit=${onSearch} />`;
}

const PART_OF_AN_ID = /^[0-9a-f-]{4,36}$/;

async function find(filter, limit, signal) {
  const asked = new URLSearchParams({ limit: String(Math.min(500, limit)), newest_first: "true" });
  for (const [name, value] of [
    ["state", filter.state],
    ["addon_id", filter.addon],
    ["job_type", filter.type],
    ["tag", filter.q],
  ]) {
    if (value) asked.set(name, value);
  }
  const [page, byId] = await Promise.all([get(`queue/jobs?${asked}`, { signal }), filter.q ? byPart(filter, signal) : []]);
  return { jobs: [...byId, ...page.jobs], next: page.next };
}

async function byPart(filter, signal) {
  const part = filter.q.toLowerCase();
  if (!PART_OF_AN_ID.test(part)) return [];
  const { job_ids: ids } = await get(`queue/find?part=${part}&limit=50`, { signal });
  const found = await inTurns(ids, (id) => get(`queue/jobs/${id}`, { signal }));
  const fits = (job) =>
    (!filter.state || filter.state.split(",").includes(job.state)) &&
    (!filter.addon || filter.addon === job.addon_id) &&
    (!filter.type || filter.type === job.job_type);
  return found.filter((one) => one.value && fits(one.value)).map((one) => one.value);
}
