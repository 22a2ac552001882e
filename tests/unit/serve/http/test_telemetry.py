"""The spans and metrics of a request, from the times of its choices, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.core.errors import ConfigError
from baton.core.limits import LimitsConfig
from baton.core.types import OutputToken, Request, RequestId, WorkerId
from baton.move.clock import now_s
from baton.serve.http.budgets import Budgets
from baton.serve.http.edge import RequestContext
from baton.serve.http.identity import NO_LIMITS, Identity
from baton.serve.http.telemetry import Telemetry, open_telemetry, phases
from baton.serve.http.wire.schemas import SloFields
from baton.serve.live.live_request import Finish, LiveRequest

P, D = WorkerId("prefill-0"), WorkerId("decode-0")
SENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"


def live() -> LiveRequest:
    return LiveRequest(Request(id=RequestId("r"), prompt_tokens=3, output_tokens_max=9, arrived_at_s=10.0), [1, 2, 3])


def push(request: LiveRequest, index: int, worker: WorkerId, now_s: float) -> None:
    request.push(OutputToken(request.request.id, 1, index, 50 + index), worker, now_s, step_s=0.5)


def lengths(request: LiveRequest, ended_s: float) -> dict[str, tuple[float, float]]:
    return {phase.name: (phase.start_s, phase.end_s) for phase in phases(request, ended_s)}


def test_the_phases_of_a_request_that_is_cut_off_end_with_it() -> None:
    request = live()
    assert lengths(request, 30.0) == {"queue": (10.0, 30.0)}
    request.stamps.start(P, 11.0)
    assert lengths(request, 30.0) == {"queue": (10.0, 11.0), "prefill": (11.0, 30.0)}
    push(request, 0, P, 13.0)
    assert lengths(request, 30.0)["handoff"] == (13.0, 30.0), "no decode worker has it yet"
    push(request, 1, D, 15.0)
    assert lengths(request, 30.0)["handoff"] == (13.0, 14.5)
    assert lengths(request, 30.0)["decode"] == (14.5, 30.0)


def test_a_finished_request_ends_with_its_last_token_on_the_socket() -> None:
    request = live()
    request.stamps.start(P, 11.0)
    push(request, 0, P, 13.0)
    push(request, 1, P, 14.0)
    request.close(Finish(outcome="finished", reason="stop"))
    request.stamps.sent(2, 14.5)
    assert lengths(request, 30.0) == {"queue": (10.0, 11.0), "prefill": (11.0, 13.0), "decode": (13.0, 14.5)}


def test_a_request_for_one_token_has_no_decode() -> None:
    request = live()
    request.stamps.start(P, 11.0)
    push(request, 0, P, 13.0)
    request.close(Finish(outcome="finished", reason="length"))
    assert list(lengths(request, 30.0)) == ["queue", "prefill"]


class Collected:
    """Telemetry whose spans and metrics stay in memory."""

    def __init__(self) -> None:
        self._spans, self._metrics = InMemorySpanExporter(), InMemoryMetricReader()
        self.telemetry = Telemetry([SimpleSpanProcessor(self._spans)], [self._metrics])

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._spans.get_finished_spans()}

    def counts(self) -> Mapping[tuple[str, Any], int]:
        """Return the number of values of each metric, by its name and the kind of error."""
        data = self._metrics.get_metrics_data()
        assert data is not None
        metrics = [metric for part in data.resource_metrics for scope in part.scope_metrics for metric in scope.metrics]
        return {
            (metric.name, point.attributes.get("error.type")): point.count
            for metric in metrics
            for point in metric.data.data_points
        }


@pytest.fixture
def collected() -> Collected:
    return Collected()


def context(headers: Mapping[bytes, bytes]) -> RequestContext:
    budget = Budgets(LimitsConfig()).begin("me", NO_LIMITS, is_counted=False, now_s=0.0)
    return RequestContext("x", now_s(), Identity(), "me", budget, SloFields(), "/v1/completions", headers)


def test_a_failed_choice_fails_its_trace_and_counts_no_latency(collected: Collected) -> None:
    trace = collected.telemetry.begin(context({}), "chat")
    request = live()
    trace.follow("m", request)
    request.close(Finish(outcome="rejected", reject="slo", message="too late", retry_after_s=1.0))
    trace.end("x")
    root = collected.spans()["chat m"]
    assert root.attributes is not None
    assert (root.attributes["error.type"], root.status.description) == ("slo", "too late")
    assert collected.counts() == {("gen_ai.server.request.duration", "slo"): 1}


def test_a_trace_that_the_client_does_not_sample_is_passed_on_and_not_exported(collected: Collected) -> None:
    trace = collected.telemetry.begin(context({b"traceparent": SENT.encode()}), "chat")
    assert trace.traceparent.startswith(SENT[:36])
    assert trace.traceparent.endswith("-00")
    trace.end("x")
    assert not collected.spans()
    assert collected.counts() == {("gen_ai.server.request.duration", None): 1}


@pytest.mark.parametrize("sent", ["", "00-short", "ff" + SENT[2:], SENT.upper()])
def test_without_telemetry_only_valid_headers_are_passed_on(sent: str) -> None:
    assert context({b"traceparent": SENT.encode()}).traceparent == SENT
    assert context({b"traceparent": sent.encode()}).traceparent == ""


def test_a_protocol_that_is_not_spoken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"):
        open_telemetry()
