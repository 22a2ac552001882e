"""A real llama.cpp server (a wheel that embeds it, in an environment of its own) behind `baton serve`."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from baton.compute.models.resolve import resolve_model
from baton.integrations.llamacpp import LlamaCppServer
from tests.serving import NO_TLS, RunningServer, serving

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]
PACKAGE = "xllamacpp==2026.10.11549"
ENVIRONMENT = Path.home() / ".cache" / "baton" / "peers" / "xllamacpp-2026.10.11549"
PROGRAM = """
import sys, threading, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 4096, 2, 1
server = xllamacpp.Server(params)
print("listening", flush=True)
threading.Event().wait()
"""
WORDS = "The river ran past the old mill, and the miller counted his sacks before the rain came down again. "
PROMPTS = [f"{number}. {WORDS * repeats}Then" for number, repeats in enumerate((1, 3, 5, 8))]
TOKENS = 24


class LlamaCpp:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    def text(self, prompt: str) -> str:
        """Return the server's own greedy answer."""
        body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/completion", json=body, timeout=300, verify=NO_TLS)
        return answer.raise_for_status().json()["content"]


@contextmanager
def llama_cpp() -> Iterator[LlamaCpp]:
    """Run a server with the model of `baton serve`, until it listens and until the end of the block."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", PACKAGE], check=True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [str(python), "-c", PROGRAM, resolve_model("smollm2-135m").path, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        assert b"listening" in process.stdout.readline()
        yield LlamaCpp(process, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LlamaCpp]]:
    """Two servers with the model of `baton serve`."""
    with llama_cpp() as first, llama_cpp() as second:
        yield [first, second]


def ask(server: RunningServer, prompt: str) -> str:
    """Return a greedy answer through Baton."""
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    with server.client(timeout_s=300) as client:
        return client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]


def running(state: dict) -> list[str]:
    """Return the workers that have begun an answer."""
    return [each["id"] for each in state["workers"] if each["running"]]


def test_the_api_of_openai_is_enough(engines: list[LlamaCpp]) -> None:
    """Prompts go in token ids, and answers come back in text."""
    with serving("smollm2-135m", "--engine", "openai", "--engine-url", engines[0].url) as server:
        assert {prompt: ask(server, prompt) for prompt in PROMPTS} == {
            prompt: engines[0].text(prompt) for prompt in PROMPTS
        }


def test_each_start_of_a_server_has_its_own_sign() -> None:
    """By it, Baton notices a restart between two checks."""

    async def sign(url: str) -> float:
        server = LlamaCppServer(url, "", answer_s=60)
        try:
            return (await server.load()).started_unix_s
        finally:
            await server.close()

    signs: list[float] = []
    for _ in range(2):
        with llama_cpp() as server:
            first, again = asyncio.run(sign(server.url)), asyncio.run(sign(server.url))
            assert first == again
            signs.append(first)
    assert signs[0] != signs[1]


def test_answers_are_those_of_the_server_and_outlive_it(engines: list[LlamaCpp]) -> None:
    """Greedy texts of two servers; then one of them is killed while it computes half of the answers."""
    alone = {prompt: engines[0].text(prompt) for prompt in PROMPTS}
    urls = [word for each in engines for word in ("--engine-url", f"llamacpp={each.url}")]
    with serving("smollm2-135m", *urls) as server:
        assert {prompt: ask(server, prompt) for prompt in PROMPTS} == alone
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            asked = {prompt: pool.submit(ask, server, prompt) for prompt in PROMPTS}
            state = server.wait_until(lambda state: bool(running(state)), reason="a server computes")
            (killed, *_) = running(state)
            engines[int(killed.removeprefix("llamacpp-"))].process.kill()
            assert {prompt: future.result() for prompt, future in asked.items()} == alone
        server.wait_until(
            lambda state: killed not in [each["id"] for each in state["workers"] if each["state"] == "ready"],
            reason="the killed server is lost",
        )
