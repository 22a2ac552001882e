"""Frameworks over OpenAI's and Anthropic's APIs work with their defaults: each in an environment of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from xml.etree import ElementTree

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

settings = ModelSettings(max_tokens=999, temperature=0, tool_choice="required", parallel_tool_calls=False)
agent = Agent(name="a", instructions="Be brief.", model="hash", tools=[look_up], model_settings=settings)
typed = Agent(name="b", model="hash", output_type=Weather, model_settings=ModelSettings(max_tokens=999, temperature=0))

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
INSTRUCTOR = """
import json, sys
import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)

found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
    client = instructor.from_openai(OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0), mode=mode)
    limit = {"max_output_tokens": 999} if mode is instructor.Mode.RESPONSES_TOOLS else {"max_tokens": 999}
    person = client.create(
        model="hash", response_model=Person, max_retries=0, messages=[{"role": "user", "content": "Who?"}],
        temperature=0, **limit,
    )
    found[mode.name] = person.age
print(json.dumps(found))
"""
LITELLM = """
import json, sys
import litellm

base = sys.argv[1]
messages = [{"role": "user", "content": "Hello"}]
tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
found = {}
for provider in ("openai", "hosted_vllm"):
    asked = {"model": f"{provider}/hash", "api_base": f"{base}/v1", "api_key": "unused", "max_tokens": 12}
    whole = litellm.completion(messages=messages, temperature=0, **asked)
    chunks = list(litellm.completion(messages=messages, temperature=0, stream=True,
                                     stream_options={"include_usage": True}, **asked))
    called = litellm.completion(messages=messages, tools=[tool], tool_choice="required", **{**asked, "max_tokens": 200})
    found[provider] = {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "usage": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens],
        "calls": sorted({call.function.name for call in called.choices[0].message.tool_calls}),
    }
same = {"model": "openai/hash", "api_base": f"{base}/v1", "api_key": "unused", "temperature": 0}
claude = litellm.completion(**{**same, "model": "anthropic/hash", "api_base": base}, messages=messages, max_tokens=12)
text = litellm.text_completion(prompt="Hello", max_tokens=5, **same)
vectors = litellm.embedding(model="openai/hash", api_base=f"{base}/v1", api_key="unused", input=["a", "b"])
response = litellm.responses(input="Hello", max_output_tokens=20, **same)
found |= {"claude": claude.usage.completion_tokens, "text": text.usage.completion_tokens,
          "vectors": len(vectors.data), "response": response.usage.output_tokens}
print(json.dumps(found))
"""


INVENTED = "the hash model invents values"
LANGCHAIN_FAILS = {
    "test_tool_calling": INVENTED,
    "test_tool_calling_async": INVENTED,
    "test_unicode_tool_call_integration": INVENTED,
    "test_json_mode": "the hash model does not follow the prompt's keys",
    "test_agent_loop": "the hash model calls no tool of its own accord",
}
"""Tests of LangChain that fail: they ask for the right answer."""
LANGCHAIN_PASSED = 32


def test_langchains_standard_tests_pass_but_for_right_answers(hash_server: RunningServer, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("langchain_suite.py"), tmp_path / "test_langchain.py")
    environment = installed("langchain-1", "langchain-tests==1.1.9", "langchain-openai")
    done = environment.run(
        "python", "-m", "pytest", "-q", "--tb=short", "--override-ini=asyncio_mode=auto",
        "--override-ini=asyncio_default_test_loop_scope=session",  # its client keeps connections of one event loop
        "--junitxml=report.xml", "test_langchain.py",
        variables={"BASE_URL": f"{hash_server.url}/v1", "MODEL": "hash"}, cwd=tmp_path,
    )  # fmt: skip
    cases = list(ElementTree.parse(tmp_path / "report.xml").iter("testcase"))
    failed = {case.get("name", "").partition("[")[0] for case in cases if case.find("failure") is not None}
    passed = sum(len(case) == 0 for case in cases)
    assert failed == LANGCHAIN_FAILS.keys(), done.stdout[-6000:] + done.stderr[-2000:]
    assert passed >= LANGCHAIN_PASSED


def test_the_agents_sdk_works_by_its_defaults(hash_server: RunningServer) -> None:
    """It uses `/v1/responses`, with tools, streams and typed answers."""
    found = installed("openai-agents-0.24.0", "openai-agents==0.24.0").answer(AGENTS, f"{hash_server.url}/v1")
    assert found["calls"] >= 2
    assert found["final"]
    assert found["streamed"]
    assert "run_item_stream_event" in found["kinds"]
    assert (found["typed"], found["input_tokens"] > 0) == ("int", True)


def test_instructor_gets_typed_answers(hash_server: RunningServer) -> None:
    found = installed("instructor-1.17.0", "instructor==1.17.0").answer(INSTRUCTOR, f"{hash_server.url}/v1")
    assert set(found) == {"TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"}
    assert all(0 <= age <= 150 for age in found.values())


def test_litellm_speaks_every_route(hash_server: RunningServer) -> None:
    found = installed("litellm-1.106.2", "litellm==1.106.2", "mcp").answer(LITELLM, hash_server.url)
    for provider in ("openai", "hosted_vllm"):
        assert found[provider]["whole"] == found[provider]["streamed"] != ""
        assert (found[provider]["usage"], found[provider]["calls"]) == ([12, 12], ["look_up"])
    assert (found["claude"], found["text"], found["vectors"]) == (12, 5, 2)
    assert 0 < found["response"] <= 20
