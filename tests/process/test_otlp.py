"""A server with `--otlp` sends a trace and metrics of each request to a receiver of OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.serving import RunningServer, serving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
WAIT_S = 30


@dataclass
class Receiver:
    """What an OTLP receiver has got so far."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    """The latest state of each metric by its name."""
    resources: list[dict[str, Any]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, path: str, body: bytes) -> None:
        with self.changed:
            if path == "/v1/traces":
                for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                    self.resources.append(values(part.resource.attributes))
                    self.spans += [span for scope in part.scope_spans for span in scope.spans]
            else:
                for part in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    self.metrics |= {metric.name: metric for scope in part.scope_metrics for metric in scope.metrics}
            self.changed.notify_all()

    def trace(self, request_id: str) -> tuple[Span, list[Span]]:
        """Wait for the trace of an HTTP request. Return its root and the spans below it, by their begin."""
        with self.changed:
            assert self.changed.wait_for(lambda: self._root(request_id) is not None, WAIT_S), "no such trace came"
            root = self._root(request_id)
            assert root is not None
            below = [span for span in self.spans if span.parent_span_id == root.span_id]
            return root, sorted(below, key=lambda span: span.start_time_unix_nano)

    def _root(self, request_id: str) -> Span | None:
        for span in self.spans:
            if span.kind == Span.SPAN_KIND_SERVER and values(span.attributes).get("baton.request.id") == request_id:
                return span
        return None


def values(attributes: Any) -> dict[str, Any]:
    def value(pair: KeyValue) -> Any:
        kind = pair.value.WhichOneof("value")
        found = getattr(pair.value, kind)
        return [each.string_value for each in found.values] if kind == "array_value" else found

    return {pair.key: value(pair) for pair in attributes}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    received = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield received
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(receiver: Receiver) -> Iterator[RunningServer]:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_METRIC_EXPORT_INTERVAL": "100",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
    }
    with serving("hash", "--otlp", environment=environment) as running:
        yield running


def ask(server: RunningServer, request_id: str, path: str = "/v1/chat/completions", **fields: Any) -> int:
    headers = {"x-request-id": request_id, "traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "ignore_eos": True, **fields}
    with server.client() as client:
        return client.post(
            path, json={name: value for name, value in body.items() if value is not None}, headers=headers
        ).status_code


def test_a_trace_has_the_phases_of_its_request_below_the_clients_span(
    server: RunningServer, receiver: Receiver
) -> None:
    assert ask(server, "traced-1", temperature=0.5) == 200
    root, below = receiver.trace("traced-1")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert root.name == "chat hash"
    found = values(root.attributes)
    assert found["gen_ai.operation.name"] == "chat"
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.max_tokens"]) == (0.5, 20)
    assert (found["gen_ai.usage.output_tokens"], found["gen_ai.response.finish_reasons"]) == (20, ["length"])
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert [span.name for span in below] == ["queue", "prefill", "handoff", "decode"]
    assert [values(span.attributes).get("baton.worker.id") for span in below] == [None, "prefill-0", None, "decode-0"]
    for before, after in pairwise(below):
        assert before.end_time_unix_nano == after.start_time_unix_nano, "the phases follow each other"
    assert root.start_time_unix_nano == below[0].start_time_unix_nano
    assert below[-1].end_time_unix_nano <= root.end_time_unix_nano
    assert {"service.name": "baton", "deployment.environment.name": "test"}.items() <= receiver.resources[0].items()
    assert all(span.trace_id == root.trace_id for span in below)
    assert "Hello" not in str(root) + str(below), "prompts are not sent"


def test_each_choice_has_its_phases(server: RunningServer, receiver: Receiver) -> None:
    assert ask(server, "traced-2", n=2, stream=True) == 200
    _, below = receiver.trace("traced-2")
    assert sorted(span.name for span in below) == ["decode"] * 2 + ["handoff"] * 2 + ["prefill"] * 2 + ["queue"] * 2
    assert len({values(span.attributes)["baton.request.id"] for span in below}) == 2


def test_a_refused_request_has_an_error_and_no_phases(server: RunningServer, receiver: Receiver) -> None:
    assert ask(server, "traced-3", model="other") == 404
    root, below = receiver.trace("traced-3")
    assert (root.name, root.status.code, below) == ("chat", Status.STATUS_CODE_ERROR, [])
    assert values(root.attributes)["error.type"] == "model_not_found"


def test_embeddings_are_traced(server: RunningServer, receiver: Receiver) -> None:
    body = {"messages": None, "max_tokens": None, "ignore_eos": None, "input": ["one", "two"]}
    assert ask(server, "traced-4", "/v1/embeddings", **body) == 200
    root, below = receiver.trace("traced-4")
    assert root.name == "embeddings hash"
    assert sorted(span.name for span in below) == ["prefill"] * 2 + ["queue"] * 2


def test_metrics_have_the_names_of_the_genai_conventions(server: RunningServer, receiver: Receiver) -> None:
    assert ask(server, "measured-1") == 200
    wanted = {f"gen_ai.server.{name}" for name in ("request.duration", "time_to_first_token", "time_per_output_token")}
    with receiver.changed:
        assert receiver.changed.wait_for(lambda: wanted <= receiver.metrics.keys(), WAIT_S), receiver.metrics.keys()
        points = {name: receiver.metrics[name].histogram.data_points for name in wanted}
    for name in wanted:
        chats = [
            point
            for point in points[name]
            if values(point.attributes).get("gen_ai.operation.name") == "chat"
            and "error.type" not in values(point.attributes)
        ]
        assert [values(point.attributes)["gen_ai.request.model"] for point in chats] == ["hash"]
        assert chats[0].count >= 1
    assert list(points["gen_ai.server.time_to_first_token"][0].explicit_bounds)[:2] == [0.001, 0.005]


@pytest.mark.deep
def test_a_receiver_that_is_gone_delays_no_request() -> None:
    """Nothing listens at the discard port. What waits for the receiver is bounded by OTEL_BSP_MAX_QUEUE_SIZE."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with serving("hash", "--otlp", environment=environment) as server:
        assert [ask(server, f"lost-{number}") for number in range(5)] == [200] * 5
        assert server.stop() == 0
