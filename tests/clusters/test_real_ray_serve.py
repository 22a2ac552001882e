"""A real Ray Serve with Baton as the server class of its LLM application, asked through Ray's own ingress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines.test_real_vllm import PEERS, installed_model
from tests.mooncake_servers import free_ports
from tests.serving import NO_TLS, RunningServer

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path.home() / ".cache" / "baton" / "clients" / "ray-serve-2.60"
PACKAGES = ("ray[serve]==2.60.0", "fastapi<0.137", "pyarrow")
"""Ray 2.60.0 does not find the class of a route in newer versions of FastAPI."""
BODY = {"model": "served", "prompt": "hello again " * 20, "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of an environment with Ray Serve, and vLLM, whose classes its LLM applications need."""
    program = ENVIRONMENT / "bin" / "python"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True, capture_output=True)
    if subprocess.run([str(program), "-c", "import ray.serve, pyarrow"], capture_output=True, check=False).returncode:
        install = [str(program), "-m", "pip", "install", "--quiet", *PACKAGES]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip cannot install {PACKAGES[0]}: {done.stderr.strip()[-200:]}")
    installed_model()
    (vllm,) = (PEERS / "vllm" / "lib").glob("python*/site-packages")
    (packages,) = (ENVIRONMENT / "lib").glob("python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "zz_others.pth").write_text("\n".join([str(vllm), *ours]) + "\n")
    return program


@pytest.fixture(scope="module")
def url(python: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    app = Path(__file__).with_name("ray_serve_app.py")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples" / "ray_serve")])
    process = subprocess.Popen(
        [str(python), str(app), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_LOG_TO_DRIVER": "0"},
    )
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "running\n":
            assert line, "the program has ended"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.communicate(timeout=120)


def test_answers_are_those_of_baton(url: str, hash_server: RunningServer) -> None:
    """Whole and in parts, and errors with Baton's message."""
    with hash_server.client() as client:
        expected = client.post("/v1/completions", json={**BODY, "model": "hash"}).raise_for_status().json()
    with httpx.Client(base_url=url, timeout=120, verify=NO_TLS) as client:
        assert [each["id"] for each in client.get("/v1/models").raise_for_status().json()["data"]] == ["served"]
        whole = client.post("/v1/completions", json=BODY).raise_for_status().json()
        assert whole["choices"][0]["text"] == expected["choices"][0]["text"]
        assert whole["usage"]["completion_tokens"] == 40
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert events[-1] == "[DONE]"
        texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert "".join(texts) == whole["choices"][0]["text"]
        chat = {"model": "served", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        assert client.post("/v1/chat/completions", json=chat).raise_for_status().json()["choices"][0]["message"]
        refused = client.post("/v1/chat/completions", json={**chat, "temperature": -1})
        assert refused.status_code == 400
        assert "temperature must be a number from 0 to 2" in refused.json()["error"]["message"]
