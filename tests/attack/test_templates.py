"""A hostile chat template of a model folder takes no memory of the server, and SIGTERM ends the server meanwhile."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import transformers

from tests.process.conftest import HEADS
from tests.process.test_models import save_with_bytes
from tests.serving import RunningServer, children, serving
from tests.unit.compute.models import TINY

pytestmark = pytest.mark.deep

FOR_EACH = "{% for message in messages %}<body>{% endfor %}"
REPEATED = (
    "{% set ns = namespace(x=<first>) %}{% for step in range(60) %}{% set ns.x = ns.x <operator> ns.x %}{% endfor %}"
)
SQUARES = FOR_EACH.replace("<body>", REPEATED.replace("<first>", "7").replace("<operator>", "*"))
HOSTILE = {
    "squares": SQUARES,
    "doubled list": FOR_EACH.replace("<body>", REPEATED.replace("<first>", "[0]").replace("<operator>", "+")),
    "wide number": FOR_EACH.replace("<body>", "{{ '%1000000000d' % 1 }}"),
}
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PATIENT = "[sandbox]\ncpu_s = 600\nwall_s = 600\n"
"""Limits that the test's timeout would exceed: only the signal ends the template."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_with_bytes(transformers.LlamaConfig(**TINY | HEADS), folder)
    return folder


def write_template(folder: Path, template: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def is_rendering(server: RunningServer) -> bool:
    """Return whether a sandbox of the server uses a processor now."""
    sandboxes = [
        sandbox
        for fork_server in children(server.process.pid, "baton.compute.sandbox")
        for sandbox in children(fork_server, "baton.compute.sandbox")
    ]
    return any(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "R" for pid in sandboxes)


def test_sigterm_ends_a_server_that_renders_an_endless_template(folder: Path, tmp_path: Path) -> None:
    write_template(folder, SQUARES)
    (tmp_path / "config.toml").write_text(PATIENT)
    serve = serving(str(folder), "--dtype", "float32", "--mixed", "1", "--config", str(tmp_path / "config.toml"))

    def ask(server: RunningServer) -> bool:
        """Return whether the chat was answered."""
        with server.client(timeout_s=300) as client:
            try:
                return client.post("/v1/chat/completions", json=BODY).status_code == 200
            except httpx.TransportError:
                return False

    with serve as server, ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(ask, server) for _ in range(3)]
        while not is_rendering(server):
            assert not any(asked.done() for asked in asking), server.output()
        assert server.stop() == 0
        assert not any(asked.result() for asked in asking)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_fails_its_chats_alone(folder: Path, tmp_path: Path, name: str) -> None:
    """The limits of CPU time and memory decide, however busy the machine is."""
    write_template(folder, HOSTILE[name])
    (tmp_path / "config.toml").write_text("[sandbox]\nwall_s = 120\n")
    serve = serving(str(folder), "--dtype", "float32", "--mixed", "1", "--config", str(tmp_path / "config.toml"))
    with serve as server, server.client(timeout_s=300) as client:
        completion = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
        client.post("/v1/completions", json=completion).raise_for_status()
        for _ in range(2):
            refused = client.post("/v1/chat/completions", json=BODY)
            assert refused.status_code == 400, refused.text
            assert "chat template" in refused.json()["error"]["message"]
            client.post("/v1/completions", json=completion).raise_for_status()
        assert server.stop() == 0
