"""Death, hanging, shutdown: no token, no block, no process and no memory segment is lost or left."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier

import httpx
import pytest

from baton.move.clock import now_s
from tests.serving import NO_TLS, RunningServer, alive, all_workers_ready, nothing_used, serving

STREAMS = 16
LONG = {"prompt": "a request that runs for a while", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def _stream(client: httpx.Client, body: dict) -> Iterator[dict]:
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


@pytest.mark.parametrize("victim", ["decode-0", pytest.param("prefill-0", marks=pytest.mark.deep)])
def test_a_request_outlives_the_death_of_its_worker_with_the_same_text(victim: str, long_text: str) -> None:
    """INV-8: kill -9 in mid-generation; another worker (or the restarted one) adopts the blocks and goes on."""
    with serving("hash", "--prefill", "1", "--decode", "2") as server, server.client() as client:
        pids = {worker["id"]: worker["pid"] for worker in server.cluster()["workers"]}
        text, killed, last = "", False, {}
        for last in _stream(client, LONG):
            if not killed and len(text) > 200:
                os.kill(pids[victim], signal.SIGKILL)
                killed = True
            text += "".join(choice["text"] for choice in last["choices"])
        assert killed
        assert text == long_text
        if last["timings"]["decode_worker"] != victim and victim == "decode-0":
            assert last["timings"]["attempts"] == 2
            assert server.metric("baton_failovers_total") == 1
        server.wait_until(all_workers_ready, reason="the worker is back")
        server.wait_until(nothing_used, reason="no block is used")


def test_sixteen_streams_outlive_the_death_of_their_decode_worker(request: pytest.FixtureRequest) -> None:
    """INV-8: no token is lost or doubled. The longest gap of a stream is recorded, since it depends on the machine."""
    bodies = [{**LONG, "prompt": f"stream {number}", "max_tokens": 1500} for number in range(STREAMS)]
    calm, killed = Barrier(STREAMS), Barrier(STREAMS + 1)
    text_came = threading.Event()
    with serving("hash", "--prefill", "1", "--decode", "1") as server:
        with ThreadPoolExecutor(STREAMS) as threads:
            before = list(threads.map(lambda body: _watched(server, body, calm, threading.Event()), bodies))
            (pid,) = [each["pid"] for each in server.cluster()["workers"] if each["role"] == "decode"]
            running = [threads.submit(_watched, server, body, killed, text_came) for body in bodies]
            text_came.wait(60)
            os.kill(pid, signal.SIGSTOP)  # the first streams do not end before the last ones have their first text
            killed.wait(60)
            os.kill(pid, signal.SIGKILL)
            after = [stream.result() for stream in running]
        assert [stream.text for stream in after] == [stream.text for stream in before]
        assert {stream.attempts for stream in before} == {1}
        assert {stream.attempts for stream in after} <= {1, 2}
        moved = sum(stream.attempts == 2 for stream in after)
        assert moved >= STREAMS // 2, "most of them still ran"
        assert server.metric("baton_failovers_total") == moved
        assert server.metric("baton_requests_total", 'outcome="finished"') == 2 * STREAMS
        server.wait_until(all_workers_ready, reason="the worker is back")
        server.wait_until(nothing_used, reason="no block is used")
    for name, streams in (("longest_gap_calm_s", before), ("longest_gap_s", after)):
        request.node.user_properties.append((name, round(max(stream.gap_s_max for stream in streams), 3)))


@dataclass(slots=True)
class Watched:
    """A stream that was read to its end."""

    text: str = ""
    attempts: int = 0
    gap_s_max: float = 0.0


def _watched(server: RunningServer, body: dict, barrier: Barrier, text_came: threading.Event) -> Watched:
    """Read a stream. After the first text, set the event and wait for all other streams."""
    found, last_s = Watched(), 0.0
    with server.client() as client:
        for chunk in _stream(client, body):
            found.gap_s_max, last_s = max(found.gap_s_max, now_s() - (last_s or now_s())), now_s()
            if not found.text:
                text_came.set()
                barrier.wait(60)
                last_s = now_s()
            found.text += "".join(choice["text"] for choice in chunk["choices"])
            found.attempts = chunk.get("timings", {}).get("attempts", found.attempts)
    return found


@pytest.mark.deep
def test_sigint_lets_a_running_request_finish(long_text: str) -> None:
    with serving("hash") as server:
        _check_end(server, signal.SIGINT, long_text)


def test_requests_outlive_a_hung_worker_the_death_of_every_worker_and_sigterm(tmp_path: Path, long_text: str) -> None:
    """A hung worker is killed, and its request goes on. Then every worker dies at once. Then the server is stopped."""
    config = tmp_path / "baton.toml"
    config.write_text("[survival]\nsilent_s = 3.0\n")
    with serving("hash", "--config", str(config)) as server:
        _check_hung_worker(server, long_text)
        server.wait_until(all_workers_ready, reason="the worker is back")
        _check_dead_workers(server)
        server.wait_until(all_workers_ready, reason="the workers are back")
        _check_end(server, signal.SIGTERM, long_text)


def _check_dead_workers(server: RunningServer) -> None:
    """With every worker killed, requests wait for the restarted ones and close exactly once, with the right text."""
    with server.client() as client:
        bodies = [{**LONG, "prompt": f"request number {index}", "max_tokens": 400} for index in range(8)]
        expected = [client.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies]
        answers: list[httpx.Response | None] = [None] * len(bodies)

        def ask(index: int) -> None:
            with server.client() as own:
                answers[index] = own.post("/v1/completions", json=bodies[index])

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        server.wait_until(lambda c: sum(w["running"] for w in c["workers"]) >= 4, reason="several requests run")
        for pid in server.worker_pids():
            os.kill(pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert [answer.json()["choices"][0]["text"] for answer in answers if answer is not None] == expected
        server.wait_until(nothing_used, reason="no block is used")


@pytest.fixture(scope="module")
def long_text(hash_server: RunningServer) -> str:
    """What the LONG request says when nothing happens to it."""
    with hash_server.client() as client:
        return client.post("/v1/completions", json=LONG).raise_for_status().json()["choices"][0]["text"]


def _check_hung_worker(server: RunningServer, long_text: str) -> None:
    """Stop a worker with SIGSTOP under a request."""
    with server.client() as client:
        stopped = {worker["id"]: worker["pid"] for worker in server.cluster()["workers"]}["decode-0"]
        text, last = "", {}
        for last in _stream(client, LONG):
            if not text:
                os.kill(stopped, signal.SIGSTOP)
            text += "".join(choice["text"] for choice in last["choices"])
        assert text == long_text
        assert last["timings"]["attempts"] == 2
        assert not alive(stopped)


def _check_end(server: RunningServer, number: signal.Signals, long_text: str) -> None:
    """A signal ends everything, and lets the running request finish."""
    with server.client() as client:
        pids = server.worker_pids()
        text, told = "", False
        for chunk in _stream(client, LONG):
            text += "".join(choice["text"] for choice in chunk["choices"])
            if not told:
                server.process.send_signal(number)
                told = True
        assert text == long_text, "the running request was cut off"
        assert server.process.wait(60) == 0, server.output()
        assert not any(alive(pid) for pid in pids)


def test_a_crash_of_the_server_leaves_no_process_and_no_segment() -> None:
    segments = {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").exists() else set()
    with serving("hash") as server:
        pids = server.worker_pids()
        server.process.kill()
        server.process.wait(60)
        for pid in pids:
            _gone(pid)
    if Path("/dev/shm").exists():
        assert {path.name for path in Path("/dev/shm").iterdir()} <= segments


def _gone(pid: int) -> None:
    """Wait for a process that is not our child: its end closes the pidfd."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([descriptor], [], [], 60)
    os.close(descriptor)
    assert ready, f"worker {pid} outlived its server"


def test_a_worker_that_cannot_load_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF not really")
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli.main", "serve", str(broken), "--port", "0"], capture_output=True, timeout=60
    )
    assert done.returncode == 2
    assert b"model.gguf" in done.stderr


def test_a_replayed_log_gives_the_live_decisions(tmp_path: Path) -> None:
    """INV-7, with deaths, cancels and a role flip in it."""
    log = tmp_path / "decisions.log"
    with serving("hash", "--prefill", "2", "--decode", "2", "--log", str(log)) as server, server.client() as client:
        for index in range(5):
            client.post("/v1/completions", json={**LONG, "max_tokens": 50, "seed": index}).raise_for_status()
        for count, _chunk in enumerate(_stream(client, LONG)):
            if count == 5:
                os.kill(server.worker_pids()[2], signal.SIGKILL)
            if count == 200:
                client.post("/cluster/workers/prefill-1/role", json={"role": "decode"}).raise_for_status()
                break
        client.post("/v1/completions", json=LONG).raise_for_status()
    command = [sys.executable, "-m", "baton.cli.main", "replay"]
    done = subprocess.run([*command, str(log)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert "the same decisions" in done.stdout
    torn = tmp_path / "torn.log"
    torn.write_bytes(log.read_bytes()[:-3])
    cut = subprocess.run([*command, str(torn)], capture_output=True, text=True, timeout=60)
    assert (cut.returncode, "the same decisions" in cut.stdout) == (1, True)
    foreign = subprocess.run([*command, __file__], capture_output=True, text=True, timeout=60)
    assert foreign.returncode == 2
    assert "is no decision log" in foreign.stderr


def test_a_server_whose_output_nobody_reads_any_more_serves_and_ends() -> None:
    """`baton serve | head -1` used to stay `loading` for ever, and ignored SIGTERM."""
    command = [sys.executable, "-m", "baton.cli.main", "serve", "hash", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        url = next(word for word in process.stdout.readline().decode().split() if word.startswith("http://"))
        process.stdout.close()
        try:
            with httpx.Client(base_url=url, timeout=60, verify=NO_TLS) as client:
                assert any(client.get("/health").status_code == 200 for _ in range(20_000)), "it never became ready"
                body = {"prompt": "anybody there?", "max_tokens": 3}
                assert client.post("/v1/completions", json=body).status_code == 200
            process.terminate()
            process.wait(30)
        finally:
            process.kill()
