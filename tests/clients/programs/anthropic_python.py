"""Anthropic's client: counted, whole and streamed."""

import sys

from anthropic import Anthropic

GREEDY = {"temperature": 0}

base_url, model = sys.argv[1:]
client = Anthropic(base_url=base_url, api_key="none")
messages = [{"role": "user", "content": "Name a colour."}]
counted = client.messages.count_tokens(model=model, messages=messages)
whole = client.messages.create(model=model, messages=messages, max_tokens=12, extra_body=GREEDY)
usage = whole.usage
assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
with client.messages.stream(model=model, messages=messages, max_tokens=12, extra_body=GREEDY) as stream:
    text = "".join(stream.text_stream)
assert text == whole.content[0].text
print("ok")
