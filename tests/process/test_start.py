"""What a start does without (no process maps torch's libraries unless it computes with them), and says meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import RunningServer, listening, serving

HEAVY = ("torch", "transformers", "scipy", "triton", "statsmodels", "matplotlib")
ASK = """
import sys
from baton.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(*sorted(set({heavy}) & set(sys.modules)), file=sys.stderr)
"""

GATED = """
import sys
from pathlib import Path

from baton.decide.policy.batching import MixedChunked as Gated

if "worker" in sys.argv[0]:
    Path(__file__).with_name("gate").read_bytes()
"""


def _with_torch(server: RunningServer) -> list[str]:
    """Name the processes of a server, itself included, that have torch in memory."""
    pids = {"server": server.process.pid, **{f"worker {pid}": pid for pid in server.worker_pids()}}
    return [name for name, pid in pids.items() if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]


@pytest.mark.parametrize("house", ["hash_server", "tiny_server"])
def test_a_server_that_does_not_compute_with_torch_never_loads_it(house: str, request: pytest.FixtureRequest) -> None:
    """Also after requests that draw in every way, follow a grammar, and want to know probabilities."""
    server: RunningServer = request.getfixturevalue(house)
    with server.client() as client:
        for options in (
            {"temperature": 0},
            {"temperature": 1, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 3},
            {"temperature": 1, "guided_regex": "[0-9]{3}"},
        ):
            body = {"prompt": "One, two, three", "max_tokens": 4, **options}
            client.post("/v1/completions", json=body).raise_for_status()
        assert _with_torch(server) == []


def test_without_a_compiler_torch_computes_and_is_loaded_by_the_worker_only(tmp_path: Path, tiny_model: str) -> None:
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}  # nor a library from earlier
    with serving(tiny_model, "--mixed", "1", environment=environment) as server, server.client() as client:
        body = {"prompt": "One, two, three", "max_tokens": 4, "temperature": 1, "top_p": 0.9}
        client.post("/v1/completions", json=body).raise_for_status()
        assert "torch engine (no C++ compiler" in server.output()
        assert _with_torch(server) == [f"worker {pid}" for pid in server.worker_pids()]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("serve", "--help"),
        ("serve", "--port", "70000"),
        ("sim", "--help"),
        ("bench", "--help"),
        ("plan", "--help"),
    ],
    ids=" ".join,
)
def test_a_command_line_is_read_without_heavy_libraries(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", ASK.format(heavy=HEAVY), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "", done.stderr


def test_until_it_is_ready_a_server_names_who_has_not_loaded(tmp_path: Path) -> None:
    """A worker that waits for us while it loads."""
    (tmp_path / "gated.py").write_text(GATED)
    os.mkfifo(tmp_path / "gate")
    config = tmp_path / "baton.toml"
    config.write_text("[policy.batching]\nuse = 'gated:Gated'\n")
    given = ("hash", "--mixed", "1", "--config", str(config))
    with listening(*given, environment={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}) as server:
        with server.client() as client:
            for answer in (client.get("/ready"), client.post("/v1/completions", json={"prompt": "a"})):
                assert answer.status_code == 503
                assert "loading, waiting for mixed-0 to load the model" in answer.json()["error"]["message"]
        (tmp_path / "gate").write_bytes(b"")
        server.wait_ready()


def test_until_it_is_ready_a_server_says_how_the_hosts_join_that_it_waits_for() -> None:
    with listening("hash", "--hosts", "2") as server, server.client() as client:
        message = client.get("/ready").json()["error"]["message"]
        assert f"loading, waiting for 2 of 2 hosts to join (baton host --join {server.url})" in message
