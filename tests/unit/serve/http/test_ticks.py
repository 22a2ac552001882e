"""The windows of load that the policies for roles and scaling get from a live server."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.compute.hash_engine import hash_card
from baton.core.config import Config, Plugin, PolicyChoice, SloConfig, Topology
from baton.core.limits import LimitsConfig
from baton.core.ticking import Tick
from baton.core.types import Request, RequestId, WorkerId, WorkerView
from baton.decide.policy.vtc import VirtualTokenCounter
from baton.move.clock import now_s
from baton.serve.live.assembly import HOST, assemble
from baton.serve.live.log_file import read_log


class IdleWorker:
    """A worker that computes nothing."""

    state = "ready"
    pid = 0
    attention_backend = ""

    def __init__(self, name: str) -> None:
        self.view = WorkerView(id=WorkerId(name), host=HOST, role="mixed")

    def send(self, message: object) -> None:
        """Drop the message."""


class Uncounted(VirtualTokenCounter):
    """Counts no request, because it raises."""

    def joined(self, request: Request) -> None:
        raise KeyError(request.tenant)


def test_a_failure_of_the_fairness_policy_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    policy = PolicyChoice(fairness=Plugin(use=f"{__name__}:Uncounted"))
    limits = LimitsConfig(queue_s=0)  # without an event loop there are no timers
    parts = assemble(Config(model="hash", topology=Topology(mixed=1), policy=policy, limits=limits), hash_card())
    link = IdleWorker("a")
    parts.driver.links[link.view.id] = link
    parts.driver.join(link)
    parts.gateway.state = "ready"
    for name in ("r", "s"):
        request = Request(id=RequestId(name), prompt_tokens=2, output_tokens_max=3, arrived_at_s=now_s())
        parts.gateway.submit(request, [5, 6])
    assert caplog.messages == []
    for _ in range(3):
        parts.driver.tick()
    assert parts.own is not None
    parts.own.arena.close()
    failure = "the policy Uncounted failed: KeyError: ''; where it fails, priority and arrival decide the order"
    assert caplog.messages == [failure]


def test_a_window_has_no_load_of_the_time_without_ticks(tmp_path: Path) -> None:
    """One worker cannot change its role, so the request arrives before the first tick."""
    log = tmp_path / "decisions.log"
    slo = SloConfig(ttft_s=1000.0, tpot_s=1000.0)
    limits = LimitsConfig(queue_s=0)  # without an event loop there are no timers
    config = Config(model="hash", topology=Topology(mixed=1), slo=slo, limits=limits, log=str(log))
    parts = assemble(config, hash_card())
    driver = parts.driver
    for name in ("a", "b"):
        link = IdleWorker(name)
        driver.links[link.view.id] = link
        driver.join(link)
        if name == "a":
            request = Request(id=RequestId("r"), prompt_tokens=2, output_tokens_max=3, arrived_at_s=now_s())
            parts.gateway.state = "ready"
            parts.gateway.submit(request, [5, 6])
            driver.tick()
    driver.tick()
    assert driver.log is not None
    driver.log.close()
    assert parts.own is not None
    parts.own.arena.close()
    _, decisions = read_log(log)
    windows = [decision.event.window for decision in decisions if isinstance(decision.event, Tick)]
    assert [window.arrived_requests for window in windows] == [0]
