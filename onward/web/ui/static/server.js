// Requests to the server that this page came from. The key is kept in this tab (sessionStorage) and sent as a bearer token.

const KEY = "onward.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export class ServerError extends Error {
  constructor(fields, status) {
    super(fields.message || "HTTP " + status);
    this.status = status;
    this.code = fields.code || "";
    this.retryable = Boolean(fields.retryable);
    this.retryAfterS = fields.retry_after_s || null;
  }
}

export function request(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.authorization = "Bearer " + key.get();
  if (body !== undefined) sent["content-type"] = "application/json";
  return fetch(path, { method, body, headers: sent, signal, cache: "no-store", referrerPolicy: "no-referrer" });
}

export async function checked(response) {
  if (response.ok) return response;
  let fields = {};
  try {
    fields = (await response.json()).error || {};
  } catch { /* an error that is not ours: the status has to do */ }
  throw new ServerError(fields, response.status);
}

export const getJson = async (path) => (await checked(await request(path))).json();

export async function postJson(path, value = {}) {
  return (await checked(await request(path, { method: "POST", body: JSON.stringify(value) }))).json();
}

const MAX_EVENT_CHARS = 8 << 20;

// Yields {id, event, data} of a text/event-stream body. `id` is that of the event itself, or null.
export async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      if (buffer.length > MAX_EVENT_CHARS) throw new Error("an event is too large");
      for (let end = buffer.indexOf("\n\n"); end >= 0; end = buffer.indexOf("\n\n")) {
        const event = parseEvent(buffer.slice(0, end));
        buffer = buffer.slice(end + 2);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function parseEvent(text) {
  const event = { id: null, event: "message", data: null };
  for (const line of text.split("\n")) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "id") event.id = value;
    else if (name === "event") event.event = value;
    else if (name === "data") event.data = event.data === null ? value : event.data + "\n" + value;
  }
  return event.id === null && event.data === null ? null : event;
}

export const sleep = (ms, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  if (signal) signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});
