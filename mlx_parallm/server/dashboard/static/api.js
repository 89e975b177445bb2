// Calls to the server: JSON, the event stream, and streamed chats. Addresses are relative to the page's own.
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const listeners = new Set();

/** Has `listener` called with an ApiError whenever a call is refused for want of a key. */
export function onRefused(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

const address = (path) => new URL(path, document.baseURI);

async function failure(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // Not ours: a proxy's page, perhaps.
  }
  const found = new ApiError(error.message ?? `the server answered ${answer.status}`, answer.status, error.code);
  if (answer.status === 401 || (answer.status === 403 && !error.code)) listeners.forEach((listener) => listener(found));
  return found;
}

async function send(path, options) {
  let answer;
  try {
    answer = await fetch(address(path), { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server can't be reached", 0, null);
  }
  if (!answer.ok) throw await failure(answer);
  return answer;
}

export async function get(path) {
  return (await send(path)).json();
}

export async function post(path, body = {}) {
  const headers = { "Content-Type": "application/json" };
  const answer = await send(path, { method: "POST", headers, body: JSON.stringify(body) });
  return answer.status === 204 ? null : answer.json().catch(() => null);
}

const SIGNED_IN = "parallm-signed-in";

/** Trades a key for a session cookie, which scripts can't read. A wrong key is an ApiError. */
export async function login(key) {
  const answer = await post("dashboard/login", { key });
  sessionStorage.setItem(SIGNED_IN, answer?.name ?? "");
}

export const isSignedIn = () => sessionStorage.getItem(SIGNED_IN) !== null;

export async function logout() {
  await post("dashboard/logout");
  sessionStorage.removeItem(SIGNED_IN);
  location.reload();
}

/** Opens the event stream. Returns a function that closes it. */
export function watch({ onHistory, onSnapshot, onState }) {
  const source = new EventSource(address("dashboard/events"), { withCredentials: false });
  source.addEventListener("open", () => onState("open"));
  source.addEventListener("history", (event) => onHistory(JSON.parse(event.data)));
  source.addEventListener("snapshot", (event) => onSnapshot(JSON.parse(event.data)));
  source.addEventListener("error", () => onState(source.readyState === EventSource.CLOSED ? "closed" : "lost"));
  return () => source.close();
}

/** Streams a chat completion: `onChunk` is called with each parsed chunk. */
export async function chat(body, onChunk, signal) {
  const headers = { "Content-Type": "application/json" };
  const answer = await send("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (pending + value).split("\n\n");
    pending = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 200, chunk.error.code);
      onChunk(chunk);
    }
  }
}
