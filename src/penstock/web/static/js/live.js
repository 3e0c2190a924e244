// What the server says once a second, kept as signals; and how pages ask again when something moved.
import { get, stream } from "./api.js";
import { computed, effect, signal } from "./html.js";

export const connection = signal("connecting"); // live, away, signed-out
export const frame = signal(null);
export const history = signal({ at: [], submitted: [], started: [], done: [], failed: [], queued: [], in_use: [], capacity: [], busy: [], wait_p50: [], wait_p95: [], run_p50: [], run_p95: [] });
export const activity = signal([]);
export const tickCount = signal(0);
export const now = signal(Date.now());

const KEPT = 900, SHOWN = 60;
let stop = null;

export function begin() {
  if (stop) return;
  stop = stream("pulse", {
    onState: (state) => {
      const back = connection.value === "away" && state === "live";
      connection.value = state;
      if (state === "live") loadHistory();
      if (back) tickCount.value += 1;
    },
    onEvent: (beat) => {
      frame.value = beat;
      now.value = Date.parse(beat.now);
      append(beat);
      if (beat.events.length) {
        const seen = new Set(activity.value.map((e) => e.seq));
        const fresh = beat.events.filter((e) => !seen.has(e.seq)).reverse();
        activity.value = [...fresh, ...activity.value].slice(0, SHOWN);
        tickCount.value += 1;
      } else if (beat.moved) tickCount.value += 1;
    },
  });
}

async function loadHistory() {
  try { history.value = await get("pulse/history"); } catch { /* the stream says when it is back */ }
}

function append(beat) {
  const old = history.value, next = {};
  if (old.at.length && beat.second.at <= old.at[old.at.length - 1]) return;
  for (const name of Object.keys(old)) {
    const list = old[name].slice(-KEPT + 1);
    list.push(beat.second[name] ?? null);
    next[name] = list;
  }
  history.value = next;
}

// Calls `load` now and whenever something moved, never twice at once and at most once a second.
export function watching(load) {
  let busy = false, again = false, stopped = false, timer = 0;
  const run = async () => {
    if (stopped) return;
    if (busy || document.hidden) { again = true; return; }
    busy = true;
    again = false;
    const began = performance.now();
    try { await load(); } finally {
      const rest = Math.max(0, 1000 - (performance.now() - began));
      timer = setTimeout(() => { busy = false; if (again) run(); }, rest);
    }
  };
  const shown = () => { if (!document.hidden && again) run(); };
  document.addEventListener("visibilitychange", shown);
  const quit = effect(() => { tickCount.value; run(); });
  return () => { stopped = true; quit(); clearTimeout(timer); document.removeEventListener("visibilitychange", shown); };
}

export const counts = computed(() => frame.value?.jobs || {});
