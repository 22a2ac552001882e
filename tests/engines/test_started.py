"""Engine servers that Baton starts itself: their commands, their ends, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import httpx
import msgspec
import pytest

from baton.cli.main import main
from baton.compute.models.resolve import resolve_model
from baton.core.config import BatchLimits, Config, ParallelConfig, Topology
from baton.core.engine_config import EnginesConfig, engine_of
from baton.core.errors import ConfigError
from baton.integrations.engines.launch import engine_processes, free_ports, with_servers
from baton.integrations.engines.process import EngineProcess
from tests.engines.fake_engine import answer_to
from tests.engines.fleets import Baton, baton_over, finished, tokens_of
from tests.serving import serving

PROMPT = [100 + token % 90 for token in range(40)]
SHAPE = "examples/shapes/llama-3.1-8b"
FAKE = (sys.executable, "-m", "tests.engines.fake_vllm")


def process(*argv: str, start_s: float = 120.0) -> EngineProcess:
    return EngineProcess("vllm-0", argv, {}, start_s=start_s)


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def failed(baton: Baton) -> str:
    """Wait until the fleet has given up. Return the reason."""
    while not baton.fleet.failure:
        baton.changed.clear()
        await baton.changed.wait()
    return baton.fleet.failure


def test_a_killed_server_is_started_again_and_loses_no_request() -> None:
    """The server sends 5 tokens of an answer and stops. Its successor continues after them."""

    port = free_ports(1)[0]

    async def run() -> None:
        started = process(*FAKE, "serve", "MODEL", "--port", str(port))
        async with baton_over(f"http://127.0.0.1:{port}", processes=(started,)) as baton:
            live = baton.submit(PROMPT, 8)
            await tokens_of(live, 5)
            (server,) = children(started.pid)
            os.kill(server, signal.SIGKILL)
            assert (await finished(live)).outcome == "finished"
            assert live.tokens[len(PROMPT) :] == answer_to(PROMPT, 8)
            await baton.said("its server ended with code 137")
            baton.check()

    asyncio.run(run())
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/version")


def test_a_server_that_never_becomes_ready_is_given_up_with_its_last_lines() -> None:
    async def run() -> None:
        started = process(sys.executable, "-c", "raise SystemExit('there is no memory')")
        async with baton_over("http://127.0.0.1:9", processes=(started,), joins=0) as baton:
            assert await failed(baton) == "the server of vllm-0 ended with code 1, 3 times before it was ready"
            assert sum("there is no memory" in line for line in baton.told) == 3

    asyncio.run(run())


def test_a_program_that_cannot_be_started_is_named() -> None:
    async def run() -> None:
        started = process("/dev/null/vllm")
        async with baton_over("http://127.0.0.1:9", processes=(started,), joins=0) as baton:
            await baton.said("/dev/null/vllm cannot be started")

    asyncio.run(run())


def test_a_system_that_starts_no_process_ends_no_server_for_good() -> None:
    """The system refuses the process here for a flag above 128 KiB, and elsewhere for a while: it has no memory."""

    async def run() -> None:
        started = process("vllm", "x" * (1 << 18))
        async with baton_over("http://127.0.0.1:9", processes=(started,), joins=0) as baton:
            assert "cannot be started: Argument list too long, 3 times before it was ready" in await failed(baton)

    asyncio.run(run())


def test_a_server_that_is_not_ready_in_time_is_ended() -> None:
    async def run() -> None:
        started = process(sys.executable, "-c", "import signal; signal.pause()", start_s=0.05)
        async with baton_over("http://127.0.0.1:9", processes=(started,), joins=0) as baton:
            await baton.said("was not ready within 0.05 s (survival.start_s)")

    asyncio.run(run())


PARENT = "import subprocess, signal; subprocess.Popen(['sleep', '1000']); print('up', flush=True); signal.pause()"


@pytest.mark.parametrize("way", ["Baton ends", "the server is killed", "the keeper gets SIGTERM"])
def test_no_process_of_a_server_is_left(way: str) -> None:
    """Its output ends once the last process that writes to it has ended."""
    argv = [sys.executable, "-m", "baton.integrations.engines.keeper", sys.executable, "-c", PARENT]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdin is not None
        assert keeper.stdout.readline() == b"up\n"
        if way == "Baton ends":
            keeper.stdin.close()
        elif way == "the server is killed":
            os.kill(children(keeper.pid)[0], signal.SIGKILL)
        else:
            keeper.terminate()
        assert keeper.stdout.read() == b""
        assert keeper.wait() == (137 if way == "the server is killed" else 143)


# ---- commands


def planned(
    tmp_path: Path, start: Literal["vllm", "sglang"] = "vllm", store: str = "", **fields: object
) -> tuple[Config, list[Sequence[str]]]:
    """Return the configuration with servers, and their commands. The program is one that exists."""
    engines = EnginesConfig(
        start=start, command=f"{sys.executable} -m {start}", flags="--dtype half --seed=3", store=store
    )
    config = with_servers(Config(model=SHAPE, load_format="dummy", engines=engines, **fields), tmp_path)
    assert not config.problems() + config.lacks()
    return config, [each.argv for each in engine_processes(config, resolve_model(SHAPE, "dummy"), tmp_path)]


def test_each_role_gets_a_server_on_loopback_with_a_key(tmp_path: Path) -> None:
    config, commands = planned(tmp_path, dtype="bfloat16", context_tokens=4096, batch=BatchLimits(requests_max=8))
    servers = config.engines.servers
    assert [server.role for server in servers] == ["prefill", "decode"]
    assert len({server.url for server in servers}) == 2
    assert len(config.engines.key) >= 32
    assert config.topology == Topology()
    for server, command in zip(servers, commands, strict=True):
        assert command[:4] == (sys.executable, "-m", "vllm", "serve")
        flags = " ".join(command[5:])
        assert f"--host 127.0.0.1 --port {server.url.rpartition(':')[2]} " in flags
        assert "--max-num-seqs 8 --max-model-len 4096" in flags
        assert '"kv_connector": "NixlConnector"' in flags
        assert f'"endpoint": "ipc://{tmp_path}/' in flags
        assert flags.endswith(" --dtype half --seed=3"), "the given --dtype replaces Baton's"
        assert flags.count("--dtype") == 1
        assert config.engines.key not in flags


def test_sglang_servers_get_their_mode_and_a_key_that_is_no_flag(tmp_path: Path) -> None:
    config, commands = planned(tmp_path, "sglang", context_tokens=4096, batch=BatchLimits(requests_max=8))
    ports = set[str]()
    for server, command in zip(config.engines.servers, commands, strict=True):
        flags = " ".join(command[5:])
        assert command[:4] == (sys.executable, "-m", "sglang", "serve")
        assert f"--disaggregation-mode {server.role} --disaggregation-bootstrap-port" in flags
        assert "--page-size 16 --max-running-requests 8 --context-length 4096" in flags
        assert "--enable-metrics" in flags
        assert f'{{"publisher": "zmq", "endpoint": "ipc://{tmp_path}/' in flags
        ports.add(command[command.index("--disaggregation-bootstrap-port") + 1])
        assert config.engines.key not in flags
        assert json.loads(Path(command[command.index("--config") + 1]).read_text()) == {"api-key": config.engines.key}
    assert len(ports) == 2
    stored = EnginesConfig(start="sglang", store="pool://a:1").problems()
    assert "engines.store is for vLLM servers" in stored[0]


def test_no_server_gets_the_port_of_another_for_its_bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.integrations.engines.launch._PORTS", free_ports(6))
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        config, commands = planned(folder, "sglang")
        flag = "--disaggregation-bootstrap-port"
        ports = {command[command.index(flag) + 1] for command in commands}
        assert ports.isdisjoint(server.url.rpartition(":")[2] for server in config.engines.servers)


def test_a_started_sglang_server_joins_and_answers(tmp_path: Path) -> None:
    async def run() -> None:
        engines = EnginesConfig(start="sglang", command=f"{sys.executable} -m tests.engines.fake_sglang")
        made = Config(model=SHAPE, load_format="dummy", engines=engines, topology=Topology(mixed=1))
        config = with_servers(made, tmp_path)
        (server,) = config.engines.servers
        processes = engine_processes(config, resolve_model(SHAPE, "dummy"), tmp_path)
        plain = msgspec.structs.replace(server, kv_events="", kv_events_replay="")
        async with baton_over(plain, key=config.engines.key, processes=processes) as baton:
            assert await baton.ask(PROMPT, 8) == answer_to(PROMPT, 8)

    asyncio.run(run())


def test_mixed_servers_need_no_connector(tmp_path: Path) -> None:
    _config, commands = planned(tmp_path, topology=Topology(mixed=1), parallel=ParallelConfig(tensor=2, context=2))
    assert "--kv-transfer-config" not in commands[0]
    assert commands[0][commands[0].index("--decode-context-parallel-size") + 1] == "2"
    assert tuple(commands[0][commands[0].index("--tensor-parallel-size") :][:2]) == ("--tensor-parallel-size", "2")


def test_a_store_gives_every_server_the_connector_of_baton(tmp_path: Path) -> None:
    _config, commands = planned(tmp_path, store="pool://127.0.0.1:8700", topology=Topology(mixed=2))
    for command in commands:
        given = json.loads(command[command.index("--kv-transfer-config") + 1])
        assert (given["kv_connector"], given["kv_load_failure_policy"]) == ("BatonConnector", "recompute")
        assert find_spec(given["kv_connector_module_path"]) is not None
        assert given["kv_connector_extra_config"] == {"store": "pool://127.0.0.1:8700"}


def test_a_model_or_program_that_vllm_lacks_is_refused(tmp_path: Path) -> None:
    config = with_servers(Config(model="hash", engines=EnginesConfig(start="vllm", command="no-such-vllm")), tmp_path)
    with pytest.raises(ConfigError, match="needs a folder with safetensors or a hub name, but hash is hash"):
        engine_processes(config, resolve_model("hash"), tmp_path)
    with pytest.raises(ConfigError, match=r"--dp 2 is for Baton's own workers: use engines\.flags for vLLM"):
        planned(tmp_path, parallel=ParallelConfig(data=2))
    with pytest.raises(ConfigError, match="'no-such-vllm', which starts vLLM: install vLLM, or name it"):
        engine_processes(config, resolve_model(SHAPE, "dummy"), tmp_path)


def test_started_servers_are_all_workers() -> None:
    joined = EnginesConfig(start="vllm", servers=(engine_of("http://a:1"),))
    assert "leave out other engines" in Config(engines=joined).lacks()[0]
    assert Config(engines=EnginesConfig(start="vllm"), topology=Topology(prefill=1, decode=1)).lacks() == []


def test_the_command_starts_serves_and_ends_its_servers() -> None:
    flags = ("--load-format", "dummy", "--mixed", "1", "--engine", "vllm", "--engine-command", " ".join(FAKE))
    with serving(SHAPE, *flags) as server, server.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        assert (answer["usage"]["completion_tokens"], answer["timings"]["decode_worker"]) == (5, "vllm-0")
        (host,) = server.cluster()["hosts"]
        assert httpx.get(f"{host['address']}/v1/models").status_code == 401, "the server needs a key"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{host['address']}/version")


def test_a_missing_program_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", SHAPE, "--load-format", "dummy", "--engine", "vllm", "--engine-command", "no-vllm"]) == 2
    assert "name it with --engine-command" in capsys.readouterr().err


def test_a_command_line_with_an_open_quotation_is_a_wrong_setting() -> None:
    assert EnginesConfig(start="vllm", command="vllm 'a", flags='--name "b').problems() == [
        'engines.command: "vllm \'a" is no command line: No closing quotation',
        "engines.flags: '--name \"b' is no command line: No closing quotation",
    ]
