// Streams of an Onward server that survive broken connections and killed servers. For browsers and Node 20 or later; one
// file without dependencies, whose types can be stripped.
//
//   for await (const chunk of stream("http://127.0.0.1:8000", "/v1/chat/completions", { model, messages })) …
//
// The `id:` line of an event is the position behind it. After a broken connection the request is sent again with the last
// one as `Last-Event-ID`, and the server continues behind it. Events without an id are held until the next event with one:
// the server sends them again to a client whose connection breaks between the two. So each event is yielded once.

export interface Options {
  apiKey?: string;
  /** Closes the connection, which ends the work at the server. */
  signal?: AbortSignal;
  /** Continue behind this event of an earlier stream with the same body. */
  lastEventId?: string;
  /** Failed connections in a row; an event starts the count again. */
  maxFailures?: number;
  firstDelayMs?: number;
  maxDelayMs?: number;
  /** For the whole stream. */
  deadlineMs?: number;
  /** A connection that brings no byte for so long counts as lost. A request may wait in a queue before its first event. */
  readTimeoutMs?: number;
  /** Bound of one event, and of the events that are held until the next one with an id. The last event of `/v1/responses`
   * has the whole output, with its logprobs. */
  maxEventChars?: number;
  /** Called with the length of the pause and the number of the connection, when events arrive again. */
  onResume?: (pauseMs: number, attempt: number) => void;
}

interface Failure { message: string; retryable: boolean; status?: number; code?: string; retryAfterMs?: number }
interface ServerEvent { id: string; name: string; data: string }

/** A stream that cannot be resumed, or was not in time. `partial` has the events that were yielded before. */
export class StreamFailed extends Error {
  override name = "StreamFailed";
  status: number | undefined;
  code: string | undefined;
  partial: unknown[] = [];
  lastEventId = "";
}

/** What the server sent cannot be read, now or later. */
class Unreadable extends Error {}

const LONGEST_TIMER_MS = 2 ** 31 - 1; // a timer of more fires at once
const LAST_EVENTS = ["response.completed", "response.incomplete", "response.failed"];
const BUSY_CODES = ["conflict", "label_in_use", "stale_attempt"];
const FINAL_CODES = ["aborted", "crashed_engine", "crashed_worker", "deadline_exceeded", "grammar_failed",
  "internal_error", "invalid_logits", "no_token_allowed", "stream_unknown"];

/** The events of one stream, decoded. Leaving the loop ends the work at the server. Throws `StreamFailed`. */
export async function* stream<T = any>(
  baseUrl: string, path: string, body: Record<string, unknown>, options: Options = {},
): AsyncGenerator<T, void, void> {
  const { maxFailures = 12, firstDelayMs = 200, maxDelayMs = 5000, deadlineMs = 3.6e6, readTimeoutMs = 3e5 } = options;
  const { maxEventChars = 2 ** 28 } = options;
  const deadlineAt = Date.now() + deadlineMs;
  const label = Array.from(crypto.getRandomValues(new Uint32Array(4)), (word) => word.toString(16)).join("-");
  const partial: T[] = [];
  let lastEventId = options.lastEventId ?? "";
  let failures = 0, lost = 0, stale = 0, lostAt = 0;

  for (let attempt = 1; ; attempt++) {
    options.signal?.throwIfAborted();
    let failure: Failure | null = null;
    let held: ServerEvent[] = [], heldChars = 0, isOurFault = false;
    const connection = new AbortController();
    const leave = () => connection.abort(options.signal?.reason);
    options.signal?.addEventListener("abort", leave);
    // The timer is set again with each piece, and never later than the deadline.
    const limitMs = () => Math.max(1, Math.min(readTimeoutMs, deadlineAt - Date.now(), LONGEST_TIMER_MS));
    let timer = setTimeout(leave, limitMs());
    const alive = () => { clearTimeout(timer); timer = setTimeout(leave, limitMs()); };
    try {
      // The server refuses a second request with a label while the first one runs.
      const headers: Record<string, string> = { "content-type": "application/json", "x-request-id": label };
      if (options.apiKey !== undefined) headers.authorization = `Bearer ${options.apiKey}`;
      if (lastEventId) headers["last-event-id"] = lastEventId;
      const response = await fetch(baseUrl.replace(/\/$/, "") + path, {
        method: "POST", headers, body: JSON.stringify({ ...body, stream: true }), signal: connection.signal,
      });
      const hasEvents = response.status === 200 && response.headers.get("content-type")?.startsWith("text/event-stream");
      if (!hasEvents) failure = refusal(response, await response.text());
      else for await (const event of serverEvents(response, alive, maxEventChars)) {
        failure = errorOf(event);
        if (failure?.code === "stale_attempt") failure.retryable = ++stale <= lost; // a lost request may arrive late, once
        if (failure !== null && (failure.retryable || event.name === "error")) break;
        failure = null;
        const isLast = event.data === "[DONE]" || LAST_EVENTS.includes(event.name);
        held.push(event);
        heldChars += event.data.length;
        if (heldChars > maxEventChars) throw tooLarge("events without an id", maxEventChars);
        if (!event.id && !isLast) continue;
        const delivered: T[] = held.filter((one) => one.data && one.data !== "[DONE]").map((one) => fromJson(one.data));
        lastEventId = event.id || lastEventId;
        held = [], heldChars = 0;
        isOurFault = true; // what onResume or the reader of the stream throws is no failure of the connection
        if (lostAt && partial.length) options.onResume?.(Date.now() - lostAt, attempt);
        failures = lostAt = 0;
        partial.push(...delivered);
        yield* delivered;
        isOurFault = false;
        if (isLast) return;
        if (Date.now() < deadlineAt) continue;
        failure = { message: "the deadline has passed", retryable: false };
        break;
      }
      failure ??= { message: "the connection ended before the stream did", retryable: true };
    } catch (error) {
      options.signal?.throwIfAborted();
      if (isOurFault) throw error;
      const { message } = error as Error, retryable = !(error instanceof Unreadable);
      failure = { message: retryable ? `no connection to the server: ${message}` : message, retryable };
    } finally {
      clearTimeout(timer);
      options.signal?.removeEventListener("abort", leave);
      connection.abort();
    }

    const { status, code } = failure;
    const giveUp = (why: string) => Object.assign(new StreamFailed(why), { status, code, partial, lastEventId });
    lostAt ||= Date.now();
    if (failure.code !== "stale_attempt") lost++;
    if (!failure.retryable) throw giveUp(failure.message);
    if (++failures > maxFailures) throw giveUp(`${failures} connections in a row have failed: ${failure.message}`);
    const delayMs = Math.min(maxDelayMs, firstDelayMs * 2 ** (failures - 1)) * (1 - Math.random() / 2);
    const pauseMs = Math.max(delayMs, failure.retryAfterMs ?? 0);
    if (Date.now() + pauseMs >= deadlineAt) throw giveUp(`the deadline passes: ${failure.message}`);
    await sleep(pauseMs, options.signal);
  }
}

const sleep = (ms: number, signal?: AbortSignal) => new Promise<void>((resolve) => {
  const timer = setTimeout(done, Math.min(ms, LONGEST_TIMER_MS));
  function done() { clearTimeout(timer); signal?.removeEventListener("abort", done); resolve(); }
  signal?.addEventListener("abort", done);
});

/** Ends with the connection, whose owner closes it. */
async function* serverEvents(response: Response, alive: () => void, maxEventChars: number) {
  const reader = response.body!.getReader(), decoder = new TextDecoder();
  let rest = "", chars = 0, event: ServerEvent = { id: "", name: "", data: "" };
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    alive();
    const text = decoder.decode(value, { stream: true });
    rest += text;
    const received = text.includes("\n") ? rest.split("\n") : [rest]; // a long line is not split with each of its pieces
    rest = received.pop()!;
    for (const line of received) {
      chars += line.length;
      const [, field, value] = /^([^:]*):? ?(.*?)\r?$/s.exec(line)!;
      if (field === "id") event.id = value;
      else if (field === "event") event.name = value;
      else if (field === "data") event.data += (event.data && "\n") + value;
      if (line !== "" && line !== "\r") continue;
      if (event.id || event.data) yield event;
      chars = 0, event = { id: "", name: "", data: "" };
    }
    if (chars + rest.length > maxEventChars) throw tooLarge("an event", maxEventChars);
  }
}

/** The failure that an event of a stream stands for, if it is an error. */
function errorOf(event: ServerEvent): Failure | null {
  if (event.name === "error") return failureOf(decoded(event.data)?.error, undefined, false);
  if (event.name !== "response.failed") return null;
  const error = decoded(event.data)?.response?.error ?? {}; // `code` is OpenAI's, and `type` ours
  const retryable = error.code !== "invalid_prompt" && !FINAL_CODES.includes(error.type);
  return { message: `the response failed: ${error.message}`, retryable, code: error.type };
}

function refusal(response: Response, text: string): Failure {
  const error = decoded(text)?.error, status = response.status;
  const failure = failureOf(error ?? { message: text.slice(0, 200) }, status, [429, 502, 503, 504].includes(status));
  failure.retryable ||= status === 409 && (BUSY_CODES.includes(error?.code) || error?.param === "X-Request-Id");
  const header = response.headers.get("retry-after") ?? "";
  failure.retryAfterMs ||= 1000 * Number(header) || Math.max(0, Date.parse(header) - Date.now()) || 0;
  return failure;
}

function failureOf(error: any, status: number | undefined, retryable: boolean): Failure {
  const message = `the server answered ${status ?? "with an error"}: ${error?.message ?? "no reason"}`;
  const retryAfterMs = 1000 * (error?.retry_after_s ?? 0);
  return { message, retryable: error?.retryable ?? retryable, status, code: error?.code, retryAfterMs };
}

function decoded(text: string): any {
  try { return JSON.parse(text); } catch { return null; }
}

function fromJson(text: string): any {
  try { return JSON.parse(text); } catch { throw new Unreadable("the server sent an event that is not JSON"); }
}

const tooLarge = (what: string, limit: number) =>
  new Unreadable(`the server sent ${what} of over ${limit} characters (maxEventChars)`);
