// A chat with the model. Answers go on after a reload of the page, a broken connection and a killed process.

import { AnswerStream } from "./answer_stream.js";
import * as conversations from "./conversations.js";
import { el } from "./dom.js";
import { MessageView } from "./message_view.js";

const SAVE_MS = 300;

export function showPlayground(main, session) {
  const playground = new Playground(main, session);
  return () => playground.leave();
}

class Playground {
  constructor(main, session) {
    this.session = session;
    this.conversation = conversations.current() || conversations.create();
    conversations.setCurrent(this.conversation.id);
    this.running = null;
    this.saveTimer = null;
    this.views = new Map();
    this.onPageHide = () => this.save();
    addEventListener("pagehide", this.onPageHide);
    this.build(main);
    this.showConversation();
    this.resumeUnfinished();
  }

  leave() {
    removeEventListener("pagehide", this.onPageHide);
    this.save();
    if (this.running) this.running.stop();
  }

  build(main) {
    const isWide = matchMedia("(min-width: 60rem)").matches;
    this.list = el("ul", { className: "conversations" });
    this.messages = el("div", { className: "messages", id: "messages", "aria-live": "polite" });
    this.input = el("textarea", { id: "prompt", rows: 2, placeholder: "Ask something", "aria-label": "Message",
      onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.submit(); }
      } });
    this.sendButton = el("button", { id: "send", className: "primary", textContent: "Send" });
    this.stopButton = el("button", { id: "stop", type: "button", textContent: "Stop", hidden: true,
      onclick: () => this.running && this.running.stop() });
    const composer = el("form", { className: "composer", onsubmit: (event) => { event.preventDefault(); this.submit(); } },
      this.input, this.stopButton, this.sendButton);
    this.settingsForm = el("div", { className: "settings" });
    main.replaceChildren(el("div", { className: "playground" },
      el("details", { className: "side left", open: isWide },
        el("summary", { textContent: "Conversations" }),
        el("button", { textContent: "New conversation", id: "new", onclick: () => this.open(conversations.create(this.conversation.settings)) }),
        this.list),
      el("section", { className: "chat" }, this.messages, composer),
      el("details", { className: "side right", open: isWide }, el("summary", { textContent: "Settings" }), this.settingsForm)));
  }

  // Conversations.

  open(conversation) {
    if (this.running) this.running.stop();
    this.save();
    this.conversation = conversation;
    this.conversation.settings = { ...conversations.DEFAULT_SETTINGS, ...conversation.settings };
    conversations.setCurrent(conversation.id);
    this.showConversation();
    this.input.focus();
  }

  showConversation() {
    this.views.clear();
    this.messages.replaceChildren();
    for (const message of this.conversation.messages) this.addView(message);
    if (!this.conversation.messages.length) {
      this.messages.append(el("div", { className: "empty" },
        el("h1", { textContent: "Talk to " + this.session.model }),
        el("p", { className: "faint", textContent:
          "Reload the page, or kill a server process, while an answer streams: it continues, and ↻ marks the place." })));
    }
    this.showSettings();
    this.showList();
    this.scroll(true);
  }

  showList() {
    this.list.replaceChildren(...conversations.list().map((conversation) => el("li", {},
      el("button", { className: "quiet title", textContent: conversations.titleOf(conversation),
        "aria-current": String(conversation.id === this.conversation.id), onclick: () => this.open(conversation) }),
      el("button", { className: "quiet delete", textContent: "×", title: "Delete", "aria-label": "Delete conversation",
        onclick: () => this.remove(conversation) }))));
  }

  remove(conversation) {
    conversations.remove(conversation.id);
    if (conversation.id === this.conversation.id) {
      if (this.running) this.running.stop();
      this.conversation = conversations.create(conversation.settings);
      conversations.setCurrent(this.conversation.id);
      this.showConversation();
    } else this.showList();
  }

  save() {
    clearTimeout(this.saveTimer);
    this.saveTimer = null;
    if (this.conversation.messages.length) conversations.save(this.conversation);
  }

  saveSoon() {
    if (this.saveTimer === null) this.saveTimer = setTimeout(() => this.save(), SAVE_MS);
  }

  // Settings.

  showSettings() {
    const { settings } = this.conversation;
    const keep = (name, value) => { settings[name] = value; this.saveSoon(); };
    const number = (name, label, min, max, step) => el("label", {}, el("span", { textContent: label }),
      el("input", { type: "number", name, min, max, step, value: settings[name],
        onchange: (event) => keep(name, event.target.value === "" ? "" : Number(event.target.value)) }));
    const text = (name, label, rows, placeholder) => el("label", { className: "wide" }, el("span", { textContent: label }),
      el("textarea", { name, rows, placeholder, value: settings[name], spellcheck: false,
        onchange: (event) => keep(name, event.target.value) }));
    this.settingsForm.replaceChildren(
      text("system", "System prompt", 3, "You are a helpful assistant."),
      number("temperature", "Temperature", 0, 2, 0.1),
      number("top_p", "Top p", 0.01, 1, 0.01),
      number("max_tokens", "Max tokens", 1, undefined, 1),
      number("seed", "Seed", undefined, undefined, 1),
      el("label", {}, el("span", { textContent: "Logprobs" }), el("input", { type: "checkbox", name: "logprobs",
        checked: settings.logprobs, onchange: (event) => keep("logprobs", event.target.checked) })),
      el("details", { open: Boolean(settings.tools || settings.schema) }, el("summary", { textContent: "Tools and JSON schema" }),
        text("tools", "Tools (a JSON list)", 4, '[{"type": "function", "function": {"name": "…", "parameters": {}}}]'),
        text("schema", "JSON schema of the answer", 4, '{"type": "object", "properties": {}}')));
  }

  // Messages.

  addView(message) {
    const view = new MessageView(message, {
      edit: (one) => this.edit(one), retry: (one) => this.retry(one), continueAnswer: (one) => this.run(one),
    });
    this.views.set(message, view);
    const empty = this.messages.querySelector(".empty");
    if (empty) empty.remove();
    this.messages.append(view.element);
  }

  submit() {
    const content = this.input.value.trim();
    if (!content || this.running) return;
    this.input.value = "";
    this.ask(content);
  }

  ask(content) {
    const message = { role: "user", content };
    this.conversation.messages.push(message);
    this.addView(message);
    this.answer();
  }

  answer() {
    let body;
    try {
      body = JSON.stringify(requestBody(this.session.model, this.conversation));
    } catch (error) {
      this.addAnswer({ error: error.message, end: "error" });
      return;
    }
    this.run(this.addAnswer({ stream: { body, lastEventId: null } }));
  }

  addAnswer(fields) {
    const message = { role: "assistant", content: "", reasoning: "", toolCalls: [], marks: [], stats: {}, end: null,
      error: null, stream: null, ...fields };
    // Not kept: alternatives of each token are many times the text.
    if (this.conversation.settings.logprobs) Object.defineProperty(message, "tokens", { value: [], enumerable: false });
    this.conversation.messages.push(message);
    this.addView(message);
    this.save();
    return message;
  }

  resumeUnfinished() {
    const last = this.conversation.messages[this.conversation.messages.length - 1];
    // One that the reader has stopped stays stopped, with a button to go on.
    if (last && last.stream && last.end !== "stopped" && last.end !== "error") this.run(last);
  }

  async run(message) {
    if (this.running) return;
    const { conversation } = this;
    const stream = this.running = new AnswerStream(message, () => this.changed(message, stream));
    this.showRunning(true);
    this.showList();
    await stream.run();
    this.running = null;
    this.showRunning(false);
    const view = this.views.get(message);
    if (view) view.update();
    conversation.updated = Date.now();
    conversations.save(conversation);
    this.showList();
  }

  changed(message, stream) {
    const view = this.views.get(message);
    if (view) view.update(this.running === stream ? stream : null);
    this.scroll();
    this.saveSoon();
  }

  showRunning(isRunning) {
    this.stopButton.hidden = !isRunning;
    this.sendButton.hidden = isRunning;
  }

  retry(message) {
    if (this.running) return;
    this.truncate(message);
    this.answer();
  }

  edit(message) {
    if (this.running) return;
    this.input.value = message.content;
    this.truncate(message);
    this.input.focus();
  }

  // Removes a message and all after it.
  truncate(message) {
    const { messages } = this.conversation;
    for (const removed of messages.splice(messages.indexOf(message))) this.views.get(removed).element.remove();
    this.save();
  }

  scroll(always = false) {
    const { messages } = this;
    const isAtEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 80;
    if (always || isAtEnd) messages.scrollTop = messages.scrollHeight;
  }
}

function requestBody(model, { settings, messages }) {
  const said = messages.filter((message) => message.role === "user" || message.content || (message.toolCalls || []).length)
    .map((message) => ({ role: message.role, content: message.content }));
  if (settings.system) said.unshift({ role: "system", content: settings.system });
  const body = { model, messages: said, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) if (settings[name] !== "") body[name] = settings[name];
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (settings.tools.trim()) body.tools = parsed(settings.tools, "Tools");
  if (settings.schema.trim()) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(settings.schema, "JSON schema") } };
  }
  return body;
}

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}
