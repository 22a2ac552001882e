"""Anthropic's own client works against a real server. It is installed into an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import RunningServer

ENVIRONMENT = Path.home() / ".cache" / "baton" / "clients" / "anthropic"
SCRIPT = """
import json, sys
import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0)
fields = dict(model="hash", max_tokens=12, messages=[{"role": "user", "content": "Hello"}])
tool = {"name": "look_up", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}
whole = client.messages.create(**fields, extra_body={"temperature": 0})
with client.messages.stream(**fields, extra_body={"temperature": 0}) as stream:
    streamed = "".join(stream.text_stream)
    last = stream.get_final_message()
called = client.messages.create(**{**fields, "max_tokens": 200}, tools=[tool], tool_choice={"type": "any"})
try:
    client.messages.create(**{**fields, "model": "other"})
    refused = ""
except anthropic.NotFoundError as error:
    refused = str(error)
print(json.dumps({
    "whole": whole.content[0].text, "streamed": streamed, "stop": [whole.stop_reason, last.stop_reason],
    "tokens": [whole.usage.output_tokens, last.usage.output_tokens],
    "counted": client.messages.count_tokens(model="hash", messages=fields["messages"]).input_tokens,
    "calls": sorted({block.name for block in called.content if block.type == "tool_use"}), "refused": refused,
}))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of the environment with the client."""
    program = ENVIRONMENT / "bin" / "python"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True, capture_output=True)
    wanted = [str(program), "-c", "import anthropic"]
    if subprocess.run(wanted, capture_output=True, check=False).returncode:
        install = [str(program), "-m", "pip", "install", "--quiet", "anthropic"]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip cannot install anthropic: {done.stderr.strip()[-200:]}")
    return program


@pytest.mark.deep
def test_the_official_client_works(hash_server: RunningServer, python: Path) -> None:
    command = [str(python), "-c", SCRIPT, hash_server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["whole"] == found["streamed"] != ""
    assert (found["stop"], found["tokens"]) == (["max_tokens"] * 2, [12, 12])
    assert found["counted"] > 0
    assert found["calls"] == ["look_up"]
    assert "is not served here" in found["refused"]
