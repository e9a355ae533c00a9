// One answer while it streams: sends the request, reads its events, and goes on by `Last-Event-ID` when the connection
// breaks or the page is loaded again. The request is sent again in full with the header, so that a server which knows
// nothing of the stream can make it again. Writes into `message` and calls `changed`; knows no elements.

import { checked, request, serverSentEvents, sleep, ServerError } from "./server.js";

const PATH = "v1/chat/completions";
const MAX_FAILURES = 12;
const MAX_DELAY_MS = 5000;
const MIN_PAUSE_MS = 200;

export class AnswerStream {
  constructor(message, changed) {
    this.message = message;
    this.changed = changed;
    this.lastEventAt = 0;
    this.typicalGapMs = 0;
    this.abort = new AbortController();
    this.pendingMark = message.stream.lastEventId ? "reload" : null;
    this.epoch = epochOf(message.stream.lastEventId);
    this.isWaiting = false;
  }

  // Closes the connection, which ends the work at the server. The stream can be gone on with for a while.
  stop() {
    this.abort.abort();
  }

  async run() {
    const { message } = this;
    message.end = message.error = null;
    let failures = 0;
    let seen = message.stream.lastEventId;
    for (;;) {
      try {
        if (await this.readEvents()) return this.finish();
        throw new ServerError({ message: "the connection ended", retryable: true }, 0);
      } catch (error) {
        if (this.abort.signal.aborted) return this.finish("stopped");
        failures = message.stream.lastEventId === seen ? failures + 1 : 1;
        seen = message.stream.lastEventId;
        // 409: the server has not noticed yet that the earlier connection is closed.
        const isTransient = !(error instanceof ServerError) || error.retryable || error.status === 409;
        const mayRetry = seen && isTransient && error.code !== "stale_attempt";
        if (!mayRetry || failures > MAX_FAILURES) return this.finish("error", describe(error));
        this.pendingMark = this.pendingMark || "reconnected";
        this.isWaiting = true;
        this.changed();
        await sleep(Math.min(MAX_DELAY_MS, 200 * 2 ** failures, (error.retryAfterS || 60) * 1000), this.abort.signal);
      }
    }
  }

  // Whether the answer has ended. Raises when it has not, and the connection has.
  async readEvents() {
    const { stream, stats } = this.message;
    stats.sentAt = stats.sentAt || Date.now();
    const headers = stream.lastEventId ? { "last-event-id": stream.lastEventId } : {};
    const sent = await request(PATH, { method: "POST", body: stream.body, headers, signal: this.abort.signal });
    for await (const event of serverSentEvents(await checked(sent))) {
      if (event.data === "[DONE]") return true;
      if (event.event === "error") throw new ServerError(JSON.parse(event.data).error || {}, 0);
      if (event.data) this.apply(JSON.parse(event.data), event.id);
      if (event.id) stream.lastEventId = event.id;
      this.changed();
    }
    return false;
  }

  apply(chunk, id) {
    const { message } = this;
    if (chunk.usage) message.stats.promptTokens = chunk.usage.prompt_tokens;
    const choice = (chunk.choices || [])[0];
    if (!choice) return;
    const delta = choice.delta || {};
    const thinking = delta.reasoning_content || delta.reasoning || "";
    const text = delta.content || "";
    if (thinking || text || delta.tool_calls) this.noteArrival(id, thinking ? "reasoning" : "content");
    message.reasoning += thinking;
    message.content += text;
    for (const call of delta.tool_calls || []) this.addToolCall(call);
    for (const token of (choice.logprobs && choice.logprobs.content) || []) if (message.tokens) message.tokens.push(token);
    if (choice.finish_reason) message.end = choice.finish_reason;
  }

  addToolCall(delta) {
    const { toolCalls } = this.message;
    const call = toolCalls[delta.index] || (toolCalls[delta.index] = { name: "", arguments: "" });
    const said = delta.function || {};
    call.id = delta.id || call.id;
    call.name += said.name || "";
    call.arguments += said.arguments || "";
  }

  noteArrival(id, part) {
    const { message } = this;
    const now = Date.now();
    const { stats } = message;
    const gap = this.lastEventAt ? now - this.lastEventAt : 0;
    const epoch = epochOf(id) || this.epoch;
    const isPause = gap > Math.max(MIN_PAUSE_MS, 8 * this.typicalGapMs);
    const kind = this.pendingMark || (this.epoch && epoch !== this.epoch ? "moved" : isPause ? "paused" : null);
    if (kind) message.marks.push({ in: part, at: message[part].length, kind, pauseMs: gap, from: this.epoch, to: epoch });
    else if (gap) this.typicalGapMs = this.typicalGapMs ? 0.9 * this.typicalGapMs + 0.1 * gap : gap;
    this.pendingMark = null;
    this.isWaiting = false;
    this.epoch = epoch;
    this.lastEventAt = now;
    stats.firstAt = stats.firstAt || now;
    stats.lastAt = now;
    stats.tokens = positionOf(id) || stats.tokens;
  }

  finish(end = null, error = null) {
    const { message } = this;
    message.end = end || message.end || "stop";
    message.error = error;
    this.isWaiting = false;
    if (message.end !== "stopped" && message.end !== "error") message.stream = null;
    this.changed();
  }
}

function describe(error) {
  if (error.code === "stream_unknown") return "The server no longer has this stream, and cannot make it again.";
  if (error.code === "stale_attempt") return "Another tab or client has gone on with this stream.";
  return error instanceof ServerError ? error.message : "No connection to the server.";
}

// An event's id is "1;request id;created;seed;epoch;positions;tokens" (docs/router.md).
const epochOf = (id) => (id ? id.split(";")[4] : null);
const positionOf = (id) => (id ? parseInt(id.split(";")[5], 10) || 0 : 0);
