// Signing in: the link that `penstock up` prints has a code in its fragment, which works once. It becomes a cookie that scripts cannot
// read, and a second half that only this page can send.
import { html, useState } from "./html.js";
import { askOtherTabs, hasSession, keepSession } from "./api.js";

let refused = false;

export async function signIn() {
  const found = location.hash.match(/^#code=([\w-]+)/);
  if (!found) {
    if (!hasSession()) await askOtherTabs();
    return;
  }
  history.replaceState(null, "", location.pathname + "#/");
  refused = !(await exchange(found[1]));
}

async function exchange(code) {
  const answer = await fetch("/session", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ code }),
    credentials: "same-origin",
  });
  if (!answer.ok) return false;
  keepSession((await answer.json()).session);
  return true;
}

export function SignIn() {
  const [wrong, setWrong] = useState(refused);
  const submit = async (event) => {
    event.preventDefault();
    const code = new FormData(event.target)
      .get("code")
      .trim()
      .replace(/.*#code=/, "");
    if (await exchange(code)) location.reload();
    else setWrong(true);
  };
  return html`<main class="signin"><form class="card" onSubmit=${submit}>
    <h1>Penstock</h1>
    <p>Open the link that <code>penstock up</code> printed, or make a new one with <code>penstock login</code> and paste it here. It works once, within ten minutes.</p>
    <label>Link or code <input name="code" autocomplete="off" required autofocus /></label>
    ${wrong && html`<p class="problem" role="alert">That code has been used or has expired. <code>penstock login</code> makes another.</p>`}
    <button class="primary">Open</button>
  </form></main>`;
}
