"""What benchmarks with real vLLM servers share: the servers, Baton over them, and vLLM's own load generator."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from baton.move.clock import now_s

START_S = 400.0
REQUESTS_MAX = 16
"""Requests that a server runs at once."""
BLOCK_TOKENS = 32
_FIRST_PROMPT = "Hello again. " * BLOCK_TOKENS
"""Longer than a block, as all prompts of these programs."""
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Installed:
    """vLLM as `engines.py --install` has installed it, and the model of all servers."""

    python: Path
    model: Path

    @property
    def command(self) -> list[str]:
        return [str(self.python), "-m", "vllm.entrypoints.cli.main"]

    def version(self) -> str:
        ask = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
        done = subprocess.run([str(self.python), "-c", ask], capture_output=True, text=True, check=True)
        return done.stdout.strip()


@contextmanager
def vllm_servers(installed: Installed, ports: Sequence[int], shared_kv: Path | None = None) -> Generator[list[str]]:
    """Run a server with one thread on each port. `shared_kv`: they hand KV off through files in this folder."""
    flags = ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--enable-scale-out"]
    flags += ["--max-num-seqs", str(REQUESTS_MAX), "--block-size", str(BLOCK_TOKENS)]
    flags += ["--served-model-name", installed.model.name]
    if shared_kv is not None:
        extra = {"shared_storage_path": str(shared_kv)}
        connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        flags += ["--kv-transfer-config", json.dumps(connector)]
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                running(
                    [*installed.command, "serve", str(installed.model), "--port", str(port), *flags], port, SETTINGS
                )
            )
            for port in ports
        ]
        for server in started:
            server.wait_until_it_answers(installed.model.name)
        yield [server.url for server in started]


@contextmanager
def baton_over(installed: Installed, port: int, engines: Sequence[str]) -> Generator[str]:
    """Run `baton serve` over servers, each `URL` or `ROLE=URL`."""
    command = [sys.executable, "-m", "baton.cli.main", "serve", str(installed.model), "--port", str(port)]
    command += ["--queue-s", "0", "--batch-requests", str(REQUESTS_MAX), "--block-tokens", str(BLOCK_TOKENS)]
    command += [f"--engine-url={engine}" for engine in engines]
    with running(command, port) as server:
        server.wait_until_it_answers(installed.model.name)
        yield server.url


@dataclass(frozen=True, slots=True)
class Server:
    """A process that will listen on a port."""

    process: subprocess.Popen[bytes]
    url: str

    def wait_until_it_answers(self, model: str) -> None:
        """Ask for one token until the server has answered. Raises TimeoutError, also if it has ended."""
        body = {"model": model, "prompt": _FIRST_PROMPT, "max_tokens": 1}
        deadline_s = now_s() + START_S
        while now_s() < deadline_s and self.process.poll() is None:
            try:
                if httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            threading.Event().wait(0.5)
        raise TimeoutError(f"{self.url} has not answered in {START_S:g} s, or has ended")


@contextmanager
def running(command: Sequence[str], port: int, settings: Mapping[str, str] | None = None) -> Generator[Server]:
    """Run a server, and end it afterwards. Its log is shown if it does not start."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen([*with_settings(settings or {}), *command], stdout=log, stderr=log)
        try:
            yield Server(process, f"http://127.0.0.1:{port}")
        except (SystemExit, TimeoutError):
            print(Path(log.name).read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(60)


def wait_for(begin: Path | None) -> None:
    """Wait until a file exists: another program makes it once the machine has no other load."""
    if begin is not None:
        print(f"started: waiting for {begin}", flush=True)
        while not begin.exists():
            threading.Event().wait(0.2)


def with_settings(settings: Mapping[str, str]) -> list[str]:
    """Return the words before a command that runs it with variables."""
    return ["env", *(f"{name}={value}" for name, value in settings.items())]


def bench(installed: Installed, url: str, flags: Mapping[str, object]) -> dict[str, float]:
    """Run `vllm bench serve` once. Return its result. Ends this program if a request has failed."""
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, object] = {
            "backend": "openai",
            "base-url": url,
            "model": installed.model.name,
            "tokenizer": installed.model,
            "percentile-metrics": "ttft,tpot,itl,e2el",
            "result-dir": folder,
            "result-filename": "result.json",
            **flags,
        }
        command = [*with_settings(SETTINGS), *installed.command, "bench", "serve", "--ignore-eos", "--save-result"]
        for name, value in given.items():
            command += [f"--{name}", *(str(value).split() if name == "goodput" else [str(value)])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"vllm bench serve ended with code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        result = json.loads((Path(folder) / "result.json").read_text())
    if result["completed"] != given["num-prompts"]:
        sys.exit(f"{url}: {result['completed']} of {given['num-prompts']} requests completed\n{done.stdout[-2000:]}")
    return result
