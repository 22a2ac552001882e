"""The commands of the README work as they are written there."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.move.clock import now_s
from tests.serving import RunningServer

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
[INSTALL, USE] = BLOCKS
"""The commands of a newcomer: those that install and serve, and those that use the server."""
ADDRESS = "http://127.0.0.1:8000"
ANSWER = "Hello! I'm here to help with any kind of creative writing project. What brings you here today?"
"""The greedy answer of the same weights in Hugging Face's `transformers`, in float32 and in bfloat16."""
PLAN = (
    "plan", "--llm", "llama3.1-8b", "--hardware", "h100-sxm=8", "--input-tokens", "1024", "--output-tokens", "128",
    "--rate", "10", "--ttft-slo-s", "1", "--tpot-slo-s", "0.05",
)  # fmt: skip


def run(commands: str, folder: Path, environment: dict[str, str] | None = None) -> str:
    """Run shell commands in a folder until one fails. Returns their output."""
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_server_is_used_as_the_readme_says(hash_server: RunningServer, tmp_path: Path) -> None:
    program = Path(sys.prefix) / "bin" / "baton"
    assert ADDRESS in USE
    said = run(USE.replace(ADDRESS, hash_server.url).replace(".venv/bin/baton", str(program)), tmp_path)
    answer, _ = json.JSONDecoder().raw_decode(said)
    assert answer["choices"][0]["message"]["content"]
    assert "TTFT" in said


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_a_newcomer_gets_an_answer_from_a_clean_clone(tmp_path: Path) -> None:
    """From the base install; the native engine is compiled anew. Prints how long it takes."""
    clone, environment = tmp_path / "clone", {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = ""
    run(f"git clone --quiet {ROOT} {clone}", tmp_path)
    assert INSTALL.splitlines()[0].startswith("make setup ")
    assert INSTALL.splitlines()[1].startswith("make serve ")
    times = [now_s()]
    run("make setup", clone, environment)
    times.append(now_s())
    command = ["make", "serve", "ARGS=--port 0"]
    with subprocess.Popen(command, cwd=clone, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(line.split()[1] for line in server.stdout if line.startswith("ready: "))
            times.append(now_s())
            said = run(USE.splitlines(keepends=True)[0].replace(ADDRESS, url) + USE.splitlines()[1], clone)
            times.append(now_s())
            assert json.loads(said)["choices"][0]["message"]["content"] == ANSWER
            run(USE.replace(ADDRESS, url), clone)
        finally:
            server.terminate()
            server.wait(60)
    assert "use 1 x H100-80G-SXM " in run(".venv/bin/baton " + " ".join(PLAN), clone)
    print("install, start, first answer in s:", [round(b - a, 1) for a, b in itertools.pairwise(times)])
