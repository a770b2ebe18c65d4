// A weather agent in plain Node.js: `fetch`, a stream, a tool loop. No package, and nothing of spangrad.
//
//     OPENAI_BASE_URL=http://127.0.0.1:8100/v1 node agent.mjs "Is it dry in Oslo?"
//
// It talks to whatever OPENAI_BASE_URL names and prints the answer.

const BASE_URL = process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8100/v1";
const API_KEY = process.env.OPENAI_API_KEY ?? "none";
const MODEL = process.env.OPENAI_MODEL ?? "policy";
const MAX_CALLS = 5; // model calls that a question may take

const TOOLS = [
  {
    type: "function",
    function: {
      name: "look",
      description: "Today's weather in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const WEATHER = { "Orléans": "dry", "Oslo": "snow" };

function look({ city }) {
  return `${city}: ${WEATHER[city] ?? "unknown"}`;
}

// The data of each server-sent event of a response.
async function* events(response) {
  const decoder = new TextDecoder();
  let buffer = "";
  for await (const bytes of response.body) {
    buffer += decoder.decode(bytes, { stream: true });
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const line = buffer.slice(0, end);
      buffer = buffer.slice(end + 2);
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// One streamed call; gives the assistant's message.
async function ask(messages) {
  const response = await fetch(`${BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${API_KEY}` },
    body: JSON.stringify({ model: MODEL, messages, tools: TOOLS, stream: true, temperature: 0.7 }),
  });
  if (!response.ok) throw new Error(`the model answered ${response.status}: ${await response.text()}`);
  let content = "";
  const calls = [];
  for await (const chunk of events(response)) {
    const delta = chunk.choices[0]?.delta ?? {};
    content += delta.content ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } });
      call.function.name += part.function?.name ?? "";
      call.function.arguments += part.function?.arguments ?? "";
    }
  }
  return calls.length
    ? { role: "assistant", content: content || null, tool_calls: calls }
    : { role: "assistant", content };
}

async function run(question) {
  const messages = [{ role: "user", content: question }];
  for (let calls = 0; calls < MAX_CALLS; calls++) {
    const message = await ask(messages);
    messages.push(message);
    if (!message.tool_calls) return message.content;
    for (const call of message.tool_calls) {
      const result = look(JSON.parse(call.function.arguments));
      messages.push({ role: "tool", tool_call_id: call.id, content: result });
    }
  }
  return "";
}

console.log(await run(process.argv[2] ?? "Is it dry in Orléans?"));
