// Components that several pages use.
import { html, signal, useEffect, useRef, useState } from "./html.js";
import { ago, exact, short, span, since } from "./format.js";
import { RANGES, now, range, setRange } from "./live.js";

export const STATES = ["QUEUED", "DISPATCHING", "RUNNING", "DONE", "FAILED", "BLOCKED", "CANCELED"];

export const State = ({ state }) => html`<span class="state" data-state=${state}>${state}</span>`;

export const JobLink = ({ id }) => html`<a class="id" href=${`#/jobs/${id}`} title=${id}>${short(id)}</a>`;

export const Tile = ({ label, value, sub, tone, href }) => {
  const inner = html`<span class="label">${label}</span><span class="value" data-tone=${tone || ""}>${value}</span><span class="sub">${sub || "\u00a0"}</span>`;
  return href ? html`<a class="tile" href=${href}>${inner}</a>` : html`<div class="tile">${inner}</div>`;
};

export const Card = ({ title, children, wide, actions }) => html`
  <section class=${wide ? "card wide" : "card"} aria-label=${title}>
    <header><h2>${title}</h2><div class="actions">${actions}</div></header>
    ${children}
  </section>`;

// `parts`: [{ value, tone, label }] of `whole`.
export const Bar = ({ parts, whole, label }) => html`
  <div class="bar" role="img" aria-label=${label}>
    ${parts.map((part) => html`<span data-tone=${part.tone} title=${part.label} style=${{ width: `${whole ? Math.min(100, (part.value / whole) * 100) : 0}%` }}></span>`)}
  </div>`;

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

export const Failed = ({ problem }) =>
  problem &&
  html`
  <div class="problem" role="alert"><strong>${problem.message}</strong>
    ${problem.hint && html`<span> ${problem.hint}</span>`}
    ${problem.problems?.length > 0 && html`<ul>${problem.problems.map((p) => html`<li><code>${p.field}</code> ${p.message}</li>`)}</ul>`}
  </div>`;

export const Since = ({ iso }) =>
  html`<time datetime=${iso || ""} title=${exact(iso)}>${iso ? span(Math.max(0, since(iso, now.value))) : "–"}</time>`;

// "5 min ago" or "in 2 h"; the tooltip has the exact moment and its zone.
export const When = ({ iso }) => html`<time datetime=${iso || ""} title=${exact(iso)}>${ago(iso, now.value)}</time>`;

// An input that the next frame does not overwrite: typed text stays until it is committed. When `onCommit` returns false, or after Escape,
// the old value comes back.
export function Field({ value, onCommit, ...rest }) {
  const [draft, setDraft] = useState(null);
  const said = useRef(null),
    known = useRef(value);
  useEffect(() => {
    if (value === known.current) return; // the first time; on a slow machine the user may have typed before this runs
    known.current = value;
    // The server returns the committed value. If the user is typing another value by then, keep that.
    if (String(value) !== said.current) setDraft(null);
    said.current = null;
  }, [value]);
  const commit = async (event) => {
    const text = event.target.value.trim();
    said.current = text;
    if (!event.target.reportValidity() || (await onCommit(text)) === false) setDraft(null);
  };
  const leave = (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    event.target.value = value;
    setDraft(null);
    event.target.blur();
  };
  return html`<input ...${rest} value=${draft ?? value} onKeyDown=${leave} onInput=${(e) => setDraft(e.target.value)} onChange=${commit} />`;
}

export const Range = () => html`<div class="row range" role="group" aria-label="Time range of the charts">
  ${RANGES.map(([seconds, words]) => html`<button class="chip" aria-pressed=${range.value === seconds} onClick=${() => setRange(seconds)}>${words}</button>`)}</div>`;

// toasts

const toasts = signal([]);
let number = 0;
export function toast(text, tone = "good") {
  const id = ++number;
  toasts.value = [...toasts.value, { id, text, tone }].slice(-4);
  setTimeout(
    () => {
      toasts.value = toasts.value.filter((t) => t.id !== id);
    },
    tone === "bad" ? 9000 : 4000,
  );
}
export const Toasts = () =>
  html`<div class="toasts" role="status" aria-live="polite">${toasts.value.map((t) => html`<div key=${t.id} class="toast" data-tone=${t.tone}>${t.text}</div>`)}</div>`;

// a confirmation before anything that cannot be undone

const question = signal(null);
export const confirm = (title, text, verb) =>
  new Promise((answer) => {
    question.value = { title, text, verb, answer };
  });
// "Cancel" closes a dialog, except in a dialog about canceling, where it would be ambiguous.
const stay = (verb) => (verb.startsWith("Cancel") ? "Back" : "Cancel");
export function Confirm() {
  const box = useRef(null);
  const asked = question.value;
  useEffect(() => {
    if (asked && box.current && !box.current.open) box.current.showModal();
  }, [asked]);
  if (!asked) return null;
  const close = (yes) => {
    question.value = null;
    asked.answer(yes);
  };
  return html`<dialog ref=${box} aria-labelledby="confirm-title" onCancel=${(e) => {
    e.preventDefault();
    close(false);
  }}>
    <h2 id="confirm-title">${asked.title}</h2><p>${asked.text}</p>
    <div class="row end"><button autofocus onClick=${() => close(false)}>${stay(asked.verb)}</button><button class="primary danger" onClick=${() => close(true)}>${asked.verb}</button></div>
  </dialog>`;
}

// A form in a dialog: `onSend` gets its fields, and an error that it raises is shown beside them.
export function FormDialog({ title, verb, onSend, onClose, children }) {
  const box = useRef(null);
  const [problem, setProblem] = useState(null),
    [busy, setBusy] = useState(false);
  useEffect(() => box.current.showModal(), []);
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await onSend(Object.fromEntries(new FormData(event.target)));
      onClose();
    } catch (error) {
      setProblem(error);
      setBusy(false);
    }
  };
  return html`<dialog ref=${box} class="form" aria-labelledby="form-title" onClose=${onClose}>
    <form onSubmit=${send}><h2 id="form-title">${title}</h2>${children}<${Failed} problem=${problem} />
      <div class="row end"><button type="button" onClick=${onClose}>Cancel</button><button class="primary" disabled=${busy}>${verb}</button></div></form>
  </dialog>`;
}

// Parses JSON that a user typed; the error names the position.
export function typedJson(text) {
  try {
    return text.trim() ? JSON.parse(text) : null;
  } catch (error) {
    throw new Error(`That is not JSON: ${error.message}`);
  }
}
