// The page itself: asks for a key where the server wants one, then shows one of its views.

import { byId, el, setText } from "./dom.js";
import { getJson, key } from "./server.js";
import { showLive } from "./live.js";
import { showPlayground } from "./playground.js";

const VIEWS = { playground: ["Playground", showPlayground], live: ["Live", showLive] };
let leave = () => {};
let session = null;

async function start() {
  try {
    session = await getJson("ui/session");
    session.model = await servedModel();
  } catch (error) {
    if (error.status === 401) showKeyForm(key.get() ? "This key is not accepted." : "");
    else showTrouble(error);
    return;
  }
  setText(byId("model"), session.model);
  byId("model").title = `${session.model} · Onward ${session.version}`;
  byId("forget-key").hidden = !key.get();
  byId("tabs").hidden = false;
  byId("tabs").replaceChildren(
    ...Object.entries(VIEWS).map(([name, [title]]) => el("a", { href: "#" + name, textContent: title, id: "tab-" + name })),
    el("a", { href: "docs", textContent: "API" }),
  );
  show();
}

async function servedModel() {
  try {
    return String((await getJson("v1/models")).data[0].id);
  } catch {
    return ""; // a router without instances
  }
}

function show() {
  if (session === null) return;
  const first = session.serves_clients ? "playground" : "live";
  const name = location.hash.slice(1) in VIEWS ? location.hash.slice(1) : first;
  for (const other of Object.keys(VIEWS)) {
    if (other === name) byId("tab-" + other).setAttribute("aria-current", "page");
    else byId("tab-" + other).removeAttribute("aria-current");
  }
  leave();
  leave = VIEWS[name][1](byId("main"), session) || (() => {});
}

function showKeyForm(problem) {
  byId("tabs").hidden = true;
  const input = el("input", { id: "key", type: "password", autocomplete: "off", spellcheck: false, required: true });
  const form = el("form", { className: "card key-form", id: "key-form", onsubmit: (event) => {
    event.preventDefault();
    key.set(input.value.trim());
    start();
  } },
  el("h1", { textContent: "API key" }),
  el("p", { className: "faint", textContent: "This server asks for a key. It is kept in this tab until the tab is closed." }),
  el("label", { for: "key", textContent: "Key" }), input,
  el("p", { className: "problem", role: "status", textContent: problem }),
  el("button", { className: "primary", textContent: "Continue" }));
  byId("main").replaceChildren(form);
  input.focus();
}

function showTrouble(error) {
  byId("main").replaceChildren(el("div", { className: "card key-form" },
    el("h1", { textContent: "No answer" }),
    el("p", { className: "problem", textContent: error.message }),
    el("button", { className: "primary", textContent: "Try again", onclick: start })));
}

byId("forget-key").addEventListener("click", () => { leave(); leave = () => {}; key.forget(); session = null; start(); });
addEventListener("hashchange", show);
start();
