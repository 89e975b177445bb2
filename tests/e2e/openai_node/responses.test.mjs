// `responses` of npm's `openai` against our server, at OPENAI_BASE_URL. Run by tests/e2e/test_node_clients.py.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ apiKey: "none", maxRetries: 0, timeout: 120_000 });
const ask = { model: "default", input: "hello", max_output_tokens: 12, temperature: 0 };
const weather = {
  type: "function",
  name: "get_weather",
  strict: true,
  parameters: {
    type: "object",
    properties: { city: { enum: ["Paris", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  },
};

test("create, and a stream of the same answer", async () => {
  const whole = await client.responses.create(ask);
  assert.equal(whole.object, "response");
  assert.ok(whole.output_text.length > 0);
  const events = [];
  for await (const event of await client.responses.create({ ...ask, stream: true })) events.push(event);
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, number) => number));
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
  assert.equal(events.at(-1).type, `response.${whole.status}`);
  assert.equal(events.at(-1).response.usage.output_tokens, whole.usage.output_tokens);
});

test("the stream helper, with a tool", async () => {
  const tool_choice = { type: "function", name: "get_weather" };
  const stream = client.responses.stream({ ...ask, max_output_tokens: 200, tools: [weather], tool_choice });
  let text = "";
  stream.on("response.function_call_arguments.delta", (event) => (text += event.delta));
  const final = await stream.finalResponse();
  assert.equal(final.output[0].type, "function_call");
  assert.equal(final.output[0].arguments, text);
  assert.ok(["Paris", "Rome"].includes(JSON.parse(text).city));
  const output = { type: "function_call_output", call_id: final.output[0].call_id, output: "sunny" };
  const next = await client.responses.create({ ...ask, input: [output], previous_response_id: final.id });
  assert.equal(next.output[0].type, "message");
});

test("parse", async () => {
  const schema = {
    type: "object",
    properties: { color: { enum: ["red", "green"] } },
    required: ["color"],
    additionalProperties: false,
  };
  const text = { format: { type: "json_schema", name: "thing", strict: true, schema } };
  const answer = await client.responses.parse({ ...ask, max_output_tokens: 100, text });
  assert.ok(["red", "green"].includes(answer.output_parsed.color));
});

test("stored responses", async () => {
  const answer = await client.responses.create(ask);
  assert.equal((await client.responses.retrieve(answer.id)).output_text, answer.output_text);
  const items = [];
  for await (const item of client.responses.inputItems.list(answer.id)) items.push(item);
  assert.equal(items[0].content[0].text, "hello");
  await client.responses.delete(answer.id);
  await assert.rejects(client.responses.retrieve(answer.id), OpenAI.NotFoundError);
  await assert.rejects(client.responses.create({ ...ask, previous_response_id: answer.id }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.code, "previous_response_not_found");
    return true;
  });
  const running = await client.responses.create({ ...ask, max_output_tokens: 1900, ignore_eos: true, background: true });
  assert.equal((await client.responses.cancel(running.id)).status, "cancelled");
});
