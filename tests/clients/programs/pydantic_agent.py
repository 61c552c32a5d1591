"""pydantic-ai's agent: plain, streamed, and with an output type, by a call and by a schema."""

import asyncio
import sys

from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

base_url, name = sys.argv[1:]
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{base_url}/v1", api_key="none"))
agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 12})
whole = agent.run_sync("Name a colour.").output


async def streamed() -> str:
    async with agent.run_stream("Name a colour.") as result:
        return await result.get_output()


assert asyncio.run(streamed()) == whole


class Animal(BaseModel):
    """An animal."""

    model_config = ConfigDict(extra="forbid")  # or else a small model adds members until its tokens are used up
    name: str = Field(max_length=12)
    legs: int = Field(ge=0, le=8)


for output_type in (NativeOutput(Animal), ToolOutput(Animal)):
    filler = Agent(model, output_type=output_type, model_settings={"temperature": 0, "max_tokens": 100})
    assert isinstance(filler.run_sync("Describe a fox.").output, Animal)
print("ok")
