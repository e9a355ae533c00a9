// Vercel's `ai` with `@ai-sdk/openai-compatible`.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";
import { ABSENT_MODEL, baseURL, CAPITAL, check, model as name } from "./checklist.mjs";

const provider = createOpenAICompatible({
  name: "onward", baseURL, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const model = provider(name);
const fair = { temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const schema = z.object({ name: z.string(), country: z.string() });
const weather = ai.tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});

await check("plain", async () => {
  const { text, usage, finishReason } = await ai.generateText({ model, prompt: CAPITAL, ...fair });
  assert.match(text, /Paris/);
  assert.equal(finishReason, "stop");
  assert.ok(usage.outputTokens > 0);
});

await check("streamed", async () => {
  const whole = await ai.generateText({ model, prompt: CAPITAL, ...fair });
  const result = ai.streamText({ model, prompt: CAPITAL, ...fair });
  let text = "";
  for await (const part of result.textStream) text += part;
  assert.equal(text, whole.text);
  assert.ok((await result.usage).outputTokens > 0);
});

await check("tools", async () => {
  const result = await ai.generateText({
    model, prompt: "What is the weather in Paris?", tools: { weather }, toolChoice: "required", ...fair,
  });
  assert.match(result.toolResults[0].output, /sunny/);
});

await check("tools, streamed, in several steps", async () => {
  const result = ai.streamText({
    model, prompt: "What is the weather in Paris?", tools: { weather }, stopWhen: ai.stepCountIs(2), ...fair,
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  await result.consumeStream();
  const steps = await result.steps;
  assert.equal(steps.length, 2);
  assert.match(steps[0].toolResults[0].output, /sunny/);
  assert.ok(steps[1].text);
});

await check("structured", async () => {
  const output = ai.Output.object({ schema });
  const result = await ai.generateText({ model, prompt: CAPITAL, output, ...fair, maxOutputTokens: 200 });
  schema.parse(result.output);
});

await check("structured, streamed", async () => {
  const output = ai.Output.object({ schema });
  const result = ai.streamText({ model, prompt: CAPITAL, output, ...fair, maxOutputTokens: 200 });
  let last;
  for await (const part of result.partialOutputStream) last = part;
  schema.parse(last);
});

await check("embeddings", async () => {
  const { embeddings } = await ai.embedMany({
    model: provider.embeddingModel(name), values: ["the sea", "the sea", "an oak"],
  });
  assert.deepEqual(embeddings[0], embeddings[1]);
  assert.notDeepEqual(embeddings[0], embeddings[2]);
});

await check("errors", async () => {
  const ask = (more) => ai.generateText({ model, prompt: CAPITAL, ...fair, ...more });
  await assert.rejects(ask({ model: provider(ABSENT_MODEL) }), (fault) =>
    ai.APICallError.isInstance(fault) && fault.statusCode === 404 && fault.message.includes(ABSENT_MODEL));
  await assert.rejects(ask({ temperature: -1 }), { statusCode: 400 });
});

await check("completions", async () => {
  const { text } = await ai.generateText({
    model: provider.completionModel(name), prompt: "Once upon a time", ...fair,
  });
  assert.ok(text);
});
