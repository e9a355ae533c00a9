// Conversations, kept in this browser (localStorage), one entry each. The oldest are dropped when there are too many.
//
// conversation: {id, updated, settings, messages}
// message: {role, content, reasoning, toolCalls, marks, stats, stream, end, error}
//   stream, while an answer is not complete: {body, lastEventId}, all that it takes to go on with it after a reload

const PREFIX = "onward.conversation.";
const CURRENT = "onward.current";
const MAX_CONVERSATIONS = 50;

export const DEFAULT_SETTINGS = {
  system: "", temperature: 0.7, top_p: 1, max_tokens: 512, seed: "", tools: "", schema: "", logprobs: false,
};

export function list() {
  const found = [];
  for (let index = 0; index < localStorage.length; index += 1) {
    const name = localStorage.key(index);
    if (name.startsWith(PREFIX)) {
      const conversation = read(name.slice(PREFIX.length));
      if (conversation) found.push(conversation);
    }
  }
  return found.sort((one, other) => other.updated - one.updated);
}

function read(id) {
  try {
    const conversation = JSON.parse(localStorage.getItem(PREFIX + id));
    return conversation && Array.isArray(conversation.messages) ? conversation : null;
  } catch {
    return null;
  }
}

export function create(settings = DEFAULT_SETTINGS) {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  const id = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, updated: Date.now(), settings: { ...DEFAULT_SETTINGS, ...settings }, messages: [] };
}

export function save(conversation) {
  const text = JSON.stringify(conversation);
  for (const old of list().slice(MAX_CONVERSATIONS - 1)) if (old.id !== conversation.id) remove(old.id);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, text);
      return;
    } catch {
      const others = list().filter((other) => other.id !== conversation.id);
      if (!others.length) return;
      remove(others[others.length - 1].id);
    }
  }
}

export const remove = (id) => localStorage.removeItem(PREFIX + id);

// The conversation that this tab shows.
export function current() {
  const id = sessionStorage.getItem(CURRENT);
  const conversation = (id && read(id)) || null;
  if (conversation) conversation.settings = { ...DEFAULT_SETTINGS, ...conversation.settings };
  return conversation;
}

export const setCurrent = (id) => sessionStorage.setItem(CURRENT, id);

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  return first ? first.content.slice(0, 60) : "New conversation";
}
