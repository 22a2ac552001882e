"""A hostile chat template of a model folder takes no memory of the server, and SIGTERM ends the server meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import transformers

from tests.attack.conftest import unharmed, warm_up
from tests.attack.refusals import check_refusal
from tests.process.conftest import HEADS
from tests.process.test_models import save_with_bytes
from tests.serving import RunningServer, children, serving
from tests.unit.compute.models import TINY

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

REPEATED = (
    "{% set ns = namespace(x=<first>) %}{% for step in range(60) %}{% set ns.x = ns.x <operator> ns.x %}{% endfor %}"
)
SQUARES = REPEATED.replace("<first>", "7").replace("<operator>", "*")
HOSTILE = {
    "squares": (SQUARES, r"CPU time.*sandbox\.cpu_s|sandbox\.memory_bytes"),
    "doubled list": (REPEATED.replace("<first>", "[0]").replace("<operator>", "+"), r"sandbox\.memory_bytes"),
    "wide number": ("{{ '%1000000000d' % messages | length }}", r"sandbox\.memory_bytes"),
    "wide JSON": ("{{ messages | tojson(indent=1000000000) }}", r"sandbox\.memory_bytes"),
    "long loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages | tojson }}{% endfor %}{% endfor %}",
        r"200000 steps|CPU time.*sandbox\.cpu_s",
    ),
    "long sort": ("{{ (messages[0].content * 1000000) | list | sort | join('y') | length }}", r"sandbox\.\w+"),
    "endless text": ("{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}", "16000000 characters"),
    "endless recursion": ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "nested too deeply"),
}
"""Templates, and the limits that they break."""
CALM = "calm"
"""A message that the template of the hostile model renders at once. The name of a hostile template renders that one."""
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


@pytest.fixture(scope="module")
def attacked(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a template that holds all hostile ones. The limits of CPU time and memory decide, not the clock."""
    cases = "".join(
        f"{{% if messages[0].content == '{name}' %}}{template}{{% endif %}}" for name, (template, _) in HOSTILE.items()
    )
    write_template(folder, cases + "{{ messages[0].content }}")
    config = tmp_path_factory.mktemp("attacked") / "config.toml"
    config.write_text("[sandbox]\nwall_s = 120\n")
    with serving(str(folder), "--dtype", "float32", "--mixed", "1", "--config", str(config)) as server:
        warm_up(server)
        assert chat(server, CALM).status_code == 200
        yield server
        assert server.stop() == 0


def chat(server: RunningServer, message: str) -> httpx.Response:
    with server.client(timeout_s=300) as client:
        body = {"messages": [{"role": "user", "content": message}], "max_tokens": 2}
        return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_fails_its_chats_alone(attacked: RunningServer, control: RunningServer, name: str) -> None:
    with unharmed(attacked, control):
        for _ in range(2):
            refused = chat(attacked, name)
            assert refused.status_code == 400, refused.text
            check_refusal(refused.status_code, refused.content)
            message = refused.json()["error"]["message"]
            assert "chat template" in message
            assert re.search(HOSTILE[name][1], message), message
            assert chat(attacked, CALM).status_code == 200
