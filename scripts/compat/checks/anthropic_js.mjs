// The `@anthropic-ai/sdk` package.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { ABSENT_MODEL, CAPITAL, check, clientLacks, model, url } from "./checklist.mjs";

const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0, timeout: 300_000 });
const messages = [{ role: "user", content: CAPITAL }];
const fair = { model, temperature: 0, max_tokens: 60 };
const schema = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
const tools = [{ name: "get_weather", description: "The weather of a city", input_schema: schema }];

await check("plain", async () => {
  const answer = await client.messages.create({ messages, ...fair });
  assert.match(answer.content[0].text, /Paris/);
  assert.equal(answer.stop_reason, "end_turn");
});

await check("streamed", async () => {
  const whole = await client.messages.create({ messages, ...fair });
  const stream = client.messages.stream({ messages, ...fair });
  let text = "";
  stream.on("text", (delta) => (text += delta));
  const final = await stream.finalMessage();
  assert.equal(text, whole.content[0].text);
  assert.equal(final.content[0].text, text);
});

await check("tools", async () => {
  const answer = await client.messages.create({ messages, tools, tool_choice: { type: "any" }, ...fair });
  const call = answer.content.find((block) => block.type === "tool_use");
  assert.ok(["Paris", "Rome"].includes(call.input.city));
  const result = { type: "tool_result", tool_use_id: call.id, content: "It is sunny." };
  const all = [...messages, { role: "assistant", content: answer.content }, { role: "user", content: [result] }];
  const next = await client.messages.create({ messages: all, tools, tool_choice: { type: "none" }, ...fair });
  assert.equal(next.content[0].type, "text");
});

await check("tools, streamed", async () => {
  const tool_choice = { type: "tool", name: "get_weather" };
  const stream = client.messages.stream({ messages, tools, tool_choice, ...fair });
  let text = "";
  stream.on("inputJson", (delta) => (text += delta));
  const final = await stream.finalMessage();
  assert.deepEqual(final.content.at(-1).input, JSON.parse(text));
});

await check("structured", async () => {
  const format = { type: "json_schema", schema: { ...schema, additionalProperties: false } };
  const answer = await client.messages.create({ messages, output_config: { format }, ...fair });
  assert.ok(["Paris", "Rome"].includes(JSON.parse(answer.content[0].text).city));
});

await check("count_tokens", async () => {
  const counted = await client.messages.countTokens({ model, messages });
  const { usage } = await client.messages.create({ messages, ...fair });
  assert.equal(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens ?? 0));
});

await check("errors", async () => {
  const ask = (more) => client.messages.create({ messages, ...fair, ...more });
  await assert.rejects(ask({ model: ABSENT_MODEL }), (fault) => fault instanceof Anthropic.NotFoundError);
  await assert.rejects(ask({ temperature: -1 }), (fault) => fault instanceof Anthropic.BadRequestError);
});

clientLacks("embeddings");
