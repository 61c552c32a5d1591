"""Structured answers with the official client: parsed into classes, whole, streamed, as calls, and as a response."""

import json
import sys
from enum import Enum

from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

base_url, model = sys.argv[1:]
client = OpenAI(base_url=f"{base_url}/v1", api_key="none")
messages = [{"role": "user", "content": "Describe a red fox."}]


class Colour(Enum):
    red = "red"
    brown = "brown"


class Tail(BaseModel):
    length_cm: int = Field(ge=1, le=99)


class Animal(BaseModel):
    name: str = Field(max_length=12)
    colour: Colour
    tail: Tail
    nicknames: list[Colour] = Field(max_length=2)


parsed = client.chat.completions.parse(
    model=model, messages=messages, response_format=Animal, max_tokens=200, temperature=0
)
animal = parsed.choices[0].message.parsed
assert isinstance(animal, Animal)
assert animal.colour in Colour

with client.chat.completions.stream(
    model=model, messages=messages, response_format=Animal, max_tokens=200, temperature=0
) as stream:
    for _ in stream:
        pass
    assert stream.get_final_completion().choices[0].message.parsed == animal

tool = pydantic_function_tool(Animal)  # which is strict
for choice in ("required", {"type": "function", "function": {"name": "Animal"}}):
    called = client.chat.completions.parse(
        model=model, messages=messages, tools=[tool], tool_choice=choice, max_tokens=200, temperature=0,
        parallel_tool_calls=False,
    )  # fmt: skip
    assert called.choices[0].finish_reason == "tool_calls"
    [call] = called.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Animal)

response = client.responses.parse(
    model=model, input="Describe a red fox.", text_format=Animal, max_output_tokens=200, temperature=0
)
assert isinstance(response.output_parsed, Animal)

any_json = client.chat.completions.create(
    model=model, messages=messages, response_format={"type": "json_object"}, max_tokens=300, temperature=0
).choices[0]
assert any_json.finish_reason == "length" or isinstance(json.loads(any_json.message.content), dict)

choice = client.completions.create(
    model=model, prompt="Is a fox red? ", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
).choices[0]
assert choice.text in ("yes", "no")

for stream in (False, True):
    refusal = None
    try:
        client.completions.create(model=model, prompt="Hi", stream=stream, extra_body={"guided_regex": "("})
    except BadRequestError as error:
        refusal = error
    assert refusal is not None
    assert refusal.param == "guided_regex"
print("ok")
