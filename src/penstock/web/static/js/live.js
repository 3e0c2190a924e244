// The live stats of the server, one frame a second, kept as signals; and reloading pages after changes.
import { connection, get, hasSession, stream } from "./api.js";
import { computed, effect, signal, untracked, useEffect, useState } from "./html.js";

export const frame = signal(null);
export const history = signal({
  at: [],
  submitted: [],
  started: [],
  done: [],
  failed: [],
  queued: [],
  in_use: [],
  capacity: [],
  busy: [],
  wait_p50: [],
  wait_p95: [],
  attempt_p50: [],
  attempt_p95: [],
});
// Done jobs of the last minute, whatever range the charts show.
export const recentDone = signal([]);
export const activity = signal([]);
export const tickCount = signal(0);
export const now = signal(Date.now());

const KEPT = 900,
  SHOWN = 60;

export function begin() {
  if (!hasSession()) {
    connection.value = "signed-out";
    return;
  }
  stream("stats/stream", {
    onState: (state) => {
      const back = connection.value === "away" && state === "live";
      connection.value = state;
      if (state === "live") {
        loadHistory();
        loadRights();
      }
      if (back) tickCount.value += 1;
    },
    onEvent: (live) => {
      frame.value = live;
      now.value = Date.parse(live.now);
      recentDone.value = [...recentDone.value, live.second.done].slice(-60);
      append(live);
      if (live.events.length) {
        show(live.events, live.names);
        tickCount.value += 1;
      }
    },
  });
}

// A button is shown only to a session that has the right to use it: app.css reads these two attributes. Until they are set the
// page is read-only. The server checks each request anyway.
async function loadRights() {
  const { scopes } = await get("health");
  const rights = { submit: "jobs:submit:registered", cancel: "jobs:cancel", config: "admin:config" };
  const may = Object.keys(rights).filter((right) => scopes.includes(rights[right]));
  document.documentElement.dataset.may = may.join(" ");
  document.documentElement.toggleAttribute("data-read-only", !may.length);
}

// The time ranges of the charts, in seconds. Up to a quarter of an hour they are updated every second, else reloaded once a minute.
export const RANGES = [
  [900, "15 min"],
  [3_600, "1 h"],
  [21_600, "6 h"],
  [86_400, "24 h"],
  [604_800, "7 days"],
];
const BY_SECOND = 900;
export const range = signal(Number(localStorage.getItem("range")) || BY_SECOND);
export function setRange(seconds) {
  range.value = seconds;
  localStorage.setItem("range", String(seconds));
  loadRange();
}
async function loadRange() {
  const asked = range.value;
  const past = await get(`stats/history?range_sec=${asked}`);
  if (asked !== range.value) return;
  history.value = past;
  if (asked === BY_SECOND && !recentDone.value.length) recentDone.value = past.done.slice(-60);
}
setInterval(() => {
  if (connection.value === "live" && range.value > BY_SECOND && !document.hidden) loadRange().catch(() => {});
}, 60_000);

// Loads the figures from before the page was opened, or from while the scheduler was away.
async function loadHistory() {
  try {
    const [, { newest_event: newest }] = await Promise.all([loadRange(), get("stats")]);
    const [{ events }, { jobs }] = await Promise.all([
      get(`events?after=${Math.max(0, newest - SHOWN)}&limit=${SHOWN}`),
      get(`queue/jobs?newest_first=true&limit=${SHOWN}`),
    ]);
    show(events, Object.fromEntries(jobs.map((job) => [job.job_id, [job.addon_id, job.title]])));
  } catch {
    /* the stream says when it is back */
  }
}

function show(events, names) {
  const seen = new Set(activity.value.map((e) => e.seq));
  const fresh = events.filter((e) => !seen.has(e.seq)).map((e) => ({ ...e, name: (names[e.job_id] || []).join(" · ") }));
  activity.value = [...fresh, ...activity.value].sort((a, b) => b.seq - a.seq).slice(0, SHOWN);
}

function append(live) {
  if (range.value > BY_SECOND) return;
  const old = history.value,
    next = {};
  if (old.at.length && live.second.at <= old.at[old.at.length - 1]) return;
  for (const name of Object.keys(old)) {
    const list = old[name].slice(-KEPT + 1);
    list.push(live.second[name] ?? null);
    next[name] = list;
  }
  history.value = next;
}

// Calls `load` now and after changes, never twice at once and at most once a second. `restless`: whether to call it every second
// anyway, because the shown values change without events (progress, gauges).
export function watching(load, restless = () => false) {
  let busy = false,
    again = false,
    stopped = false,
    timer = 0;
  const run = async () => {
    if (stopped) return;
    if (busy || document.hidden) {
      again = true;
      return;
    }
    busy = true;
    again = false;
    const began = performance.now();
    try {
      await load();
    } finally {
      const rest = Math.max(0, 1000 - (performance.now() - began));
      timer = setTimeout(() => {
        busy = false;
        if (again) run();
      }, rest);
    }
  };
  const shown = () => {
    if (!document.hidden && again) run();
  };
  document.addEventListener("visibilitychange", shown);
  let moved = null;
  const quit = effect(() => {
    frame.value;
    if (moved === tickCount.value && !restless()) return;
    moved = tickCount.value;
    untracked(run);
  });
  return () => {
    stopped = true;
    quit();
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", shown);
  };
}

export const counts = computed(() => frame.value?.jobs || {});

// The last result of `load`, reloaded after changes, and the error since. The old result stays while the server is away.
export function useWatched(load, restless) {
  const [seen, setSeen] = useState({ answer: null, problem: null });
  useEffect(
    () =>
      watching(async () => {
        try {
          const answer = await load();
          setSeen({ answer, problem: null });
        } catch (problem) {
          setSeen(({ answer }) => ({ answer, problem }));
        }
      }, restless),
    [],
  );
  return seen;
}
