// Requests with the session's cookie and the word that only our pages know.

// Kept by the browser for this host and port alone, unlike the cookie, which it sends to every port; shared by all tabs.
const csrf = () => localStorage.getItem("atoll-csrf") || "";
export const state = { namespace: localStorage.getItem("atoll-namespace") || "", skew: 0, isLive: false };

export class Problem extends Error {
  constructor(status, document) {
    super(document.detail || document.title || `the server answered ${status}`);
    this.status = status;
    this.title = document.title || "";
  }
}

function keep(answer) {
  state.namespace = answer.namespace;
  localStorage.setItem("atoll-csrf", answer.csrf);
  localStorage.setItem("atoll-namespace", answer.namespace);
}

async function checked(response) {
  const date = response.headers.get("date");
  if (date) state.skew = Date.now() / 1000 - Date.parse(date) / 1000;
  if (response.ok) return response;
  let document = {};
  try { document = await response.json(); } catch { /* no problem document */ }
  throw new Problem(response.status, document);
}

export async function signIn(body) {
  const response = await fetch("/ui/session", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  keep(await (await checked(response)).json());
}

export const isSignedIn = () => csrf() !== "";

export function forget() {
  localStorage.removeItem("atoll-csrf");
}

export async function send(method, path, body, options = {}) {
  const headers = { "X-Atoll-CSRF": csrf() };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (options.key) headers["Idempotency-Key"] = options.key;
  const response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal: options.signal });
  return checked(response);
}

export async function get(path, signal) {
  return (await send("GET", path, undefined, { signal })).json();
}

export const query = (values) => {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (Array.isArray(value)) for (const each of value) words.append(name, each);
    else if (value !== "" && value !== null && value !== undefined) words.set(name, value);
  }
  const text = words.toString();
  return text ? `?${text}` : "";
};

export const now = () => Date.now() / 1000 - state.skew;

// Lines of JSON as they come, until the signal ends it or the server does.
export async function* lines(path, signal) {
  const response = await send("GET", path, undefined, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const whole = rest.split("\n");
    rest = whole.pop();
    for (const line of whole) if (line) yield JSON.parse(line);
  }
}

// One stream a tab: calls back with the names that changed, and with whether it is connected.
export async function follow(onChange, onState) {
  let version = 0, pause = 500, since = null;
  while (true) {
    if (document.hidden) await new Promise((go) => document.addEventListener("visibilitychange", go, { once: true }));
    const ended = new AbortController();
    let silent = setTimeout(() => ended.abort(), 25000);
    try {
      for await (const frame of lines(`/ui/stream${query({ after: version || "" })}`, ended.signal)) {
        clearTimeout(silent);
        silent = setTimeout(() => ended.abort(), 25000);
        if (!state.isLive) {
          state.isLive = true;
          onState(true, null);
          if (since !== null) onChange(null);
          since = null;
        }
        pause = 500;
        if (frame.beat) continue;
        version = frame.version;
        if (frame.names === null || frame.names.length) onChange(frame.names);
      }
    } catch (error) {
      if (error.status === 401 || error.status === 403) { onState(false, since, error); return; }
    }
    clearTimeout(silent);
    state.isLive = false;
    since = since || now();
    version = 0;
    onState(false, since);
    await new Promise((go) => setTimeout(go, pause));
    pause = Math.min(pause * 2, 5000);
  }
}
