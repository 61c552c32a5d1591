"""langchain's chat model: invoked, streamed, with tools bound, and with structured output in each of its ways."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

base_url, model = sys.argv[1:]
chat = ChatOpenAI(model=model, base_url=f"{base_url}/v1", api_key="none", temperature=0, max_tokens=12)
whole = chat.invoke("Name a colour.")
assert "".join(chunk.content for chunk in chat.stream("Name a colour.")) == whole.content


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}."


answer = chat.bind_tools([get_weather]).invoke("What is the weather in Paris?")
assert isinstance(answer.tool_calls, list)


class Animal(BaseModel):
    """An animal."""

    model_config = ConfigDict(extra="forbid")  # or else a small model adds members until its tokens are used up
    name: str = Field(max_length=12)
    legs: int = Field(ge=0, le=8)


roomy = ChatOpenAI(model=model, base_url=f"{base_url}/v1", api_key="none", temperature=0, max_tokens=100)
for options in ({"method": "json_schema"}, {"method": "function_calling"}, {"method": "json_schema", "strict": True}):
    animal = roomy.with_structured_output(Animal, **options).invoke("Describe a fox.")
    assert isinstance(animal, Animal), options
print("ok")
