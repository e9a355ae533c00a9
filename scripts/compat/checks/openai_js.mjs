// The `openai` package for JavaScript.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ABSENT_MODEL, baseURL, CAPITAL, check, model } from "./checklist.mjs";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 300_000 });
const messages = [{ role: "user", content: CAPITAL }];
const fair = { model, temperature: 0, max_tokens: 60 };
const City = z.object({ name: z.string(), country: z.string() });
const parameters = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather", parameters } }];

await check("plain", async () => {
  const answer = await client.chat.completions.create({ messages, ...fair });
  assert.match(answer.choices[0].message.content, /Paris/);
});

await check("streamed", async () => {
  const whole = await client.chat.completions.create({ messages, ...fair });
  let text = "";
  for await (const chunk of await client.chat.completions.create({ messages, stream: true, ...fair })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  assert.equal(text, whole.choices[0].message.content);
});

await check("stream helper", async () => {
  const stream = client.chat.completions.stream({ messages, ...fair });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  assert.equal(await stream.finalContent(), text);
});

await check("tools", async () => {
  const answer = await client.chat.completions.create({ messages, tools, tool_choice: "required", ...fair });
  const [call] = answer.choices[0].message.tool_calls;
  assert.ok(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city));
  const result = { role: "tool", tool_call_id: call.id, content: "It is sunny." };
  const all = [...messages, answer.choices[0].message, result];
  const next = await client.chat.completions.create({ messages: all, tools, tool_choice: "none", ...fair });
  assert.ok(next.choices[0].message.content);
});

await check("tools, streamed", async () => {
  const stream = client.chat.completions.stream({ messages, tools, tool_choice: "required", ...fair });
  const { choices } = await stream.finalChatCompletion();
  assert.ok(["Paris", "Rome"].includes(JSON.parse(choices[0].message.tool_calls[0].function.arguments).city));
});

await check("structured", async () => {
  const response_format = zodResponseFormat(City, "city");
  const answer = await client.chat.completions.parse({ messages, response_format, ...fair, max_tokens: 200 });
  City.parse(answer.choices[0].message.parsed);
});

await check("embeddings", async () => {
  const { data } = await client.embeddings.create({ model, input: ["the sea", "the sea", "an oak"] });
  assert.deepEqual(data[0].embedding, data[1].embedding);
  assert.notDeepEqual(data[0].embedding, data[2].embedding);
});

await check("errors", async () => {
  const ask = (more) => client.chat.completions.create({ messages, ...fair, ...more });
  await assert.rejects(ask({ model: ABSENT_MODEL }), (fault) => fault instanceof OpenAI.NotFoundError);
  await assert.rejects(ask({ temperature: -1 }), { status: 400, param: "temperature" });
});

await check("completions", async () => {
  const answer = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 8, logprobs: 1 });
  assert.equal(answer.choices[0].logprobs.tokens.length, 8);
});

await check("responses", async () => {
  const first = await client.responses.create({ model, input: CAPITAL, temperature: 0, max_output_tokens: 60 });
  assert.match(first.output_text, /Paris/);
  const next = await client.responses.create({
    model, input: "And of Italy?", previous_response_id: first.id, max_output_tokens: 20,
  });
  assert.equal((await client.responses.retrieve(next.id)).output_text, next.output_text);
});

await check("responses, streamed", async () => {
  const stream = client.responses.stream({ model, input: CAPITAL, temperature: 0, max_output_tokens: 60 });
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  assert.equal((await stream.finalResponse()).output_text, text);
});

await check("responses, structured", async () => {
  const text = { format: zodTextFormat(City, "city") };
  const answer = await client.responses.parse({ model, input: CAPITAL, text, max_output_tokens: 200 });
  City.parse(answer.output_parsed);
});

await check("a stream that is left early", async () => {
  const stream = await client.chat.completions.create({ messages, stream: true, ...fair });
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta?.content) break;
  }
  assert.ok(stream.controller.signal.aborted);
});

await check("models", async () => {
  const names = [];
  for await (const one of client.models.list()) names.push(one.id);
  assert.ok(names.includes(model));
});
