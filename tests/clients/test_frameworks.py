"""Frameworks over OpenAI's API work with their defaults: each in an environment of its own."""

from __future__ import annotations

import pytest

from tests.clients.environments import installed
from tests.serving import RunningServer

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1800)]
AGENTS = """
import asyncio, json, sys
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

set_default_openai_client(AsyncOpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0))
set_tracing_disabled(True)
called = []

@function_tool
def look_up(city: str, days: int) -> str:
    "Return the weather."
    called.append((city, days))
    return "sunny"

class Weather(BaseModel):
    city: str
    degrees: int

settings = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
agent = Agent(name="a", instructions="Be brief.", model="hash", tools=[look_up], model_settings=settings)
typed = Agent(name="b", model="hash", output_type=Weather, model_settings=ModelSettings(max_tokens=400))

async def main():
    first = await Runner.run(agent, "How is the weather?")
    streamed = Runner.run_streamed(agent, "And tomorrow?", previous_response_id=first.last_response_id)
    kinds = [event.type async for event in streamed.stream_events()]
    weather = (await Runner.run(typed, "Say it as JSON.")).final_output
    print(json.dumps({"calls": len(called), "final": first.final_output, "streamed": streamed.final_output,
                      "kinds": sorted(set(kinds)), "typed": type(weather.degrees).__name__,
                      "input_tokens": first.context_wrapper.usage.input_tokens}))

asyncio.run(main())
"""


def test_the_agents_sdk_works_by_its_defaults(hash_server: RunningServer) -> None:
    """It uses `/v1/responses`, with tools, streams and typed answers."""
    found = installed("openai-agents-0.24.0", "openai-agents==0.24.0").answer(AGENTS, f"{hash_server.url}/v1")
    assert found["calls"] >= 2
    assert found["final"]
    assert found["streamed"]
    assert "run_item_stream_event" in found["kinds"]
    assert (found["typed"], found["input_tokens"] > 0) == ("int", True)
