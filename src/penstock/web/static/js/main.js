// The frame around the pages: navigation, the state of the connection, keys.
import { html, render, signal, useEffect, useRef } from "./html.js";
import { connection } from "./api.js";
import { short } from "./format.js";
import { begin, frame } from "./live.js";
import { Confirm, Toasts } from "./parts.js";
import { signIn, SignIn } from "./session.js";
import { Overview } from "./pages/overview.js";
import { Jobs } from "./pages/jobs.js";
import { Job } from "./pages/job.js";
import { Arrays } from "./pages/arrays.js";
import { Batch, Batches } from "./pages/batches.js";
import { Schedules } from "./pages/schedules.js";
import { Machine } from "./pages/machine.js";
import { Addons } from "./pages/addons.js";
import { Pools } from "./pages/pools.js";
import { Workers } from "./pages/workers.js";
import { Alerts } from "./pages/alerts.js";

const PAGES = [
  { path: "", name: "Overview", key: "o", view: Overview },
  { path: "jobs", name: "Jobs", key: "j", view: Jobs },
  { path: "arrays", name: "Arrays", key: "r", view: Arrays },
  { path: "batches", name: "Batches", key: "b", view: Batches },
  { path: "schedules", name: "Schedules", key: "s", view: Schedules },
  { path: "machine", name: "Machine", key: "m", view: Machine },
  { path: "addons", name: "Addons", key: "a", view: Addons },
  { path: "workers", name: "Workers", key: "w", view: Workers },
  { path: "pools", name: "Pools", key: "p", view: Pools },
  { path: "alerts", name: "Alerts", key: "l", view: Alerts },
];

const place = signal(read());
function read() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [page = "", id = ""] = path.split("/").map(decodeURIComponent);
  return { page, id, query: new URLSearchParams(query) };
}
addEventListener("hashchange", () => {
  // A login link was opened in this tab: exchange its code.
  if (location.hash.startsWith("#code=")) location.reload();
  else place.value = read();
});

const help = signal(false);
const SEARCH = "input[type=search]";
// Whether to focus the search of the list of jobs when it is drawn. Kept until then, because another page may still be loading.
let focusSearch = false;

function Shell() {
  const { page, id, query } = place.value;
  useEffect(() => {
    const list = page === "jobs" && !id;
    document.querySelector(list && focusSearch ? SEARCH : "main")?.focus({ preventScroll: true });
    if (list) focusSearch = false;
    // On a phone the list of pages is a strip at the bottom that is wider than the window.
    document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
    document.title = `${id ? (page === "batches" ? `Batch ${id}` : `Job ${short(id)}`) : PAGES.find((p) => p.path === page)?.name || "No such page"} · Penstock`;
  }, [page, id]);
  if (connection.value === "signed-out") return html`<${SignIn} />`;
  const entry = PAGES.find((p) => p.path === page);
  const body =
    page === "jobs" && id
      ? html`<${Job} key=${id} id=${id} />`
      : page === "batches" && id
        ? html`<h1 class="sr">Batch ${id}</h1><${Batch} key=${id} name=${id} />`
        : entry
          ? html`<h1 class="sr">${entry.name}</h1><${entry.view} query=${query} />`
          : html`<h1 class="sr">No such page</h1><p class="empty">There is no such page. <a href="#/">Overview</a></p>`;
  return html`
    <a class="skip" href="#main" onClick=${(e) => {
      e.preventDefault();
      document.querySelector("main").focus();
    }}>Skip to the content</a>
    <nav aria-label="Pages">
      <a class="brand" href="#/"><img src="assets/icon.svg" alt="" width="26" height="26" /><span>Penstock</span></a>
      ${PAGES.map((p) => html`<a href=${`#/${p.path}`} aria-current=${p.path === page ? "page" : undefined}>${p.name}${p.path === "jobs" && frame.value ? html`<span class="pill">${frame.value.jobs.QUEUED || 0}</span>` : ""}</a>`)}
      <div class="grow"></div>
      <${Connection} />
      <button class="quiet" onClick=${() => {
        help.value = true;
      }} ><kbd>?</kbd> Keys</button>
      <button class="quiet" onClick=${flipTheme} ><kbd>t</kbd> Dark or light</button>
    </nav>
    <main id="main" tabindex="-1">${frame.value?.paused && page !== "machine" && html`<p class="paused" role="status">Everything is paused: no job starts. <a href="#/machine">Resume</a></p>`}${body}</main>
    <${Toasts} /><${Confirm} />${help.value && html`<${Help} />`}`;
}

function Connection() {
  const words = { live: "live", away: "reconnecting…", connecting: "connecting…" };
  return html`<span class="connection" data-state=${connection.value} role="status"><i></i>${words[connection.value] || connection.value}</span>`;
}

function Help() {
  const keys = [
    ...PAGES.map((p) => [`g ${p.key}`, p.name]),
    ["/", "search jobs"],
    ["t", "dark or light"],
    ["?", "this list"],
    ["Esc", "close"],
  ];
  const box = useRef(null),
    close = () => {
      help.value = false;
    };
  useEffect(() => box.current.showModal(), []);
  return html`<dialog class="keys" ref=${box} aria-labelledby="keys-title" onClose=${close} onClick=${close}>
    <h2 id="keys-title">Keys</h2>
    <dl>${keys.map(([key, what]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl>
    <div class="row end"><button onClick=${close}>Close</button></div></dialog>`;
}

function flipTheme() {
  const { dataset } = document.documentElement;
  dataset.theme = dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", dataset.theme);
}

let going = false;
addEventListener("keydown", (event) => {
  if (event.target.closest?.("input, textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (going) {
    going = false;
    const to = PAGES.find((p) => p.key === event.key);
    if (to) {
      location.hash = `#/${to.path}`;
      event.preventDefault();
    }
  } else if (event.key === "g") {
    going = true;
    setTimeout(() => {
      going = false;
    }, 1500);
  } else if (event.key === "?") help.value = true;
  else if (event.key === "t") flipTheme();
  else if (event.key === "/") {
    event.preventDefault();
    if (place.value.page === "jobs" && !place.value.id) document.querySelector(SEARCH)?.focus();
    else {
      focusSearch = true;
      location.hash = "#/jobs";
    }
  }
});

await signIn();
place.value = read();
begin();
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${Shell} />`, root);
