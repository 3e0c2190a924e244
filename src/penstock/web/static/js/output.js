// The live output of a command or function.
import { html, useEffect, useRef, useState } from "./html.js";
import { get } from "./api.js";
import { Card } from "./parts.js";

const KEPT = 200_000; // characters; `penstock logs` has all
const WAIT = 20; // seconds that a request waits for more output

// Terminal control codes: CSI and OSC sequences, single escapes, and other characters that do not print.
const CONTROL = /\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]/g;
// Of a line that was overwritten, such as a progress bar, only the last text is shown.
const OVERWRITTEN = /^.*\r(?!\n)/gm;
export const plain = (text) => text.replace(CONTROL, "").replace(/\r+\n/g, "\n").replace(OVERWRITTEN, "");

export function Output({ job }) {
  const [attempt, setAttempt] = useState(0), // 0: the last attempt
    [wanted, setWanted] = useState("");
  const shown = attempt || job.fence;
  const log = useLog(job.job_id, shown);
  const box = useRef(null),
    stuck = useRef(true);
  useEffect(() => {
    if (stuck.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [log]);
  const follow = (event) => {
    stuck.current = event.target.scrollHeight - event.target.scrollTop - event.target.clientHeight < 30;
  };
  const choose =
    job.fence > 1 &&
    html`<label class="inline">Attempt <select value=${shown} onChange=${(e) => setAttempt(Number(e.target.value) === job.fence ? 0 : Number(e.target.value))}>
    ${Array.from({ length: Math.min(job.fence, 50) }, (_, i) => html`<option value=${job.fence - i}>${job.fence - i}</option>`)}</select></label>`;
  const lines = log.parts.flatMap((part) => plain(part.text).split("\n"));
  const matches = wanted ? lines.filter((line) => line.toLowerCase().includes(wanted.toLowerCase())) : [];
  const actions = html`${choose}<input type="search" aria-label="Search in the output" placeholder="search the output" value=${wanted} onInput=${(e) => setWanted(e.target.value)} />
    <button disabled=${!log.parts.length} onClick=${() => download(`${job.job_id}.${shown}.log`, log.parts)}>Download</button>`;
  return html`<${Card} title="Output" wide actions=${actions}>
    ${wanted && html`<p class="muted" role="status">${matches.length === 1 ? "1 line matches" : `${matches.length} lines match`}.</p>`}
    <pre class="log" ref=${box} tabindex="0" role="region" aria-label="What the job printed" onScroll=${follow}>${
      wanted
        ? matches.map((line, i) => html`<span key=${i}>${line}\n</span>`)
        : log.parts.map((part, i) => html`<span key=${i} data-stream=${part.stream}>${plain(part.text)}</span>`)
    }${log.parts.length ? "" : waiting(shown, log.over)}</pre><//>`;
}

// Downloads the shown output: the newest 200,000 characters.
function download(name, parts) {
  const address = URL.createObjectURL(new Blob([parts.map((part) => part.text).join("")], { type: "text/plain" }));
  const link = Object.assign(document.createElement("a"), { href: address, download: name });
  link.click();
  URL.revokeObjectURL(address);
}

const waiting = (attempt, over) =>
  !attempt ? "It has not been started yet." : over ? "It printed nothing." : "Nothing printed yet.";

// Follows the output of one attempt to its end.
function useLog(id, attempt) {
  const [log, setLog] = useState({ parts: [], over: false });
  useEffect(() => {
    setLog({ parts: [], over: false });
    if (!attempt) return undefined;
    const aborter = new AbortController();
    follow(id, attempt, aborter.signal, (pieces, over) => setLog((old) => ({ parts: joined(old.parts, pieces), over })));
    return () => aborter.abort();
  }, [id, attempt]);
  return log;
}

async function follow(id, attempt, signal, tell) {
  let offset = 0,
    wait = 0;
  while (!signal.aborted) {
    try {
      const answer = await get(`queue/jobs/${id}/logs?attempt=${attempt}&offset=${offset}&wait_sec=${wait}`, { signal });
      const moved = answer.next > offset;
      offset = answer.next;
      wait = WAIT;
      tell(answer.pieces, answer.over);
      if (answer.over && !moved) return;
    } catch (error) {
      if (signal.aborted || error.status === 404 || error.status === 401) return;
      await new Promise((next) => setTimeout(next, 1000)); // the scheduler is away: try again
    }
  }
}

// Joins the pieces of one stream, so that an escape sequence that was split is whole again.
function joined(old, pieces) {
  const parts = old.slice();
  for (const { stream, text, skipped } of pieces) {
    const last = parts.at(-1);
    const gap = skipped ? `\n[${skipped} bytes are no longer kept]\n` : "";
    if (last?.stream === stream) parts[parts.length - 1] = { stream, text: last.text + gap + text };
    else parts.push({ stream, text: gap + text });
  }
  let room = KEPT;
  const kept = [];
  while (parts.length && room > 0) {
    const part = parts.pop();
    kept.unshift({ ...part, text: part.text.slice(-room) });
    room -= part.text.length;
  }
  return kept;
}
