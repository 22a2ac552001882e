"""Traces and GenAI metrics of requests by OpenTelemetry, sent to an OTLP receiver. Needs the extra `otel`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.core.errors import ConfigError, RequestError
from baton.move.clock import now_s, utc_date
from baton.serve.http.edge import RequestContext, context_of, with_context
from baton.serve.http.wire.responses import FINGERPRINT, Usage
from baton.serve.http.wire.schemas import GenerateFields
from baton.serve.live.live_request import LiveRequest

PROTOCOL = "http/protobuf"
"""The only OTLP protocol that the exporters of the extra `otel` speak."""
_PROTOCOLS = (
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL",
)
CLOSE_S = 3.0
_HEADERS = (b"traceparent", b"tracestate")
_DURATION_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
Value = str | int | float | bool | Sequence[str]


class Telemetry:
    """The sources of spans and metrics. Threads of the exporters send them; the event loop only adds them."""

    def __init__(
        self,
        processors: Sequence[SpanProcessor],
        readers: Sequence[MetricReader],
        exporters: Sequence[OTLPSpanExporter | OTLPMetricExporter] = (),
        resource: Resource | None = None,
    ) -> None:
        """`exporters`: those of the processors and readers that send over the network."""
        self._exporters = exporters
        self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        for processor in processors:
            self._traces.add_span_processor(processor)
        self._metrics = MeterProvider(readers, resource, shutdown_on_exit=False)
        self._tracer = self._traces.get_tracer("baton")
        meter = self._metrics.get_meter("baton")

        def histogram(name: str, description: str, buckets_s: Sequence[float]) -> Histogram:
            return meter.create_histogram(
                f"gen_ai.server.{name}", "s", description, explicit_bucket_boundaries_advisory=buckets_s
            )

        self.duration = histogram("request.duration", "Arrival to the end of the response.", _DURATION_BUCKETS_S)
        self.first_token = histogram(
            "time_to_first_token", "Arrival to the first token on the client's socket.", _FIRST_TOKEN_BUCKETS_S
        )
        self.per_token = histogram(
            "time_per_output_token", "First to last token, divided by (output tokens - 1).", _PER_TOKEN_BUCKETS_S
        )

    def begin(self, context: RequestContext, operation: str) -> RequestTrace:
        """Begin the trace of a request at its arrival. It goes on with the client's trace, if that sent one."""
        sent = {name.decode(): context.headers[name].decode("latin-1") for name in _HEADERS if name in context.headers}
        clock = _Clock()
        span = self._tracer.start_span(
            operation,
            TraceContextTextMapPropagator().extract(sent),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, "gen_ai.provider.name": "baton"},
            start_time=clock.unix(context.arrived_at_s),
        )
        return RequestTrace(self, span, operation, clock, context.arrived_at_s)

    def traced(self, endpoint: ASGIApp, operation: str) -> ASGIApp:
        """Return an endpoint that makes a trace of each request. `operation`: as `gen_ai.operation.name`."""
        return _Traced(endpoint, self, operation)

    def child(self, parent: Span, phase: Phase, clock: _Clock) -> None:
        """Add the span of a phase below another span."""
        start = clock.unix(phase.start_s)
        below = set_span_in_context(parent)
        span = self._tracer.start_span(phase.name, below, attributes=dict(phase.attributes), start_time=start)
        span.end(max(start, clock.unix(phase.end_s)))

    def close(self) -> None:
        """Send what is left, for at most `CLOSE_S`. A receiver that is gone must not delay the end of the server."""
        flushing = threading.Thread(target=self._flush, name="baton-telemetry", daemon=True)
        flushing.start()
        flushing.join(CLOSE_S)
        for exporter in self._exporters:
            exporter.shutdown()  # ends its retries

    def _flush(self) -> None:
        self._traces.force_flush()
        self._metrics.force_flush()


def open_telemetry() -> Telemetry:
    """Return the telemetry that the standard variables `OTEL_*` describe. Raises ConfigError for another protocol."""
    for name in _PROTOCOLS:
        if os.environ.get(name, PROTOCOL) != PROTOCOL:
            raise ConfigError(f"{name} is {os.environ[name]!r}, but http.otlp sends {PROTOCOL} only: remove it")
    resource = Resource({"service.name": "baton", "service.version": FINGERPRINT.removeprefix("baton-")})
    spans = [OTLPSpanExporter()] if _is_wanted("OTEL_TRACES_EXPORTER") else []
    metrics = [OTLPMetricExporter()] if _is_wanted("OTEL_METRICS_EXPORTER") else []
    return Telemetry(
        [BatchSpanProcessor(exporter) for exporter in spans],
        [PeriodicExportingMetricReader(exporter) for exporter in metrics],
        [*spans, *metrics],
        resource.merge(OTELResourceDetector().detect()),
    )


def _is_wanted(name: str) -> bool:
    return os.environ.get(name, "otlp") != "none"


class _Clock:
    """Converts times of the server's monotonic clock to those of spans, for one trace."""

    def __init__(self) -> None:
        self._offset_s = utc_date().timestamp() - now_s()

    def unix(self, time_s: float) -> int:
        """Return nanoseconds since 1970."""
        return int((time_s + self._offset_s) * 1e9)


@dataclass(slots=True)
class RequestTrace:
    """The trace of one HTTP request. Its further spans are made at its end, from the times of its choices."""

    _telemetry: Telemetry
    _span: Span
    _operation: str
    _clock: _Clock
    _arrived_s: float
    _lives: list[LiveRequest] = field(default_factory=list[LiveRequest])
    _model: str = ""
    """Name of the served model. Empty: the request failed before its model was known."""
    _error: str = ""
    """Kind of the error. Empty: none."""

    @property
    def traceparent(self) -> str:
        """Return the header with which another server goes on with this trace. Source: W3C Trace Context, 3.2."""
        span = self._span.get_span_context()
        return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"

    def follow(self, model: str, live: LiveRequest) -> None:
        """Add a choice, or another part of the request."""
        self._model = model
        self._lives.append(live)

    def describe(self, fields: GenerateFields, usage: Usage, *, tokens_max: int | None) -> None:
        """Add sampling parameters and usage as attributes. `tokens_max`: the client's limit of output tokens."""
        values: dict[str, Value | None] = {
            "gen_ai.request.model": fields.model,
            "gen_ai.request.max_tokens": tokens_max,
            "gen_ai.request.temperature": fields.temperature,
            "gen_ai.request.top_p": fields.top_p,
            "gen_ai.request.top_k": fields.top_k,
            "gen_ai.request.seed": fields.seed,
            "gen_ai.request.stream": fields.stream,
            "gen_ai.request.choice.count": fields.n,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
        }
        self._span.set_attributes({name: value for name, value in values.items() if value is not None})

    def fail(self, kind: str, message: str) -> None:
        """Mark the request as failed. Only the first error counts."""
        if not self._error:
            self._error = kind
            self._span.set_status(Status(StatusCode.ERROR, message[:300]))
            self._span.set_attribute("error.type", kind)

    def end(self, request_id: str) -> None:
        """End the trace, and add the metrics. `request_id`: the X-Request-Id."""
        ended_s = now_s()
        for live in self._lives:
            finish = live.finish
            if finish is not None and finish.outcome != "finished":
                self.fail(finish.reject or finish.outcome, finish.message or finish.outcome)
        if self._span.is_recording():
            self._add_spans(request_id, ended_s)
        self._span.end(self._clock.unix(ended_s))
        self._add_metrics(ended_s)

    def _add_spans(self, request_id: str, ended_s: float) -> None:
        self._span.set_attribute("baton.request.id", request_id)
        if self._model:
            self._span.update_name(f"{self._operation} {self._model}")
            self._span.set_attribute("gen_ai.response.model", self._model)
        if not self._lives:
            return
        reasons = [live.finish.reason for live in self._lives if live.finish is not None and live.finish.reason]
        if reasons:
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        timings = self._lives[0].timings()
        latencies = {
            "gen_ai.latency.time_in_queue": timings.queue_s,
            "gen_ai.latency.time_to_first_token": timings.ttft_s,
            "gen_ai.latency.e2e": timings.e2e_s,
        }
        self._span.set_attributes({name: value for name, value in latencies.items() if value is not None})
        for live in self._lives:
            for phase in phases(live, ended_s):
                self._telemetry.child(self._span, phase, self._clock)

    def _add_metrics(self, ended_s: float) -> None:
        attributes = {"gen_ai.operation.name": self._operation, "gen_ai.provider.name": "baton"}
        if self._model:
            attributes |= {"gen_ai.request.model": self._model, "gen_ai.response.model": self._model}
        failed = {"error.type": self._error} if self._error else {}
        self._telemetry.duration.record(ended_s - self._arrived_s, attributes | failed)
        if failed:
            return
        for live in self._lives:
            timings = live.timings()
            if timings.ttft_s is not None:
                self._telemetry.first_token.record(timings.ttft_s, attributes)
            if timings.tpot_s is not None:
                self._telemetry.per_token.record(timings.tpot_s, attributes)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's life, in seconds of the server's monotonic clock."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Value]


def phases(live: LiveRequest, ended_s: float) -> Iterator[Phase]:
    """Yield the phases that a request has begun, in order. The last one ends at `ended_s` if it was cut off."""
    stamps, named = live.stamps, {"baton.request.id": live.request.id}
    started_s, handed_s = stamps.started_s, stamps.handed_s
    yield Phase("queue", stamps.arrived_s, ended_s if started_s is None else started_s, named)
    if started_s is None:
        return
    computed = {"gen_ai.usage.input_tokens": live.request.prompt_tokens, "baton.cached_tokens": stamps.cached_tokens}
    attributes: dict[str, Value] = {**named, **computed, "baton.worker.id": stamps.prefill_worker or ""}
    yield Phase("prefill", started_s, ended_s if handed_s is None else handed_s, attributes)
    if handed_s is None:
        return
    is_finished = live.finish is not None and live.finish.outcome == "finished"
    if stamps.decode_worker is None:
        if not is_finished:
            yield Phase("handoff", handed_s, ended_s, named)
        return
    if stamps.decoding_s is not None:
        yield Phase("handoff", handed_s, stamps.decoding_s, named)
    drawn = {"gen_ai.usage.output_tokens": live.output_tokens, "baton.attempts": live.attempt}
    start_s = handed_s if stamps.decoding_s is None else stamps.decoding_s
    end_s = stamps.last_sent_s if is_finished and stamps.last_sent_s is not None else ended_s
    yield Phase("decode", start_s, end_s, {**named, **drawn, "baton.worker.id": stamps.decode_worker})


class _Traced:
    """An ASGI endpoint that makes a trace of each of its requests."""

    def __init__(self, endpoint: ASGIApp, telemetry: Telemetry, operation: str) -> None:
        self._endpoint = endpoint
        self._telemetry = telemetry
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        trace = self._telemetry.begin(context, self._operation)
        try:
            await self._endpoint(with_context(scope, replace(context, trace=trace)), receive, send)
        except RequestError as error:
            trace.fail(error.code or str(error.status), str(error))
            raise
        finally:
            trace.end(context.request_id)
