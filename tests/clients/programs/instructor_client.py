"""instructor's client makes its requests; whether a small model fills the form is not the server's affair."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

base_url, model = sys.argv[1:]


class Animal(BaseModel):
    """An animal."""

    name: str


client = instructor.from_openai(OpenAI(base_url=f"{base_url}/v1", api_key="none"), mode=instructor.Mode.TOOLS)
refusal = None
try:
    animal = client.chat.completions.create(
        model=model,
        response_model=Animal,
        messages=[{"role": "user", "content": "A fox."}],
        max_retries=1,
        max_tokens=48,
        temperature=0,
    )
    assert isinstance(animal, Animal)
except Exception as error:
    refusal = type(error).__module__
assert refusal is None or refusal.startswith("instructor"), refusal
print("ok")
