// All requests to the server. Each has the second half of the session in a header, which no other site can set.
import { signal } from "./html.js";

export const PREFIX = "/api/system/scheduler";

export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `the server answered ${status}`);
    this.status = status;
    this.hint = body.hint || "";
    this.problems = body.problems || [];
  }
}

export const connection = signal("connecting"); // live, away, signed-out

// The second half of the session stays in this tab. A new tab asks the other tabs for it. A new sign-in sends its half to all tabs,
// because they share the cookie.
const HALF = "penstock-session";
const tabs = new BroadcastChannel(HALF);
const session = () => sessionStorage.getItem(HALF) || "";
export const hasSession = () => session() !== "";
export function keepSession(half) {
  sessionStorage.setItem(HALF, half);
  tabs.postMessage({ half });
}

// The server refused this half. The session is over, unless another tab has sent a new half meanwhile.
function refused(half) {
  if (half !== session()) return false;
  sessionStorage.removeItem(HALF);
  connection.value = "signed-out";
  return true;
}

let onSession = () => {};
tabs.onmessage = ({ data }) => {
  if (data.half) {
    sessionStorage.setItem(HALF, data.half);
    onSession();
    if (connection.value === "signed-out") location.reload();
  } else if (hasSession()) tabs.postMessage({ half: session() });
};

export const askOtherTabs = () =>
  new Promise((resolve) => {
    onSession = resolve;
    tabs.postMessage({});
    setTimeout(resolve, 300);
  });

export async function call(method, path, body, { signal } = {}) {
  const half = session();
  const headers = { Accept: "application/json", "X-Penstock-Session": half };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path.startsWith("/") ? path : `${PREFIX}/${path}`, {
      method,
      headers,
      signal,
      credentials: "same-origin",
      cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, { detail: "The scheduler does not answer.", hint: "Is it running? penstock up" });
  }
  if (answer.ok) return answer.json();
  if (answer.status === 401) refused(half);
  let problem = {};
  try {
    problem = await answer.json();
  } catch {
    /* not ours: a proxy's page */
  }
  throw new Problem(answer.status, problem);
}

export const get = (path, options) => call("GET", path, undefined, options);
export const post = (path, body = {}, options) => call("POST", path, body, options);

// Runs an action for each item, a few at a time: the server limits the open requests of a session.
export async function eachLimited(items, work, width = 8) {
  const results = new Array(items.length);
  let next = 0;
  const lane = async () => {
    while (next < items.length) {
      const at = next++;
      try {
        results[at] = { value: await work(items[at]) };
      } catch (error) {
        results[at] = { error };
      }
    }
  };
  await Promise.all(Array.from({ length: Math.min(width, items.length) }, lane));
  return results;
}

// Server-sent events over fetch, because EventSource cannot send a header. Continues after the last received id.
export function stream(path, { onEvent, onState }) {
  let stopped = false,
    last = "",
    wait = 500,
    aborter;
  const run = async () => {
    while (!stopped) {
      aborter = new AbortController();
      try {
        const half = session();
        const headers = { Accept: "text/event-stream", "X-Penstock-Session": half };
        if (last) headers["Last-Event-ID"] = last;
        const answer = await fetch(`${PREFIX}/${path}`, {
          headers,
          signal: aborter.signal,
          credentials: "same-origin",
          cache: "no-store",
        });
        if (answer.status === 401 && refused(half)) return;
        if (!answer.ok) throw new Error(answer.statusText);
        onState("live");
        wait = 500;
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        let rest = "";
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
          const parts = (rest + value).split(/\r?\n\r?\n/);
          rest = parts.pop();
          for (const part of parts) {
            const data = [];
            for (const line of part.split(/\r?\n/)) {
              if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
              else if (line.startsWith("id:")) last = line.slice(3).trim();
            }
            if (data.length) onEvent(JSON.parse(data.join("\n")));
          }
        }
      } catch (error) {
        if (stopped) return;
      }
      if (stopped) return;
      onState("away");
      await new Promise((next) => setTimeout(next, wait + Math.random() * 250));
      wait = Math.min(wait * 2, 5000);
    }
  };
  run();
  return () => {
    stopped = true;
    aborter?.abort();
  };
}
