"""When a request's latencies are recorded: at the client's socket, not when the worker is done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from baton.compute.hash_engine import hash_card
from baton.core.config import Config, SloConfig, Topology
from baton.core.limits import LimitsConfig
from baton.core.messages import RequestFinished, StepReport
from baton.core.types import OutputToken, Request, RequestId, WorkerView
from baton.move.clock import now_s
from baton.serve.live.assembly import HOST, Parts, assemble
from baton.serve.live.live_request import LiveRequest
from baton.serve.live.metrics_registry import render

REQUEST = RequestId("r")


class Idle:
    """A worker that takes whatever it is sent."""

    def __init__(self, view: WorkerView) -> None:
        self.view = view
        self.state = "ready"
        self.pid = 0
        self.attention_backend = ""

    def send(self, message: object) -> None:
        """Take it."""


@pytest.fixture
def parts() -> Iterator[Parts]:
    slo = SloConfig(ttft_s=1000.0, tpot_s=1000.0)
    limits = LimitsConfig(queue_s=0)  # without an event loop there are no timers
    config = Config(model="hash", topology=Topology(mixed=1), slo=slo, limits=limits)
    made = assemble(config, hash_card())
    link = Idle(made.own.setups[0].view)
    made.driver.links[link.view.id] = link
    made.driver.join(link)
    made.gateway.state = "ready"
    yield made
    made.own.arena.close()


def _submit(parts: Parts) -> LiveRequest:
    slo = parts.gateway.slo
    request = Request(id=REQUEST, prompt_tokens=2, output_tokens_max=3, arrived_at_s=now_s(), slo=slo)
    return parts.gateway.submit(request, [5, 6])


def _apply_report(parts: Parts, *indexes: int, ended: bool = False) -> None:
    """Let the worker report output tokens, and the end."""
    view = WorkerView(id=parts.own.setups[0].view.id, host=HOST, role="mixed")
    tokens = tuple(OutputToken(REQUEST, 1, index, 7) for index in indexes)
    end = (RequestFinished(REQUEST, 1, view.id, "length"),) if ended else ()
    parts.driver.apply_report(StepReport(view.id, tokens, end, view))


def _count(parts: Parts, name: str) -> float:
    lines = render(parts.metrics, {"hash": parts.metrics}).decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def _latencies(parts: Parts) -> list[float]:
    names = ("e2e_request_latency_seconds_count", "time_per_output_token_seconds_count", "requests_in_slo_total")
    return [_count(parts, f"baton_{name}") for name in names]


def test_latencies_count_to_the_client_and_not_to_the_worker(parts: Parts) -> None:
    """A reader that is slower than the worker: it takes the end while an earlier token is still being sent."""
    live = _submit(parts)
    _apply_report(parts, 0)
    asyncio.run(live.next())
    _apply_report(parts, 1, 2, ended=True)
    assert _count(parts, "baton_requests_total") == 1
    parts.gateway.mark_sent(live, 1)
    assert _latencies(parts) == [0, 0, 0]
    asyncio.run(live.next())
    parts.gateway.mark_sent(live, 2)
    assert _latencies(parts) == [1, 1, 1]


def test_a_request_that_ends_before_its_first_token_is_sent_has_its_tpot_recorded(parts: Parts) -> None:
    live = _submit(parts)
    _apply_report(parts, 0, 1, 2, ended=True)
    asyncio.run(live.next())
    parts.gateway.mark_sent(live, 3)
    assert _latencies(parts) == [1, 1, 1]
    assert live.timings().tpot_s is not None


def test_a_request_that_is_stopped_by_its_text_is_recorded_when_that_is_sent(parts: Parts) -> None:
    live = _submit(parts)
    _apply_report(parts, 0, 1)
    asyncio.run(live.next())
    parts.gateway.finish(live)
    assert _latencies(parts) == [0, 0, 0]
    parts.gateway.mark_sent(live, 2)
    assert _latencies(parts) == [1, 1, 1]


def test_a_cancelled_request_has_no_latency(parts: Parts) -> None:
    live = _submit(parts)
    _apply_report(parts, 0)
    asyncio.run(live.next())
    parts.gateway.cancel(live)
    parts.gateway.mark_sent(live, 1)
    assert _latencies(parts) == [0, 0, 0]


def test_the_text_or_the_client_ends_a_request(parts: Parts) -> None:
    """Both end it at once; a text that is complete counts as finished."""
    for end, outcome in ((parts.gateway.finish, "finished"), (parts.gateway.cancel, "cancelled")):
        live = _submit(parts)
        _apply_report(parts, 0)
        end(live)
        assert live.finish is not None
        assert live.finish.outcome == outcome
        assert not parts.driver.live


def test_a_prompt_has_started_when_its_first_step_began(parts: Parts) -> None:
    """The worker tells it with the report of that step, which took 5 s."""
    live = _submit(parts)
    view = WorkerView(id=parts.own.setups[0].view.id, host=HOST, role="mixed")
    token = OutputToken(REQUEST, 1, 0, 7)
    parts.driver.apply_report(StepReport(view.id, (token,), (), view, step_s=5.0, started=(REQUEST,)))
    prefill_s = live.timings().prefill_s
    assert prefill_s is not None
    assert abs(prefill_s - 5.0) < 1e-6


def test_a_worker_shows_what_it_was_given_before_it_reports_it(parts: Parts) -> None:
    """The first request has its blocks and runs; the second waits until the worker asks for some."""
    loads: list[tuple[int, int]] = []
    (worker,) = parts.driver.links
    for name in ("r", "another"):
        request = Request(id=RequestId(name), prompt_tokens=2, output_tokens_max=3, arrived_at_s=now_s())
        parts.gateway.submit(request, [5, 6])
        view = parts.driver.links[worker].view
        loads.append((view.running_requests, view.waiting_requests))
    assert loads == [(1, 0), (1, 1)]
    _apply_report(parts, 0)
    assert parts.driver.links[worker].view.running_requests == 0
