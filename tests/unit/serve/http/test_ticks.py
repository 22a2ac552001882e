"""The windows of load that the policies for roles and scaling get from a live server."""

from __future__ import annotations

from pathlib import Path

from baton.compute.hash_engine import hash_card
from baton.core.config import Config, SloConfig, Topology
from baton.core.limits import LimitsConfig
from baton.core.ticking import Tick
from baton.core.types import Request, RequestId, WorkerId, WorkerView
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
