"""langchain's chat model: invoked, streamed, and with tools bound."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

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
print("ok")
