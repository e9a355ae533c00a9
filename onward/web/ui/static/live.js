// What the server does now: one event stream, two looks a second, shown as figures, instances, blocks and streams.

import { el, seconds, setText, svg } from "./dom.js";
import { checked, postJson, request, serverSentEvents, sleep } from "./server.js";

const MAX_SAMPLES = 60;
const RETRY_MS = 1000;
const SLOT_STATES = { prefilling: "prefilling", decoding: "decoding", preempting: "preempting", waiting_for_kv: "waiting for KV", waiting: "queued" };
const BLOCK_STATES = { ".": "free", c: "cached", o: "owned", f: "fenced", l: "leased", s: "sending", q: "quarantined" };

export function showLive(main, session) {
  if (!session.is_admin) {
    main.replaceChildren(el("div", { className: "card key-form" },
      el("h1", { textContent: "Admins only" }),
      el("p", { className: "faint", textContent: "The live view shows the requests of all callers, so it needs the key of an admin." })));
    return () => {};
  }
  const view = new LiveView(main, session);
  view.run();
  return () => view.leave();
}

class LiveView {
  constructor(main, session) {
    this.session = session;
    this.abort = new AbortController();
    this.figures = Object.fromEntries([
      ["rate", "Tokens per second"], ["running", "Running requests"], ["waiting", "Queue"],
      ["first", "First token, mean"], ["gap", "Between tokens, mean"], ["kv", "KV blocks in use"],
    ].map(([name, title]) => [name, new Figure(title)]));
    this.instances = new Map();
    this.streams = new StreamTable(session, (id) => this.abortStream(id));
    this.problem = el("p", { className: "problem", role: "status", hidden: true });
    this.instanceList = el("div", { className: "instances" });
    this.resumes = el("div", { className: "card", hidden: true });
    main.replaceChildren(el("div", { className: "live", id: "live" }, this.problem,
      el("div", { className: "figures" }, ...Object.values(this.figures).map((figure) => figure.element)),
      this.instanceList, this.streams.element, this.resumes));
    this.last = null;
  }

  leave() {
    this.abort.abort();
  }

  async run() {
    while (!this.abort.signal.aborted) {
      try {
        const response = await checked(await request("ui/live", { signal: this.abort.signal }));
        for await (const event of serverSentEvents(response)) this.show(JSON.parse(event.data));
        this.showProblem("The connection ended; connecting again…");
      } catch (error) {
        if (this.abort.signal.aborted) return;
        this.showProblem(error.status ? error.message : "No connection; trying again…");
        if (error.status === 401 || error.status === 403) return;
      }
      await sleep(RETRY_MS, this.abort.signal);
    }
  }

  showProblem(text) {
    this.problem.hidden = !text;
    setText(this.problem, text);
  }

  show(look) {
    if (look.error) return this.showProblem(look.error.message);
    this.showProblem("");
    this.showInstances(look.instances);
    const requests = look.instances.flatMap((one) => ((one.engine && one.engine.requests) || []).map((r) => ({ ...r, instance: one.id })));
    this.streams.show(look, requests);
    this.showFigures(look, requests);
    if (look.resumes) this.showResumes(look.resumes);
    this.last = look;
    return undefined;
  }

  showInstances(instances) {
    const ids = new Set(instances.map((one) => one.id));
    for (const [id, card] of this.instances) if (!ids.has(id)) { card.element.remove(); this.instances.delete(id); }
    for (const instance of instances) {
      let card = this.instances.get(instance.id);
      if (!card) {
        card = new InstanceCard(instance, this.session, (text) => this.showProblem(text));
        this.instances.set(instance.id, card);
        this.instanceList.append(card.element);
      }
      card.show(instance);
    }
  }

  showFigures(look, requests) {
    const engines = look.instances.map((one) => one.engine).filter(Boolean);
    const total = (of) => engines.reduce((sum, engine) => sum + of(engine), 0);
    const blocks = total((engine) => Object.values(engine.kv_blocks).reduce((sum, number) => sum + number, 0));
    const unused = total((engine) => (engine.kv_blocks.free || 0) + (engine.kv_blocks.cached || 0));
    const kv = blocks ? (100 * (blocks - unused)) / blocks : 0;
    this.figures.running.add(requests.filter((one) => one.state !== "waiting").length, (value) => String(value));
    this.figures.waiting.add(total((engine) => engine.num_waiting), (value) => String(value));
    this.figures.kv.add(kv, (value) => value.toFixed(0) + " %");
    if (!this.last) return;
    const elapsed = look.at_s - this.last.at_s;
    if (elapsed <= 0) return;
    const before = new Map(this.last.instances.map((one) => [one.id, one.engine]));
    const made = look.instances.reduce((sum, one) => {
      const earlier = before.get(one.id);
      return one.engine && earlier ? sum + Math.max(0, one.engine.num_generated_tokens - earlier.num_generated_tokens) : sum;
    }, 0);
    this.figures.rate.add(made / elapsed, (value) => value.toFixed(1));
    const firsts = requests.map((one) => one.first_token_s).filter((value) => value !== null && value !== undefined);
    this.figures.first.add(mean(firsts), (value) => seconds(value) || "–");
    const gaps = this.streams.rates().filter((rate) => rate > 0).map((rate) => 1 / rate);
    this.figures.gap.add(mean(gaps), (value) => seconds(value) || "–");
  }

  showResumes(resumes) {
    this.resumes.hidden = !resumes.length;
    this.resumes.replaceChildren(el("h2", { textContent: "Resumed streams" }),
      el("div", { className: "scroll" }, el("table", {},
        el("thead", {}, el("tr", {}, ...["when", "stream", "cause", "from", "to", "pause", "outcome"].map((name) => el("th", { textContent: name })))),
        el("tbody", {}, ...resumes.slice().reverse().map((one) => el("tr", {},
          cell(seconds(one.ago_s) + " ago"), cell(short(one.request_id), "id mono"), cell(one.cause), cell(short(one.from)), cell(short(one.to)),
          cell(seconds(one.pause_s)), cell(one.outcome)))))));
  }

  async abortStream(id) {
    try {
      await postJson("v1/abort", { ids: [id] });
    } catch (error) {
      this.showProblem(error.message);
    }
  }
}

// A number and how it has moved.
class Figure {
  constructor(title) {
    this.samples = [];
    this.value = el("div", { className: "value", textContent: "–" });
    this.line = svg("polyline", { points: "" });
    this.element = el("div", { className: "card figure" }, el("div", { className: "name", textContent: title }), this.value,
      svg("svg", { viewBox: `0 0 ${MAX_SAMPLES - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.line));
  }

  add(value, format) {
    this.samples.push(value === null ? 0 : value);
    if (this.samples.length > MAX_SAMPLES) this.samples.shift();
    setText(this.value, value === null ? "–" : format(value));
    const top = Math.max(...this.samples, 1e-9);
    const start = MAX_SAMPLES - this.samples.length;
    this.line.setAttribute("points", this.samples.map((sample, index) => `${start + index},${(19 - 18 * (sample / top)).toFixed(2)}`).join(" "));
  }
}

class InstanceCard {
  constructor(instance, session, complain) {
    this.id = instance.id;
    this.session = session;
    this.complain = complain;
    this.incarnations = new Map();
    this.state = el("span", { className: "state" });
    this.drainButton = el("button", { className: "quiet drain", onclick: () => this.toggleDrain() });
    this.processes = el("div", { className: "processes" });
    this.slots = el("div", { className: "slots", role: "img", "aria-label": "slots" });
    this.slotLabel = el("div", { className: "label" });
    this.blocks = el("div", { className: "blocks", role: "img", "aria-label": "KV blocks" });
    this.blockLabel = el("div", { className: "label" });
    this.blockLegend = el("div", { className: "legend" });
    this.details = el("div", { className: "instance" }, this.processes, this.slotLabel, this.slots, slotLegend(), this.blockLabel,
      this.blocks, this.blockLegend);
    this.element = el("section", { className: "card instance", dataset: { instance: instance.id } },
      el("div", { className: "row" }, el("h2", { className: "mono", textContent: instance.id }), this.state,
        el("span", { className: "faint label", textContent: instance.role }),
        el("span", { className: "faint mono", textContent: instance.model || "" }), el("span", { className: "spacer" }), this.drainButton),
      this.details);
    if (session.demo) this.element.append(this.killButtons());
  }

  show(instance) {
    this.isDraining = instance.state === "draining";
    setText(this.state, instance.state);
    this.state.className = "state " + instance.state;
    setText(this.drainButton, this.isDraining ? "Undrain" : "Drain");
    this.details.hidden = !instance.processes;
    if (!instance.processes) return;
    this.showProcesses(instance);
    if (instance.engine) this.showEngine(instance.engine);
    else {
      setText(this.slotLabel, "The engine is starting.");
      for (const slot of this.slots.children) slot.className = "";
    }
  }

  showProcesses(instance) {
    while (this.processes.children.length > instance.processes.length) this.processes.lastChild.remove();
    instance.processes.forEach((one, index) => {
      const chip = this.processes.children[index] || this.processes.appendChild(el("span", { className: "process" }));
      const restarts = (instance.restarts || {})[one.role] || 0;
      const isNew = chip.dataset.incarnation && chip.dataset.incarnation !== one.incarnation && chip.dataset.role === one.role;
      chip.className = `process ${one.state}` + (isNew ? " changed" : chip.classList.contains("changed") ? " changed" : "");
      Object.assign(chip.dataset, { role: one.role, incarnation: one.incarnation });
      chip.title = `${one.incarnation}, ${one.state}`;
      setText(chip, `${one.role.replace("_", " ")} ${one.pid}` + (restarts ? ` · restarted ${restarts === 1 ? "once" : restarts + " times"}` : ""));
    });
  }

  showEngine(engine) {
    const bySlot = new Map(engine.requests.filter((one) => one.slot !== null && one.slot !== undefined).map((one) => [one.slot, one]));
    resize(this.slots, engine.num_slots);
    for (let slot = 0; slot < engine.num_slots; slot += 1) {
      const one = bySlot.get(slot);
      const cellElement = this.slots.children[slot];
      const name = one ? "s-" + one.state : "";
      if (cellElement.className !== name) cellElement.className = name;
      cellElement.title = one ? `slot ${slot}: ${one.state}, ${one.num_generated_tokens} tokens` : `slot ${slot}: free`;
    }
    setText(this.slotLabel, `Slots: ${bySlot.size} of ${engine.num_slots} in use · ${engine.num_waiting} queued · step ${engine.step}` +
      (engine.num_preemptions ? ` · ${engine.num_preemptions} preemptions` : ""));
    this.showBlocks(engine);
  }

  showBlocks(engine) {
    const map = engine.block_map;
    resize(this.blocks, map.length);
    for (let index = 0; index < map.length; index += 1) {
      const name = map[index] === "." ? "" : "b-" + BLOCK_STATES[map[index]];
      const cellElement = this.blocks.children[index];
      if (cellElement.className !== name) cellElement.className = name;
    }
    const total = Object.values(engine.kv_blocks).reduce((sum, number) => sum + number, 0);
    const sampled = engine.blocks_per_cell > 1 ? `, one cell for every ${engine.blocks_per_cell}` : "";
    setText(this.blockLabel, `KV blocks: ${total} of ${engine.block_size} tokens${sampled}`);
    const shown = Object.entries(engine.kv_blocks).filter(([name, number]) => number || ["free", "cached", "owned"].includes(name));
    this.blockLegend.replaceChildren(...shown.map(([name, number]) =>
      el("span", {}, el("i", { className: name === "free" ? "" : "b-" + name }), `${name} ${number}`)));
  }

  async toggleDrain() {
    const verb = this.isDraining ? "undrain" : "drain";
    await this.act(this.session.role === "router" ? `ui/${verb}` : verb);
  }

  async act(path) {
    try {
      await postJson(path, this.session.role === "router" ? { instance: this.id } : {});
    } catch (error) {
      this.complain(error.message);
    }
  }

  killButtons() {
    return el("div", { className: "row" }, el("span", { className: "label", textContent: "Kill:" }),
      ...["worker", "engine", "instance"].map((target) => el("button", { className: "danger kill-" + target, textContent: target,
        onclick: () => this.act("ui/demo/" + target) })));
  }
}

class StreamTable {
  constructor(session, abort) {
    this.isRouter = session.role === "router";
    this.traceUrl = session.trace_url;
    this.abort = abort;
    this.rows = new Map();
    this.body = el("tbody", {});
    this.title = el("h2", { textContent: "Streams" });
    const columns = ["stream", "caller", ...(this.isRouter ? ["instance", "attempt"] : []), "state", "tokens", "tokens/s", "first token",
      "preempted", "timeline", ""];
    this.element = el("section", { className: "card" }, this.title, el("div", { className: "scroll" },
      el("table", { id: "streams" }, el("thead", {}, el("tr", {}, ...columns.map((name) => el("th", { textContent: name })))), this.body)));
  }

  rates() {
    return Array.from(this.rows.values(), (row) => row.rate);
  }

  show(look, requests) {
    const byId = new Map(requests.map((one) => [one.id, one]));
    const streams = this.isRouter
      ? look.streams.map((one) => {
        const request = byId.get(one.id) || {};
        return { ...request, ...one, trace_id: one.trace_id || request.trace_id, state: stateOf(one, byId.get(one.id)) };
      })
      : Array.from(byId.values(), (one) => ({ ...one, num_tokens: one.num_generated_tokens }));
    const ids = new Set(streams.map((one) => one.id));
    for (const [id, row] of this.rows) if (!ids.has(id)) { row.remove(); this.rows.delete(id); }
    for (const stream of streams) {
      let row = this.rows.get(stream.id);
      if (!row) {
        row = new StreamRow(stream, this.isRouter, this.traceUrl, this.abort);
        this.rows.set(stream.id, row);
        this.body.append(row.element);
      }
      row.show(stream, look.at_s);
    }
    const engines = look.instances.map((one) => one.engine).filter(Boolean);
    const total = this.isRouter ? look.num_streams : engines.reduce((sum, engine) => sum + engine.num_requests, 0);
    setText(this.title, total > streams.length ? `Streams (${streams.length} of ${total})` : `Streams (${total})`);
  }
}

class StreamRow {
  constructor(stream, isRouter, traceUrl, abort) {
    this.isRouter = isRouter;
    this.rate = 0;
    this.samples = [];
    this.segments = [];
    this.cells = Object.fromEntries(["instance", "attempt", "state", "tokens", "rate", "first", "preempted"].map((name) => [name, el("td", { className: "number of-" + name })]));
    this.timeline = el("div", { className: "timeline" });
    const { instance, attempt, ...always } = this.cells;
    this.details = el("tr", { className: "details" }, streamDetails(stream, traceUrl));
    this.opener = el("button", { className: "quiet opener", title: stream.id, textContent: stream.label || short(stream.id),
      "aria-expanded": "false", onclick: () => this.toggleDetails() });
    this.element = el("tr", { dataset: { id: stream.id } },
      el("td", { className: "id mono" }, this.opener), cell(stream.caller || "–"),
      ...(isRouter ? [instance, attempt] : []), ...Object.values(always), el("td", {}, this.timeline),
      el("td", {}, el("button", { className: "quiet danger abort", textContent: "Abort", onclick: () => abort(stream.id) })));
  }

  toggleDetails() {
    const isOpen = this.details.isConnected;
    if (isOpen) this.details.remove(); else this.element.after(this.details);
    this.opener.setAttribute("aria-expanded", String(!isOpen));
  }

  remove() {
    this.element.remove();
    this.details.remove();
  }

  show(stream, atS) {
    this.samples.push([atS, stream.num_tokens]);
    if (this.samples.length > 6) this.samples.shift();
    const [firstAt, firstTokens] = this.samples[0];
    this.rate = atS > firstAt ? Math.max(0, stream.num_tokens - firstTokens) / (atS - firstAt) : 0;
    const { cells } = this;
    setText(cells.instance, stream.instance ? short(stream.instance) : "–");
    setText(cells.attempt, String(stream.attempt || 1));
    setText(cells.state, (SLOT_STATES[stream.state] || stream.state || "").replaceAll("_", " "));
    setText(cells.tokens, String(stream.num_tokens));
    if (stream.num_prompt_tokens) cells.tokens.title = `after a prompt of ${stream.num_prompt_tokens}, ${stream.num_computed_tokens} computed`;
    setText(cells.rate, this.rate ? this.rate.toFixed(1) : "");
    setText(cells.first, seconds(stream.first_token_s));
    setText(cells.preempted, stream.num_preemptions ? String(stream.num_preemptions) : "");
    this.addSegment(stream, atS);
  }

  // The states that were seen, each as wide as it lasted. A change of the instance begins a new segment.
  addSegment(stream, atS) {
    const last = this.segments[this.segments.length - 1];
    const key = stream.state + "@" + (stream.instance || "");
    if (last) last.until = atS;
    if (!last || last.key !== key) {
      const element = el("i", { className: "s-" + stream.state });
      this.segments.push({ key, since: atS, until: atS, element });
      this.timeline.append(element);
      if (this.segments.length > 40) this.segments.shift().element.remove();
    }
    for (const segment of this.segments) {
      segment.element.style.flexGrow = String(Math.max(0.25, segment.until - segment.since));
      segment.element.title = `${segment.key.replace("@", " at ").replaceAll("_", " ")}: ${seconds(segment.until - segment.since)}`;
    }
  }
}

// By what a stream is found elsewhere: its id in the logs of all its processes, and its trace.
function streamDetails(stream, traceUrl) {
  const traceId = /^[0-9a-f]{32}$/.test(stream.trace_id || "") ? stream.trace_id : "";
  const shownTrace = traceId && traceUrl
    ? el("a", { className: "trace mono", href: traceUrl.replaceAll("{trace_id}", traceId), target: "_blank", rel: "noopener noreferrer",
      textContent: traceId })
    : el("span", { className: traceId ? "trace mono" : "faint", textContent: traceId || "not traced" });
  return el("td", { colSpan: 12 },
    el("span", { className: "label", textContent: "id " }), el("code", { className: "stream-id", textContent: stream.id }),
    el("span", { className: "label", textContent: " log lines " }), el("code", { textContent: `grep ${stream.id} onward.log` }),
    el("span", { className: "label", textContent: " trace " }), shownTrace);
}

function stateOf(stream, request) {
  if (stream.is_paused) return "resuming";
  return request ? request.state : "waiting";
}

function slotLegend() {
  return el("div", { className: "legend" }, ...Object.entries(SLOT_STATES).map(([state, name]) =>
    el("span", {}, el("i", { className: "s-" + state }), name)));
}

function resize(parent, count) {
  while (parent.children.length < count) parent.append(document.createElement("i"));
  while (parent.children.length > count) parent.lastChild.remove();
}

const cell = (text, className = "") => el("td", { className, textContent: text });
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
// Ids are long; their ends tell them apart.
const short = (id) => (id && id.length > 16 ? id.slice(0, 10) + "…" + id.slice(-4) : id || "–");
