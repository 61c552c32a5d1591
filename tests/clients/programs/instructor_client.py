"""instructor's client gets its class filled, by a call and by a schema."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

base_url, model = sys.argv[1:]


class Animal(BaseModel):
    """An animal."""

    model_config = ConfigDict(extra="forbid")  # or else a small model adds members until its tokens are used up
    name: str = Field(max_length=12)
    legs: int = Field(ge=0, le=8)


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=f"{base_url}/v1", api_key="none"), mode=mode)
    animal = client.chat.completions.create(
        model=model,
        response_model=Animal,
        messages=[{"role": "user", "content": "A fox."}],
        max_retries=1,
        max_tokens=100,
        temperature=0,
    )
    assert isinstance(animal, Animal), mode
print("ok")
