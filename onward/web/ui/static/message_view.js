// Shows one message, and appends to it while it grows.

import { el, seconds, setText } from "./dom.js";

const MARKS = {
  paused: "The stream paused here and continued",
  moved: "Another attempt resumed the stream here",
  reconnected: "The connection broke here and the stream was resumed",
  reload: "The page was loaded again here and the stream was resumed",
};
const ENDS = {
  length: "ended at the token limit", abort: "aborted", stopped: "stopped", tool_calls: "", stop: "",
};

// Text with marks in it. It only grows, so each call appends what is new.
class GrowingText {
  constructor(part, element) {
    this.part = part;
    this.element = element;
    this.shown = 0;
    this.numMarks = 0;
    this.node = null;
  }

  update(text, marks) {
    const own = marks.filter((mark) => mark.in === this.part);
    while (this.numMarks < own.length && own[this.numMarks].at < text.length) {
      const mark = own[this.numMarks];
      this.append(text.slice(this.shown, mark.at));
      this.element.append(markElement(mark));
      this.node = null;
      this.numMarks += 1;
    }
    this.append(text.slice(this.shown));
  }

  append(text) {
    if (!text) return;
    if (this.node === null) {
      this.node = document.createTextNode("");
      this.element.append(this.node);
    }
    this.node.appendData(text);
    this.shown += text.length;
  }
}

function markElement(mark) {
  const pause = mark.pauseMs > 0 ? ", after " + seconds(mark.pauseMs / 1000) : "";
  const attempts = mark.from && mark.to && mark.from !== mark.to ? ` (attempt ${mark.from} → ${mark.to})` : "";
  const title = (MARKS[mark.kind] || "Resumed here") + pause + attempts;
  return el("span", { className: "mark", dataset: { kind: String(mark.kind) }, title, tabIndex: 0, role: "img",
    "aria-label": title, textContent: "↻" });
}

export class MessageView {
  constructor(message, actions) {
    this.message = message;
    const isUser = message.role === "user";
    this.body = el("div", { className: "text answer" });
    this.text = new GrowingText("content", this.body);
    this.thinkingBody = el("div", { className: "text" });
    this.thinking = new GrowingText("reasoning", this.thinkingBody);
    this.thinkingTitle = el("summary", { textContent: "Thinking" });
    this.thinkingBox = el("details", { className: "thinking", hidden: true }, this.thinkingTitle, this.thinkingBody);
    this.calls = el("div", { className: "calls" });
    this.facts = el("span", { className: "faint facts" });
    this.problem = el("p", { className: "problem", role: "status", hidden: true });
    this.numTokens = 0;
    const buttons = isUser
      ? [el("button", { className: "quiet", textContent: "Edit", onclick: () => actions.edit(message) })]
      : [
        this.continueButton = el("button", { className: "quiet", textContent: "Continue", hidden: true,
          onclick: () => actions.continueAnswer(message) }),
        el("button", { className: "quiet retry", textContent: "Retry", onclick: () => actions.retry(message) }),
        el("button", { className: "quiet", textContent: "Copy", onclick: () => navigator.clipboard.writeText(message.content) }),
      ];
    this.element = el("article", { className: "message " + (isUser ? "user" : "assistant") },
      this.thinkingBox, this.body, this.calls, this.problem,
      el("footer", {}, this.facts, ...buttons));
    this.update();
  }

  update(running = null) {
    const { message } = this;
    if (message.tokens && message.tokens.length) this.updateTokens();
    else this.text.update(message.content, message.marks || []);
    if (message.reasoning) {
      this.thinkingBox.hidden = false;
      this.thinking.update(message.reasoning, message.marks || []);
      setText(this.thinkingTitle, running && !message.content ? "Thinking…" : "Thinking");
    }
    this.updateCalls();
    this.element.classList.toggle("running", running !== null);
    this.element.classList.toggle("waiting", running !== null && running.isWaiting);
    this.problem.hidden = !message.error;
    setText(this.problem, message.error || "");
    if (message.role === "assistant") {
      this.continueButton.hidden = running !== null || !message.stream || !message.stream.lastEventId;
      setText(this.facts, factsOf(message, running));
    }
  }

  updateCalls() {
    const calls = this.message.toolCalls || [];
    while (this.calls.children.length < calls.length) {
      this.calls.append(el("div", { className: "call" }, el("code", {}), el("pre", {})));
    }
    calls.forEach((call, index) => {
      const [name, given] = this.calls.children[index].children;
      setText(name, call ? call.name : "");
      setText(given, call ? call.arguments : "");
    });
  }

  // With logprobs each token is an element of its own, with its alternatives as a tooltip.
  updateTokens() {
    const { tokens } = this.message;
    for (; this.numTokens < tokens.length; this.numTokens += 1) {
      const token = tokens[this.numTokens];
      const share = Math.exp(token.logprob);
      const others = (token.top_logprobs || []).map((one) => `${JSON.stringify(one.token)} ${percent(one.logprob)}`);
      const title = [`${JSON.stringify(token.token)} ${percent(token.logprob)}`, ...others].join("\n");
      const level = share > 0.9 ? 0 : share > 0.6 ? 1 : share > 0.3 ? 2 : 3;
      this.body.append(el("span", { className: "token unsure-" + level, title, textContent: token.token }));
    }
  }
}

const percent = (logprob) => (100 * Math.exp(logprob)).toFixed(1) + " %";

export function factsOf(message, running) {
  const { stats = {} } = message;
  const facts = [];
  if (running && running.isWaiting) facts.push("waiting for the server…");
  else if (running && !stats.firstAt) facts.push("…");
  if (stats.firstAt && stats.sentAt) facts.push("first token " + seconds((stats.firstAt - stats.sentAt) / 1000));
  if (stats.tokens > 1 && stats.lastAt > stats.firstAt) {
    facts.push(((1000 * (stats.tokens - 1)) / (stats.lastAt - stats.firstAt)).toFixed(1) + " tokens/s");
  }
  if (stats.tokens) facts.push(stats.tokens + " tokens");
  if (!running && message.end && ENDS[message.end] !== "" && message.end !== "error") {
    facts.push(ENDS[message.end] || String(message.end));
  }
  const resumes = (message.marks || []).length;
  if (resumes) facts.push(`resumed ${resumes === 1 ? "once" : resumes + " times"}`);
  return facts.join(" · ");
}
