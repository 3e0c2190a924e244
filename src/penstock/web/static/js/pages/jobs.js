import { html, useEffect, useRef, useState } from "../html.js";
import { get, eachLimited, post } from "../api.js";
import { watching } from "../live.js";
import { Submit } from "../submit.js";
import { Card, Empty, Failed, Field, JobLink, STATES, Since, State, confirm, toast } from "../parts.js";
import { count } from "../format.js";

const PAGE = 100;
const QUESTIONS = {
  cancel: ["Cancel", "A canceled job is final: it cannot be retried."],
  retry: ["Retry", "Queued again, with fresh attempts and limits."],
};

// Filters are in the address, so that a view can be bookmarked and sent.
export function Jobs({ query }) {
  const [rows, setRows] = useState(null),
    [next, setNext] = useState(null),
    [problem, setProblem] = useState(null);
  const [chosen, setChosen] = useState(new Set()),
    [totals, setTotals] = useState({}),
    [submitting, setSubmitting] = useState(false);
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
        const [page, { jobs }] = await Promise.all([
          find(filter, shown.current, aborter.signal),
          get(`queue/count?${words(filter, { state: false })}`, { signal: aborter.signal }),
        ]);
        setRows(page.jobs);
        setNext(page.next);
        setTotals(jobs);
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
    const done = await eachLimited(jobs, (job) => post(`queue/jobs/${job.job_id}/${verb}`));
    const bad = done.filter((one) => one.error);
    const good = done.length - bad.length;
    if (good) toast(`${verb === "cancel" ? "Canceled" : "Retried"} ${good === 1 ? "1 job" : `${good} jobs`}.`);
    if (bad.length) toast(`${bad.length} refused: ${bad[0].error.message}`, "bad");
    setChosen(new Set());
  };

  // Changes all jobs that match, not only those shown.
  const matching = (verb) => ABLE[verb].filter((state) => !states.size || states.has(state)).reduce((all, state) => all + (totals[state] || 0), 0);
  const allMatching = async (verb) => {
    const number = matching(verb);
    const many = number === 1 ? "1 job" : `${number} jobs`;
    const [word, means] = QUESTIONS[verb];
    if (!(await confirm(`${word} all ${many} that match?`, means, `${word} ${many}`))) return;
    try {
      const { changed, refused } = await changeAll(verb, filter);
      toast(`${verb === "cancel" ? "Canceled" : "Retried"} ${changed === 1 ? "1 job" : `${changed} jobs`}.`);
      if (refused.length) toast(`${refused.length} refused: ${refused[0].problem}`, "bad");
    } catch (error) {
      toast(error.message, "bad");
    }
  };
  const filtering = filter.state || filter.addon || filter.type || filter.q;

  return html`<${Card} title="Jobs" wide actions=${html`
      <${Search} value=${filter.q} onSearch=${(q) => set("q", q)} />
      <${Field} aria-label="Addon" placeholder="addon" value=${filter.addon} onCommit=${(addon) => set("addon", addon)} />
      <${Field} aria-label="Job type" placeholder="type" value=${filter.type} onCommit=${(type) => set("type", type)} />
      <button class="primary may-submit" onClick=${() => setSubmitting(true)}>Submit a job</button>`}>
    <div class="row wrap filters" role="group" aria-label="States">
      ${STATES.map((state) => html`<button aria-pressed=${states.has(state)} class="chip" onClick=${() => flip(state)}><${State} state=${state} /> ${count(totals[state] || 0)}</button>`)}
      ${filtering && html`<a class="chip" href="#/jobs">clear</a>`}
      ${filtering && matching("cancel") > 0 && html`<button class="chip may-cancel" onClick=${() => allMatching("cancel")}>Cancel all ${count(matching("cancel"))}</button>`}
      ${filtering && matching("retry") > 0 && html`<button class="chip may-submit" onClick=${() => allMatching("retry")}>Retry all ${count(matching("retry"))}</button>`}
    </div>
    ${
      picked.length > 0 &&
      html`<div class="row bulk" role="toolbar" aria-label="Selected jobs"><strong>${picked.length} selected</strong>
      <button class="may-cancel" disabled=${!able("cancel").length} onClick=${() => all("cancel", able("cancel"))}>Cancel ${able("cancel").length || ""}</button>
      <button class="may-submit" disabled=${!able("retry").length} onClick=${() => all("retry", able("retry"))}>Retry ${able("retry").length || ""}</button>
      <button class="quiet" onClick=${() => setChosen(new Set())}>Clear selection</button></div>`
    }
    <${Failed} problem=${problem} />
    ${rows && !rows.length && html`<${Empty}>${filtering ? "No matching jobs." : html`No jobs yet. <code>penstock submit -- echo hello</code> submits one.`}<//>`}
    ${
      rows?.length > 0 &&
      html`<div class="scroll"><table class="cards jobs">
      <thead><tr><th class="write"><input type="checkbox" aria-label="Select all shown" checked=${picked.length === rows.length} onChange=${(e) => setChosen(new Set(e.target.checked ? rows.map((job) => job.job_id) : []))} /></th>
        <th>Job</th><th>State</th><th>What</th><th>Addon</th><th class="n spare">Units</th><th class="n spare">Priority</th><th class="n spare">Attempts</th><th>Age</th><th>Why</th></tr></thead>
      <tbody>${rows.map((job) => html`<${Row} key=${job.job_id} job=${job} chosen=${chosen.has(job.job_id)} onChoose=${flipRow} />`)}</tbody>
    </table></div>
    ${next != null && (rows.length < 500 ? html`<div class="row"><button onClick=${more}>More</button></div>` : html`<p class="muted">The newest 500 are shown. A search or a filter finds older ones.</p>`)}`
    }
  <//>${submitting && html`<${Submit} onClose=${() => setSubmitting(false)} />`}`;
}

function Row({ job, chosen, onChoose }) {
  return html`<tr>
    <td class="mark write"><input type="checkbox" aria-label=${`Select ${job.job_id}`} checked=${chosen} onChange=${() => onChoose(job.job_id)} /></td>
    <td><${JobLink} id=${job.job_id} /></td><td><${State} state=${job.state} /></td>
    <td class="what whole"><a class="plain" href=${`#/jobs/${job.job_id}`} title=${job.title}>${job.title}</a></td>
    <td data-label="Addon"><a class="plain" href=${`#/jobs?addon=${encodeURIComponent(job.addon_id)}`}>${job.addon_id}</a></td>
    <td class="n spare">${job.cost_units}</td><td class="n spare">${job.priority}</td><td class="n spare">${job.attempts}</td>
    <td data-label="Age"><${Since} iso=${job.created_at} /></td><td class="why muted whole">${job.why}</td></tr>`;
}

function Search({ value, onSearch }) {
  return html`<${Field} type="search" aria-label="Search in ids, names, arguments, tags and errors" placeholder="id, name, argument or error" value=${value} onCommit=${onSearch} />`;
}

const PART_OF_AN_ID = /^[0-9a-f_-]{4,60}$/;

const ABLE = { cancel: ["QUEUED", "DISPATCHING", "RUNNING", "BLOCKED"], retry: ["FAILED", "BLOCKED"] };

// The fields of a filter, by their names in the API.
function fields(filter, { state = true } = {}) {
  const all = { state: state && filter.state, addon_id: filter.addon, job_type: filter.type, text: filter.q };
  return Object.fromEntries(Object.entries(all).filter(([, value]) => value));
}
const words = (filter, options) => new URLSearchParams(fields(filter, options));

async function changeAll(verb, filter) {
  const all = { changed: 0, refused: [], next: 0 };
  while (all.next != null) {
    const page = await post(`queue/${verb}/bulk`, { ...fields(filter), after: all.next });
    all.changed += page.changed;
    all.refused.push(...page.refused);
    all.next = page.next;
  }
  return all;
}

async function find(filter, limit, signal) {
  const asked = words(filter);
  asked.set("limit", String(Math.min(500, limit)));
  asked.set("newest_first", "true");
  const [page, byId] = await Promise.all([get(`queue/jobs?${asked}`, { signal }), filter.q ? byPart(filter, signal) : []]);
  const seen = new Set(byId.map((job) => job.job_id));
  return { jobs: [...byId, ...page.jobs.filter((job) => !seen.has(job.job_id))], next: page.next };
}

async function byPart(filter, signal) {
  const part = filter.q.toLowerCase();
  if (!PART_OF_AN_ID.test(part)) return [];
  const { job_ids: ids } = await get(`queue/find?part=${part}&limit=50`, { signal });
  const found = await eachLimited(ids, (id) => get(`queue/jobs/${id}`, { signal }));
  const fits = (job) =>
    (!filter.state || filter.state.split(",").includes(job.state)) &&
    (!filter.addon || filter.addon === job.addon_id) &&
    (!filter.type || filter.type === job.job_type);
  return found.filter((one) => one.value && fits(one.value)).map((one) => one.value);
}
