"""litellm in front of an OpenAI-compatible server."""

import sys

import litellm

base_url, model = sys.argv[1:]
options = {
    "model": f"openai/{model}",
    "api_base": f"{base_url}/v1",
    "api_key": "none",
    "max_tokens": 8,
    "temperature": 0,
}
messages = [{"role": "user", "content": "Name a colour."}]
whole = litellm.completion(messages=messages, **options)
pieces = litellm.completion(messages=messages, stream=True, **options)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
print("ok")
