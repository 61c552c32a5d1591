"""pydantic-ai's agent, plain and streamed."""

import asyncio
import sys

from pydantic_ai import Agent
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
print("ok")
