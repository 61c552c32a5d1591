// Vercel's AI SDK over its OpenAI-compatible provider: whole and streamed.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [baseUrl, model] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "kitfox", baseURL: `${baseUrl}/v1`, includeUsage: true });
const options = { model: provider(model), prompt: "Name a colour.", maxOutputTokens: 12, temperature: 0 };
const whole = await generateText(options);
const streamed = streamText(options);
assert.equal(await streamed.text, whole.text);
assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
console.log("ok");
