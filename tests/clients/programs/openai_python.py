"""The official client: whole, streamed, logprobs, several answers, errors."""

import sys

from openai import BadRequestError, OpenAI

base_url, model = sys.argv[1:]
client = OpenAI(base_url=f"{base_url}/v1", api_key="none")

assert model in [card.id for card in client.models.list()]

completion = client.completions.create(model=model, prompt="A quick brown fox", max_tokens=8, temperature=0, logprobs=2)
assert completion.usage.completion_tokens == 8
assert "".join(completion.choices[0].logprobs.tokens) == completion.choices[0].text

messages = [{"role": "user", "content": "Name a colour."}]
whole = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0, n=2)
assert len(whole.choices) == 2
assert whole.choices[0].message.content == whole.choices[1].message.content

stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
)
text, usage = "", None
for chunk in stream:
    text += "".join(choice.delta.content or "" for choice in chunk.choices)
    usage = chunk.usage or usage
assert text == whole.choices[0].message.content
assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

param = None
try:
    client.chat.completions.create(model=model, messages=messages, top_p=7)
except BadRequestError as error:
    param = error.param
assert param == "top_p"

response = client.responses.create(model=model, input="Say hello.", max_output_tokens=8, temperature=0)
assert response.output_text
events = [event.type for event in client.responses.create(model=model, input="Hi.", max_output_tokens=4, stream=True)]
assert events[0] == "response.created"
assert events[-1] in ("response.completed", "response.incomplete")

vectors = client.embeddings.create(model=model, input=["a fox", "a dog"])
assert len(vectors.data) == 2
assert len(vectors.data[0].embedding) == len(vectors.data[1].embedding) > 100
print("ok")
