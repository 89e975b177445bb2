// Vercel's AI SDK against our server, at SERVER_URL, in four dialects. Run by tests/e2e/test_node_clients.py.
import assert from "node:assert/strict";
import test from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embedMany, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

globalThis.AI_SDK_LOG_WARNINGS = false;
const url = process.env.SERVER_URL;
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const anthropic = createAnthropic({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "parallm", baseURL, includeUsage: true, supportsStructuredOutputs: true });
const dialects = {
  "chat completions": (name) => openai.chat(name),
  "responses": (name) => openai.responses(name),
  "messages": (name) => anthropic(name),
  "OpenAI-compatible": (name) => compatible(name),
};
const city = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const common = { maxRetries: 0, temperature: 0, prompt: "hello" };

function weather(asked) {
  return tool({
    description: "The weather in a city",
    inputSchema: jsonSchema(city),
    execute: async ({ city }) => (asked.push(city), `sunny in ${city}`),
  });
}

for (const [name, dialect] of Object.entries(dialects)) {
  const model = dialect("tiny");

  test(`${name}: a stream is the same answer`, async () => {
    const asked = { ...common, model, maxOutputTokens: 12, system: "Be kind." };
    const whole = await generateText(asked);
    assert.ok(whole.text.length > 0);
    assert.ok(whole.usage.inputTokens > 0);
    assert.ok(whole.usage.outputTokens > 0 && whole.usage.outputTokens <= 12);
    const stream = streamText(asked);
    const pieces = [];
    for await (const piece of stream.textStream) pieces.push(piece);
    assert.equal(pieces.join(""), whole.text);
    assert.ok(pieces.length > 1);
    assert.equal(await stream.finishReason, whole.finishReason);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  });

  test(`${name}: a conversation`, async () => {
    const messages = [
      { role: "user", content: "hello" },
      { role: "assistant", content: "good day" },
      { role: "user", content: [{ type: "text", text: "and then?" }] },
    ];
    const { prompt, ...rest } = common;
    assert.ok((await generateText({ ...rest, model, maxOutputTokens: 8, messages })).text.length > 0);
  });

  test(`${name}: a tool runs, and its result is sent`, async () => {
    for (const send of [generateText, streamText]) {
      const asked = [];
      const answer = send({
        ...common,
        model,
        maxOutputTokens: 200,
        tools: { weather: weather(asked) },
        toolChoice: { type: "tool", toolName: "weather" },
        stopWhen: stepCountIs(2),
      });
      if (send === streamText) await answer.consumeStream();
      const steps = await (await answer).steps;
      assert.equal(steps.length, 2);
      assert.equal(steps[0].toolCalls[0].toolName, "weather");
      assert.match(steps[0].toolResults[0].output, /^sunny in (Paris|Rome)$/);
      assert.ok(asked.length >= 2 && asked.every((one) => ["Paris", "Rome"].includes(one)));
    }
  });

  test(`${name}: structured output, whole and streamed`, async () => {
    const asked = { ...common, model, maxOutputTokens: 200, output: Output.object({ schema: jsonSchema(city) }) };
    const whole = await generateText(asked);
    assert.ok(["Paris", "Rome"].includes(whole.output.city));
    const stream = streamText(asked);
    let last;
    for await (const part of stream.partialOutputStream) last = part;
    assert.deepEqual(last, whole.output);
  });

  test(`${name}: errors have a status and our words`, async () => {
    await assert.rejects(generateText({ ...common, model: dialect("nobody"), maxOutputTokens: 4 }), (error) => {
      assert.ok(APICallError.isInstance(error));
      assert.equal(error.statusCode, 404);
      assert.match(error.message, /there is no model/);
      return true;
    });
    const long = "x".repeat(9000);
    await assert.rejects(generateText({ ...common, model, prompt: long, maxOutputTokens: 4 }), (error) => {
      assert.equal(error.statusCode, 400);
      assert.match(error.message, /maximum context length/);
      return true;
    });
    const failures = [];
    const stream = streamText({ ...common, model, prompt: long, maxOutputTokens: 4, onError: ({ error }) => failures.push(error) });
    await stream.consumeStream({ onError: () => {} });
    assert.equal(failures[0].statusCode, 400);
  });

  test(`${name}: a client that leaves frees its row`, async () => {
    const running = async () => (await (await fetch(`${url}/debug/metrics`)).json()).running;
    const controller = new AbortController();
    const stream = streamText({ ...common, model, maxOutputTokens: 1900, abortSignal: controller.signal, onError: () => {} });
    for await (const _ of stream.textStream) break;
    controller.abort();
    for (let tries = 0; tries < 100 && (await running()) > 0; tries++) await new Promise((done) => setTimeout(done, 20));
    assert.equal(await running(), 0);
  });
}

test("completions of texts", async () => {
  const asked = { ...common, model: openai.completion("tiny"), maxOutputTokens: 8 };
  const whole = await generateText(asked);
  const stream = streamText(asked);
  assert.equal(await stream.text, whole.text);
});

test("embeddings", async () => {
  const { embeddings } = await embedMany({ model: openai.embedding("words"), values: ["a text", "another"], maxRetries: 0 });
  assert.equal(embeddings.length, 2);
  assert.equal(embeddings[0].length, embeddings[1].length);
});
