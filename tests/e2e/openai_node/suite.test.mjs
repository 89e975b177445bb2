// The `openai` package of npm against our server, at OPENAI_BASE_URL. Run by tests/e2e/test_node_clients.py.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ apiKey: "none", maxRetries: 0, timeout: 120_000 });
const hello = [{ role: "user", content: "hello" }];
const ask = { model: "default", messages: hello, max_tokens: 12, temperature: 0 };
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Paris", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

const textOf = (chunks, index = 0) =>
  chunks
    .flatMap((chunk) => chunk.choices)
    .filter((choice) => choice.index === index)
    .map((choice) => choice.delta?.content ?? choice.text ?? "")
    .join("");

test("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.equal(ids.length, 1);
  assert.equal((await client.models.retrieve(ids[0])).id, ids[0]);
  await assert.rejects(client.models.retrieve("no-such-model"), OpenAI.NotFoundError);
});

test("chat, usage and request id", async () => {
  const { data, response } = await client.chat.completions.create({ ...ask, ignore_eos: true }).withResponse();
  assert.equal(data.object, "chat.completion");
  assert.equal(data.choices[0].message.role, "assistant");
  assert.equal(data.choices[0].finish_reason, "length");
  assert.equal(data.usage.completion_tokens, 12);
  assert.equal(data.usage.total_tokens, data.usage.prompt_tokens + 12);
  assert.ok(response.headers.get("x-request-id"));
  assert.equal(data._request_id, response.headers.get("x-request-id"));
});

test("a stream is the same answer, with usage at its end when asked for", async () => {
  const whole = await client.chat.completions.create(ask);
  const chunks = await collect(await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } }));
  assert.equal(textOf(chunks), whole.choices[0].message.content);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.deepEqual(chunks.at(-1).usage, whole.usage);
  assert.equal(chunks.at(-2).choices[0].finish_reason, whole.choices[0].finish_reason);
});

test("the stream helper and its events", async () => {
  const stream = client.chat.completions.stream({ ...ask, stop: undefined });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(text, final.choices[0].message.content);
});

test("n, whole and streamed, with a seed", async () => {
  const sampled = { ...ask, n: 3, temperature: 1.3, seed: 5 };
  const whole = await client.chat.completions.create(sampled);
  const texts = whole.choices.map((choice) => choice.message.content);
  assert.ok(new Set(texts).size > 1);
  const chunks = await collect(await client.chat.completions.create({ ...sampled, stream: true }));
  assert.deepEqual([0, 1, 2].map((index) => textOf(chunks, index)), texts);
  const again = await client.chat.completions.create(sampled);
  assert.deepEqual(again.choices.map((choice) => choice.message.content), texts);
});

test("stop", async () => {
  const free = (await client.chat.completions.create({ ...ask, max_tokens: 24, ignore_eos: true })).choices[0].message.content;
  const stop = free.slice(Math.floor(free.length / 2)).slice(0, 2);
  const stopped = await client.chat.completions.create({ ...ask, max_tokens: 24, ignore_eos: true, stop: [stop] });
  assert.equal(stopped.choices[0].message.content, free.slice(0, free.indexOf(stop)));
  assert.equal(stopped.choices[0].finish_reason, "stop");
});

test("logprobs, whole and streamed", async () => {
  const wanted = { ...ask, logprobs: true, top_logprobs: 2 };
  const whole = (await client.chat.completions.create(wanted)).choices[0].logprobs.content;
  assert.ok(whole.length > 0);
  assert.ok(whole.every((entry) => entry.top_logprobs.length === 2 && entry.logprob <= 0));
  const chunks = await collect(await client.chat.completions.create({ ...wanted, stream: true }));
  const streamed = chunks.flatMap((chunk) => chunk.choices).flatMap((choice) => choice.logprobs?.content ?? []);
  assert.deepEqual(streamed.map((entry) => entry.token), whole.map((entry) => entry.token));
});

test("JSON schema", async () => {
  const schema = {
    type: "object",
    properties: { color: { enum: ["red", "green"] }, count: { type: "integer", minimum: 1, maximum: 9 } },
    required: ["color", "count"],
    additionalProperties: false,
  };
  const response_format = { type: "json_schema", json_schema: { name: "thing", strict: true, schema } };
  const answer = await client.chat.completions.parse({ ...ask, max_tokens: 100, temperature: 1, seed: 1, response_format });
  const thing = answer.choices[0].message.parsed;
  assert.ok(["red", "green"].includes(thing.color));
  assert.ok(thing.count >= 1 && thing.count <= 9);
});

test("tools: a named one, whole and streamed", async () => {
  const tool_choice = { type: "function", function: { name: "get_weather" } };
  const wanted = { ...ask, max_tokens: 200, tools: [weather], tool_choice };
  const whole = (await client.chat.completions.create(wanted)).choices[0].message.tool_calls;
  assert.equal(whole.length, 1);
  assert.equal(whole[0].function.name, "get_weather");
  assert.ok(["Paris", "Rome"].includes(JSON.parse(whole[0].function.arguments).city));
  const streamed = (await client.chat.completions.stream(wanted).finalChatCompletion()).choices[0].message.tool_calls;
  assert.equal(streamed[0].function.name, "get_weather");
  assert.deepEqual(JSON.parse(streamed[0].function.arguments), JSON.parse(whole[0].function.arguments));
});

test("tools: the runner calls the function and sends its result", async () => {
  const asked = [];
  const run = { ...weather.function, parse: JSON.parse, function: ({ city }) => (asked.push(city), "sunny") };
  const runner = client.chat.completions.runTools(
    { ...ask, max_tokens: 200, tools: [{ type: "function", function: run }], tool_choice: "required" },
    { maxChatCompletions: 1 },
  );
  await runner.done();
  assert.ok(asked.length >= 1 && asked.every((city) => ["Paris", "Rome"].includes(city)));
});

test("completions, whole and streamed", async () => {
  const wanted = { model: "default", prompt: "the and", max_tokens: 8, temperature: 0 };
  const whole = await client.completions.create(wanted);
  assert.equal(whole.object, "text_completion");
  const chunks = await collect(await client.completions.create({ ...wanted, stream: true }));
  assert.equal(textOf(chunks), whole.choices[0].text);
  const two = await client.completions.create({ ...wanted, prompt: ["the and", "the and"] });
  assert.deepEqual(two.choices.map((choice) => choice.text), [whole.choices[0].text, whole.choices[0].text]);
});

test("errors are typed", async () => {
  await assert.rejects(client.chat.completions.create({ ...ask, model: "gpt-4" }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, "model_not_found");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ ...ask, temperature: 9 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    assert.equal(error.type, "invalid_request_error");
    assert.ok(error.requestID);
    return true;
  });
  const long = [{ role: "user", content: "x".repeat(9000) }];
  await assert.rejects(client.chat.completions.create({ ...ask, messages: long, stream: true }), (error) => {
    assert.equal(error.code, "context_length_exceeded");
    return true;
  });
});

test("many at once", async () => {
  const answers = await Promise.all(Array.from({ length: 12 }, () => client.chat.completions.create(ask)));
  assert.equal(new Set(answers.map((answer) => answer.choices[0].message.content)).size, 1);
});

test("a client that leaves frees its row", async () => {
  const metrics = new URL("/debug/metrics", process.env.OPENAI_BASE_URL);
  const running = async () => (await (await fetch(metrics)).json()).running;
  const stream = await client.chat.completions.create({ ...ask, max_tokens: 1900, ignore_eos: true, stream: true });
  for await (const _ of stream) break;
  stream.controller.abort();
  for (let tries = 0; tries < 100 && (await running()) > 0; tries++) await new Promise((done) => setTimeout(done, 20));
  assert.equal(await running(), 0);
});
