"""Load generators of the ecosystem run against a server without a change to them, and report no error."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tests.clients.environments import Environment, installed
from tests.engines.test_real_vllm import PEERS, SETTINGS, installed_model
from tests.serving import RunningServer, serving

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1800)]
REQUESTS = 40
MOONCAKE = [(0, 100, 8, [1]), (50, 700, 6, [1, 2]), (100, 700, 6, [1, 3]), (150, 1200, 5, [1, 2, 4]), (200, 90, 9, [5])]
"""Requests of a trace: ms, input tokens, output tokens, ids of its blocks of 512 tokens."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with one token per byte, as the hash model has, in the form of Hugging Face."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bytes_only = Tokenizer(BPE({letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    bytes_only.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bytes_only.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "eos_token": "!"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving("hash") as running:
        yield running


@pytest.fixture(scope="module")
def guidellm() -> Environment:
    return installed("guidellm-0.8.1", "guidellm==0.8.1")


def counted(server: RunningServer) -> dict[str, float]:
    outcomes = ("finished", "cancelled", "failed", "rejected")
    return {name: server.metric("baton_requests_total", f'outcome="{name}"') for name in outcomes}


def since(server: RunningServer, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in counted(server).items() if value != before[name]}


def checked(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def guidellm_totals(done: subprocess.CompletedProcess[str], report: Path) -> dict[str, int]:
    checked(done)
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    return benchmark["metrics"]["request_totals"]


def test_guidellm_plays_synthetic_requests(
    server: RunningServer, guidellm: Environment, tokenizer: Path, tmp_path: Path
) -> None:
    before, report = counted(server), tmp_path / "report.json"
    done = guidellm.run(
        "guidellm", "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={server.url}",
        "--profile", "kind=concurrent,streams=4",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--output", f"kind=json,path={report}",
    )  # fmt: skip
    totals = guidellm_totals(done, report)
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    assert since(server, before)["finished"] >= REQUESTS


def test_guidellm_replays_a_mooncake_trace(
    server: RunningServer, guidellm: Environment, tokenizer: Path, tmp_path: Path
) -> None:
    before, trace, report = counted(server), tmp_path / "trace.jsonl", tmp_path / "report.json"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in MOONCAKE))
    done = guidellm.run(
        "guidellm", "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={server.url}",
        "--profile", "kind=replay,time_scale=0.001",  # it takes the trace's milliseconds as seconds
        "--tokenizer", f"kind=hf_auto,model={tokenizer}",
        "--data", json.dumps({"kind": "mooncake", "source": {"kind": "json_file", "path": str(trace)}}),
        "--output", f"kind=json,path={report}",
    )  # fmt: skip
    totals = guidellm_totals(done, report)
    assert totals["errored"] == 0
    assert totals["successful"] >= len(MOONCAKE) - 1, (
        "it ends with the last request in processing, so the server counts that"
    )
    outcomes = since(server, before)
    assert (outcomes.keys(), outcomes["finished"] >= len(MOONCAKE)) == ({"finished"}, True)


def test_aiperf_cancels_a_third_of_its_requests(server: RunningServer, tokenizer: Path, tmp_path: Path) -> None:
    before = counted(server)
    done = installed("aiperf-0.13.0", "aiperf==0.13.0").run(
        "aiperf", "profile", "--model", "hash", "--url", server.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", tokenizer, "--isl", "200", "--osl", "400", "--concurrency", "8", "--request-count", "100",
        "--request-cancellation-rate", "30", "--request-cancellation-delay", "0.01", "--random-seed", "1",
        "--extra-inputs", "ignore_eos:true", "--ui-type", "none", "--artifact-dir", tmp_path,
        variables={"HF_HUB_OFFLINE": ""},  # where it is set, aiperf reads no tokenizer from a folder
    )  # fmt: skip
    checked(done)
    outcomes = since(server, before)
    assert outcomes.keys() <= {"finished", "cancelled"}
    assert outcomes.get("cancelled", 0) > 0
    state = server.wait_until(lambda state: not any(each["running"] for each in state["workers"]), reason="all ended")
    assert all(host["kv_blocks_used"] == 0 for host in state["hosts"])


def test_vllm_bench_serve_reports_no_failure(server: RunningServer, tokenizer: Path, tmp_path: Path) -> None:
    installed_model()
    report = tmp_path / "report.json"
    command = [
        PEERS / "vllm" / "bin" / "python", "-m", "vllm.entrypoints.cli.main", "bench", "serve",
        "--backend", "openai", "--base-url", server.url, "--model", "hash", "--tokenizer", tokenizer,
        "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16", "--ignore-eos",
        "--num-prompts", str(REQUESTS), "--request-rate", "20", "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--goodput", "ttft:5000", "tpot:500",
        "--save-result", "--result-dir", tmp_path, "--result-filename", report.name,
    ]  # fmt: skip
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **SETTINGS}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=environment)
    checked(done)
    found = json.loads(report.read_text())
    assert (found["completed"], found["failed"]) == (REQUESTS, 0)
    assert found["total_output_tokens"] == REQUESTS * 16
