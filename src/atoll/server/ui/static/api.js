// Requests to the server, with the cookie of the session and its CSRF token.

// In localStorage, which the browser keeps for this host and port alone: the cookie goes to every
// port of the host. All tabs share it.
const csrf = () => localStorage.getItem("atoll-csrf") || "";
export const state = {
  namespace: localStorage.getItem("atoll-namespace") || "",
  skew: 0,
  isLive: false,
};

export class Problem extends Error {
  constructor(status, document) {
    super(document.detail || document.title || `the server answered ${status}`);
    this.status = status;
    this.title = document.title || "";
  }
}

function saveSession(answer) {
  state.namespace = answer.namespace;
  localStorage.setItem("atoll-csrf", answer.csrf);
  localStorage.setItem("atoll-namespace", answer.namespace);
}

async function requireOk(response) {
  const date = response.headers.get("date");
  if (date) state.skew = Date.now() / 1000 - Date.parse(date) / 1000;
  if (response.ok) return response;
  let document = {};
  try {
    document = await response.json();
  } catch {
    /* the body is not a problem document */
  }
  throw new Problem(response.status, document);
}

export async function signIn(body) {
  const response = await fetch("/ui/session", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  saveSession(await (await requireOk(response)).json());
}

export const isSignedIn = () => csrf() !== "";

export function clearSession() {
  localStorage.removeItem("atoll-csrf");
}

export async function send(method, path, body, options = {}) {
  const headers = { "X-Atoll-CSRF": csrf() };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (options.key) headers["Idempotency-Key"] = options.key;
  const request = { method, headers, signal: options.signal };
  if (body !== undefined) request.body = JSON.stringify(body);
  const response = await fetch(path, request);
  return requireOk(response);
}

export async function get(path, signal) {
  return (await send("GET", path, undefined, { signal })).json();
}

export const query = (values) => {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (Array.isArray(value)) for (const each of value) params.append(name, each);
    else if (value !== "" && value !== null && value !== undefined) params.set(name, value);
  }
  const text = params.toString();
  return text ? `?${text}` : "";
};

export const now = () => Date.now() / 1000 - state.skew;

// Yields lines of JSON as they arrive, until the signal aborts or the server ends the response.
export async function* lines(path, signal) {
  const response = await send("GET", path, undefined, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let partial = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    partial += value;
    const complete = partial.split("\n");
    partial = complete.pop();
    for (const line of complete) if (line) yield JSON.parse(line);
  }
}

// Follows the stream of changes, one for each tab. Calls back with the names of the trainings that
// changed, and when the connection is lost or comes back.
const SILENCE_MS = 25000; // the server sends a heartbeat every 10 s: two may be lost

export async function follow(onChange, onState) {
  let version = 0,
    pause = 500,
    since = null;
  while (true) {
    if (document.hidden)
      await new Promise((go) => document.addEventListener("visibilitychange", go, { once: true }));
    const ended = new AbortController();
    let silence = setTimeout(() => ended.abort(), SILENCE_MS);
    try {
      for await (const frame of lines(
        `/ui/stream${query({ after: version || "" })}`,
        ended.signal,
      )) {
        clearTimeout(silence);
        silence = setTimeout(() => ended.abort(), SILENCE_MS);
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
      if (error.status === 401 || error.status === 403) {
        onState(false, since, error);
        return;
      }
    }
    clearTimeout(silence);
    state.isLive = false;
    since = since || now();
    version = 0;
    onState(false, since);
    await new Promise((go) => setTimeout(go, pause));
    pause = Math.min(pause * 2, 5000);
  }
}
