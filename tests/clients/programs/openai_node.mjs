// The official Node client: whole and streamed.
import assert from "node:assert";
import OpenAI from "openai";

const [baseUrl, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "none" });
const body = { model, messages: [{ role: "user", content: "Name a colour." }], max_tokens: 12, temperature: 0 };
const whole = await client.chat.completions.create(body);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);
await assert.rejects(client.chat.completions.create({ ...body, top_p: 7 }), { status: 400, param: "top_p" });
console.log("ok");
