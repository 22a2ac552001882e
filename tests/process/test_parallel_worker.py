"""Workers that are groups of rank processes: from outside one worker each, alive and dead."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers

from baton.compute.models.resolve import resolve_model
from tests.process.conftest import HEADS
from tests.process.test_models import save_with_bytes
from tests.serving import RunningServer, all_workers_ready, nothing_used, serving
from tests.unit.compute.models import TINY, engine_of, generate

FLOAT32 = ("--dtype", "float32", "--block-tokens", "8")
OUTPUT_TOKENS, LONG_OUTPUT_TOKENS = 16, 100
PROMPTS = [list(range(5 + index, 40 + 3 * index)) for index in range(4)]


def ranks_of(pid: int) -> list[int]:
    """The processes that a worker started."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except (OSError, IndexError):
            continue
        if folder.name.isdigit() and int(parent) == pid:
            found.append(int(folder.name))
    return sorted(found)


def _all_ranks(server: RunningServer) -> list[int]:
    return [rank for pid in server.worker_pids() for rank in (pid, *ranks_of(pid))]


def _watched(pids: list[int]) -> list[int]:
    """Hold on to processes that are not our children, to see them end."""
    return [os.pidfd_open(pid) for pid in pids]


def _all_gone(descriptors: list[int]) -> bool:
    ended = [bool(select.select([descriptor], [], [], 60)[0]) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return all(ended)


@pytest.fixture(scope="module")
def expected(tiny_model: str) -> list[list[int]]:
    """What one rank says to the prompts."""
    engine, _ = engine_of(resolve_model(tiny_model), blocks=50, block_tokens=8, kind="torch")
    return [generate(engine, prompt, range(50), LONG_OUTPUT_TOKENS) for prompt in PROMPTS]


def _answer(server: RunningServer, prompt: list[int], tokens: int = OUTPUT_TOKENS) -> tuple[str, dict]:
    """Return a completion's text and timings."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with server.client(timeout_s=120) as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["timings"]


def _texts(server: RunningServer, texts: list[list[int]], tokens: int = OUTPUT_TOKENS) -> list[str]:
    """Return the beginning of each text, of so many tokens."""
    with server.client() as client:
        return [client.post("/detokenize", json={"tokens": text[:tokens]}).json()["prompt"] for text in texts]


def _check_texts(server: RunningServer, ranks_per_worker: int, expected: list[list[int]]) -> None:
    """Ask for several texts at once, and compare them with those of one rank."""
    assert len(_all_ranks(server)) == len(server.worker_pids()) * ranks_per_worker
    assert "torch engine (the native engine computes whole models" in server.output()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: _answer(server, prompt)[0], PROMPTS))
    assert answers == _texts(server, expected)


def _check_end(server: RunningServer) -> None:
    """Stop the server. No rank may outlive it."""
    watched = _watched(_all_ranks(server))
    assert server.stop() == 0, server.output()
    assert _all_gone(watched), "a rank outlived its server"


@pytest.mark.deep
@pytest.mark.parametrize("topology", [("--mixed", "1", "--tp", "2", "--pp", "2"), ("--tp", "2")], ids=" ".join)
def test_the_text_is_that_of_one_rank(topology: tuple[str, ...], tiny_model: str, expected: list[list[int]]) -> None:
    """On four ranks, and handed over from prefill to decode. The next test has two ranks."""
    with serving(tiny_model, *FLOAT32, *topology) as server:
        _check_texts(server, 4 if "--pp" in topology else 2, expected)
        _check_end(server)


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param(("--mixed", "1", "--tp", "4"), marks=pytest.mark.deep),
        pytest.param(("--tp", "2"), marks=pytest.mark.deep),
        ("--mixed", "1", "-dp", "2"),
        pytest.param(("--pp", "2", "--dp", "2"), marks=pytest.mark.deep),
    ],
    ids=" ".join,
)
def test_ranks_with_whole_experts_give_the_text_of_one_rank(topology: tuple[str, ...], tmp_path: Path) -> None:
    """Four ranks send tokens to their one expert of eight; two ranks sum, and hand over from prefill to decode.

    With data parallelism, each rank computes some of the requests.
    """
    experts = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
    config = transformers.Qwen2MoeConfig(**TINY | HEADS, **experts, shared_expert_intermediate_size=40)
    save_with_bytes(config, tmp_path)
    engine, _ = engine_of(resolve_model(str(tmp_path)), blocks=50, block_tokens=8, kind="torch")
    expected = [generate(engine, prompt, range(50), OUTPUT_TOKENS) for prompt in PROMPTS]
    with serving(str(tmp_path), *FLOAT32, *topology, "--enable-expert-parallel") as server:
        _check_texts(server, 4 if "--pp" in topology else int(topology[-1]), expected)
        _check_end(server)


@pytest.mark.parametrize(
    ("flags", "blocks"),
    [
        (("--mixed", "1", "-dcp", "2"), 80),
        pytest.param(("--dcp", "2"), 80, marks=pytest.mark.deep),
        pytest.param(("--mixed", "1"), 40, marks=pytest.mark.deep),
    ],
)
def test_ranks_that_share_tokens_serve_a_prompt_that_is_too_long_for_one_arena(
    flags: tuple[str, ...], blocks: int, tmp_path: Path
) -> None:
    """An arena of so many bytes holds 640 tokens once, but 320 tokens twice: by each of two ranks with one KV head."""
    save_with_bytes(transformers.LlamaConfig(**TINY | HEADS | {"num_key_value_heads": 1}), tmp_path)
    card, prompt = resolve_model(str(tmp_path)), [5 + 7 * position % 250 for position in range(400)]
    engine, _ = engine_of(card, blocks=80, block_tokens=8, kind="torch")
    expected = [generate(engine, prompt, range(80), OUTPUT_TOKENS)]
    config = tmp_path / "baton.toml"
    config.write_text(f"[kv]\nbytes = {80 * engine.layout.block_bytes}\n")
    with serving(str(tmp_path), *FLOAT32, "--tp", "2", "--config", str(config), *flags) as server:
        assert server.cluster()["workers"][0]["kv_blocks_total"] == blocks
        if blocks * 8 > len(prompt):
            assert [_answer(server, prompt)[0]] == _texts(server, expected)
        else:
            with server.client() as client:
                answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 16})
            assert answer.status_code == 400
            assert "320" in answer.text
        _check_end(server)


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.deep)])
def test_requests_outlive_the_death_of_one_rank(workers: str, tiny_model: str, expected: list[list[int]]) -> None:
    """kill -9 of rank 1 under load is the death of one worker: requests go on when it is back, or on another one.

    Before and after it, the text is that of one rank. No rank outlives the server.
    """
    with serving(tiny_model, *FLOAT32, "--mixed", workers, "--tp", "2") as server:
        _check_texts(server, 2, expected)
        killed = {worker["id"]: worker["pid"] for worker in server.cluster()["workers"]}["mixed-0"]
        (victim,) = ranks_of(killed)
        watched = _watched([killed, victim])
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = pool.map(lambda prompt: _answer(server, prompt, LONG_OUTPUT_TOKENS), PROMPTS)
            server.wait_until(lambda c: all(w["running"] for w in c["workers"]), reason="all workers compute")
            os.kill(victim, signal.SIGKILL)
            texts, timings = zip(*answers, strict=True)
        assert list(texts) == _texts(server, expected, LONG_OUTPUT_TOKENS)
        assert max(timing["attempts"] for timing in timings) == 2, "no request was on the worker that died"
        assert _all_gone(watched), "the worker outlived its rank"
        server.wait_until(all_workers_ready, reason="the worker is back")
        server.wait_until(nothing_used, reason="no block is used")
        assert [_answer(server, PROMPTS[0])[0]] == _texts(server, expected[:1])
        # The thread that waits for the process and the step that waits for its part race: the first one logs its words.
        server.wait_output(f"rank 1 (pid {victim}) was killed by signal 9", "ranks are out of step, the worker ends")
        _check_end(server)


@pytest.mark.deep
def test_a_rank_that_dies_or_stops_while_idle_ends_its_worker(tiny_model: str, tmp_path: Path) -> None:
    """The server notices death at once, and hanging at the next step, of any rank."""
    config = tmp_path / "baton.toml"
    config.write_text("[survival]\nsilent_s = 2.0\n[parallel]\ntensor = 2\n")
    with serving(tiny_model, *FLOAT32, "--mixed", "1", "--config", str(config)) as server:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            (worker,) = server.worker_pids()
            (rank,) = ranks_of(worker)
            watched = _watched([worker, rank])
            os.kill(rank, number)
            if number == signal.SIGSTOP:
                assert len(_answer(server, PROMPTS[0])[0]) > 0
            assert _all_gone(watched), f"a process outlived signal {number}"
            server.wait_until(
                lambda c, dead=worker: [(w["state"], w["pid"] != dead) for w in c["workers"]] == [("ready", True)],
                reason="another worker is there",
            )
            if number == signal.SIGKILL:
                server.wait_output(f"rank 1 (pid {rank}) was killed by signal 9")
        watched = _watched(_all_ranks(server))
        server.process.kill()
        server.process.wait(60)
        assert _all_gone(watched), "a rank outlived the server's crash"


SABOTAGE = """
from pathlib import Path

from baton.compute.ranks.runner import RankModel
from baton.decide.policy.batching import MixedChunked


def broken(self, tokens, rows, kv, ahead=0):
    raise RuntimeError("broken in the midst of a step")


class Sabotage:
    'Breaks the first rank once: the others wait for it within the step.'

    def select(self, candidates, limits, cost):
        done = Path(__file__).with_name("done")
        if candidates and not done.exists():
            done.touch()
            RankModel.forward = broken
        return MixedChunked().select(candidates, limits, cost)
"""


@pytest.mark.deep
def test_an_error_in_one_rank_ends_the_worker_and_its_request_goes_on(
    tiny_model: str, expected: list[list[int]], tmp_path: Path
) -> None:
    """Nobody is left waiting within the step, at the exit neither."""
    (tmp_path / "sabotage.py").write_text(SABOTAGE)
    config = tmp_path / "baton.toml"
    config.write_text("[policy.batching]\nuse = 'sabotage:Sabotage'\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    arguments = (*FLOAT32, "--mixed", "1", "--tp", "2", "--config", str(config))
    with serving(tiny_model, *arguments, environment={"PYTHONPATH": path}) as server:
        watched = _watched(_all_ranks(server))
        text, timings = _answer(server, PROMPTS[0])
        assert [text] == _texts(server, expected[:1])
        assert timings["attempts"] == 2
        assert _all_gone(watched)
        server.wait_until(all_workers_ready, reason="the worker is back")
        server.wait_output("ranks are out of step, the worker ends: RuntimeError: broken in the midst")


def test_the_hash_engine_plays_all_ranks_in_one_process(hash_server: RunningServer) -> None:
    """So that tests of transports and conversions have parallel layouts at once."""
    body = {"prompt": "how KV lies is nobody's business", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    texts: list[str] = []
    with serving("hash", "--tp", "2") as server:
        assert not any(ranks_of(pid) for pid in server.worker_pids())
        for each in (server, hash_server):
            with each.client() as client:
                texts.append(client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"])
    assert texts[0] == texts[1]


def test_a_model_that_ranks_cannot_share_is_refused_at_the_start() -> None:
    """Before anything is loaded, with every problem at once."""
    flags = ["--tp", "2", "--pp", "31", "--dcp", "3", "--enable-expert-parallel", "--port", "0"]
    flags += ["--dp", "2"]
    command = [sys.executable, "-m", "baton.cli.main", "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "3 KV heads cannot be shared by 2 ranks" in done.stderr
    assert "9 query heads cannot be shared by 2 ranks" in done.stderr
    assert "has no experts: leave out --enable-expert-parallel" in done.stderr
    assert "--dcp 3 divides KV that several ranks hold, and --tp 2 holds it once" in done.stderr
    assert "blocks of 16 tokens cannot be shared by 3 ranks" in done.stderr
    assert "--dp 2 gives each rank the whole attention, and --tp 2 divides it: leave out one" in done.stderr
    assert "30 layers cannot be shared by 31 pipeline stages" in done.stderr
