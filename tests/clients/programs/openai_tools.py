"""A tool's whole loop with the official client: offered, result returned, answered. A small model may not call it."""

import json
import sys

from openai import OpenAI

base_url, model = sys.argv[1:]
client = OpenAI(base_url=f"{base_url}/v1", api_key="none")
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
first = client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=64, temperature=0)
message = first.choices[0].message
for call in message.tool_calls or []:
    json.loads(call.function.arguments)
assert (first.choices[0].finish_reason == "tool_calls") == bool(message.tool_calls)

call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
messages += [
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees."},
]
second = client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=32, temperature=0)
assert second.choices[0].message.content or second.choices[0].message.tool_calls
print("ok")
