"""The supervisor with real worker processes: ready, restarts, and giving up."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.compute.hash_engine import hash_card
from baton.core.config import Config, Plugin, SurvivalConfig, Topology
from baton.core.messages import RetireWorker, StartWorker, WorkerJoined, WorkerLost
from baton.core.types import WorkerId
from baton.serve.host.supervisor import Notices, Supervisor
from baton.serve.live.assembly import Parts, assemble
from baton.serve.live.log_file import read_log
from baton.serve.messages.setup import WorkerSetup
from baton.serve.model_fleet import OwnWorkers
from tests.serving import alive, serving

WAIT_S = 60.0
PAUSE_S = 5.0
"""Length of a pause: twice the limit of silence of its test."""


def _parts(log: str = "") -> Parts:
    return assemble(Config(model="hash", topology=Topology(prefill=1, decode=1), log=log), hash_card())


async def _first_notice(
    parts: Parts, setups: Sequence[WorkerSetup], descriptors: Sequence[int], restarts_max: int
) -> str:
    """Start the workers and wait until all remaining ones are ready, or none remains. Return which."""
    notice: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    notices = Notices(
        tell=lambda text: None,
        ready=lambda: notice.set_result("ready"),
        failed=lambda reason: notice.set_result(f"failed: {reason}"),
    )
    supervisor = Supervisor(
        OwnWorkers(parts.driver), setups, descriptors, SurvivalConfig(restarts_max=restarts_max), notices
    )
    supervisor.start()
    try:
        return await asyncio.wait_for(notice, WAIT_S)
    finally:
        await supervisor.stop()


def test_workers_that_cannot_be_started_are_given_up_with_the_reason() -> None:
    """It used to end the task that keeps the worker, so that the server stayed `loading` for ever."""
    parts = _parts()
    notice = asyncio.run(_first_notice(parts, parts.own.setups, descriptors=[-1], restarts_max=1))
    assert notice.startswith("failed: ")
    assert "could not be started" in notice
    assert not any(alive(link.pid) for link in parts.driver.links.values() if link.pid)
    parts.own.arena.close()


def test_the_rest_is_ready_when_one_worker_cannot_load() -> None:
    """A role is a preference: one worker serves, slower but at once, instead of 503 for ever."""
    parts = _parts()
    prefill, decode = parts.own.setups
    broken = msgspec.structs.replace(decode, batching=Plugin(use="baton.decide.policy.batching:NoSuchPolicy"))
    assert asyncio.run(_first_notice(parts, [prefill, broken], parts.own.descriptors, restarts_max=5)) == "ready"
    assert {link.view.id: link.state for link in parts.driver.links.values()}[decode.view.id] == "lost"
    parts.own.arena.close()


def test_a_worker_that_hangs_again_is_started_again(tmp_path: Path) -> None:
    """Only one that says that it cannot load is given up early; one that hung has all its restarts."""
    config = tmp_path / "baton.toml"
    config.write_text("[survival]\nsilent_s = 2.5\n")
    with serving("hash", "--config", str(config), "--mixed", "1") as server, server.client() as client:
        body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
        for _ in range(2):
            (pid,) = server.worker_pids()
            os.kill(pid, signal.SIGSTOP)
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
            assert answer["timings"]["attempts"] == 2
        assert "given up" not in server.output()


def test_a_pause_of_the_whole_machine_ends_no_worker(tmp_path: Path) -> None:
    """Before, the first check after a pause or a restored checkpoint killed every worker, with its warm model."""
    config = tmp_path / "baton.toml"
    config.write_text("[survival]\nsilent_s = 2.5\n")
    with serving("hash", "--config", str(config), "--mixed", "2") as server, server.client() as client:
        workers = server.worker_pids()
        pids = (server.process.pid, *workers)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(PAUSE_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        assert answer["timings"]["attempts"] == 1
        assert server.worker_pids() == workers


def test_a_worker_that_is_given_up_is_no_longer_in_the_metrics(tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    config.write_text("[survival]\nrestarts_max = 0\n")
    with serving("hash", "--config", str(config), "--mixed", "2") as server, server.client() as client:
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        server.wait_until(lambda state: state["workers"][0]["state"] == "lost", reason="the worker is given up")
        metrics = client.get("/metrics").text
        assert 'worker="mixed-1"' in metrics
        assert 'worker="mixed-0"' not in metrics
        assert client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3}).status_code == 200


def test_a_worker_that_is_back_or_added_joins_with_its_limits(tmp_path: Path) -> None:
    """Policies took 0 for `not told`: after a death they planned with an arena without end."""
    path = tmp_path / "decisions.log"
    parts = _parts(log=str(path))

    async def live() -> None:
        ready: asyncio.Queue[None] = asyncio.Queue()
        notices = Notices(tell=lambda text: None, ready=lambda: ready.put_nowait(None), failed=lambda reason: None)
        supervisor = Supervisor(
            OwnWorkers(parts.driver), parts.own.setups, parts.own.descriptors, SurvivalConfig(), notices
        )
        supervisor.start()
        try:
            await asyncio.wait_for(ready.get(), WAIT_S)
            os.kill(parts.driver.links[parts.own.setups[0].view.id].pid, signal.SIGKILL)
            await asyncio.wait_for(ready.get(), WAIT_S)
            supervisor.resize(StartWorker(WorkerId("one-more"), "decode"))
            await asyncio.wait_for(ready.get(), WAIT_S)
        finally:
            await supervisor.stop()

    asyncio.run(live())
    parts.driver.log.close()
    joined = [entry.event.view for entry in read_log(path)[1] if isinstance(entry.event, WorkerJoined)]
    assert len(joined) == 4
    assert joined[-1].id == "one-more"
    assert {(view.kv_tokens_max, view.step_tokens_max, view.requests_max) for view in joined} == {
        (parts.own.setups[0].view.kv_tokens_max, 512, 64)
    }
    parts.own.arena.close()


def test_a_host_whose_workers_are_all_retired_starts_one_again() -> None:
    """On several hosts scaling may take the last one of a host. The next one is like those that there were."""
    parts = _parts()
    supervised = parts.own.setups[:1]

    async def live() -> None:
        ready, retired = asyncio.Event(), asyncio.Event()
        notices = Notices(
            tell=lambda text: retired.set() if "is retired" in text else None,
            ready=ready.set,
            failed=lambda reason: None,
        )
        supervisor = Supervisor(OwnWorkers(parts.driver), supervised, parts.own.descriptors, SurvivalConfig(), notices)
        supervisor.start()
        try:
            await asyncio.wait_for(ready.wait(), WAIT_S)
            supervisor.resize(RetireWorker(supervised[0].view.id))
            await asyncio.wait_for(retired.wait(), WAIT_S)
            ready.clear()
            supervisor.resize(StartWorker(WorkerId("one-more"), "decode"))
            await asyncio.wait_for(ready.wait(), WAIT_S)
        finally:
            await supervisor.stop()

    asyncio.run(live())
    parts.own.arena.close()


def test_an_added_worker_that_cannot_be_kept_up_is_forgotten_and_the_coordinator_told(tmp_path: Path) -> None:
    """Its model does not load. Before, the coordinator waited for it for ever, and /cluster listed each such one."""
    path, added = tmp_path / "decisions.log", WorkerId("one-more")
    parts = _parts(log=str(path))
    (good, *_) = parts.own.setups
    broken = msgspec.structs.replace(good, batching=Plugin(use="baton.decide.policy.batching:NoSuchPolicy"))

    failures: list[str] = []

    async def live() -> None:
        lost: asyncio.Queue[str] = asyncio.Queue()
        notices = Notices(
            tell=lambda text: lost.put_nowait(text) if "given up" in text else None,
            ready=lambda: None,
            failed=failures.append,
        )
        supervisor = Supervisor(
            OwnWorkers(parts.driver), [broken], parts.own.descriptors, SurvivalConfig(restarts_max=0), notices
        )
        supervisor._slots.clear()  # scaling has retired all others
        supervisor.resize(StartWorker(added, "decode"))
        try:
            await asyncio.wait_for(lost.get(), WAIT_S)
        finally:
            await supervisor.stop()

    asyncio.run(live())
    parts.driver.log.close()
    parts.own.arena.close()
    assert failures == [], "a server whose other hosts serve ends with it"
    assert added not in parts.driver.links
    assert [entry.event.worker for entry in read_log(path)[1] if isinstance(entry.event, WorkerLost)] == [added]
