"""The external push scaler for KEDA: answer how many hosts each role needs, by the targets of a running server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import inf
from typing import Any, TypeVar

import aiohttp
import msgspec

from baton.core.types import ROLES
from baton.integrations import protobuf
from baton.integrations.grpc_server import CallContext, import_grpc, run_server
from baton.integrations.protobuf import BOOL, DOUBLE, INT64, TEXT, Fields
from baton.move.clock import now_s
from baton.serve.live.status import ClusterStatus

PACKAGE = "externalscaler"
_MESSAGES: Mapping[str, Fields] = {
    "ScaledObjectRef": {"name": (1, TEXT), "namespace": (2, TEXT), "scalerMetadata": (3, f"@{TEXT}")},
    "IsActiveResponse": {"result": (1, BOOL)},
    "MetricSpec": {"metricName": (1, TEXT), "targetSize": (2, INT64), "targetSizeFloat": (3, DOUBLE)},
    "GetMetricSpecResponse": {"metricSpecs": (1, "*MetricSpec")},
    "GetMetricsRequest": {"scaledObjectRef": (1, "ScaledObjectRef"), "metricName": (2, TEXT)},
    "MetricValue": {"metricName": (1, TEXT), "metricValue": (2, INT64), "metricValueFloat": (3, DOUBLE)},
    "GetMetricsResponse": {"metricValues": (1, "*MetricValue")},
}
"""Source: externalscaler.proto of KEDA."""


def message_classes() -> dict[str, Any]:
    """Return the class of each message by its name. Raises ImportError without the package protobuf."""
    return protobuf.message_classes(PACKAGE, _MESSAGES)


Answer = TypeVar("Answer")
SERVICE = f"{PACKAGE}.ExternalScaler"
_CALLS_MAX = 256
"""Maximum calls at once. KEDA keeps one open for each of its objects."""
_FRESH_S = 15.0
"""Targets count for this long after the server's last answer."""
_TIMEOUT_S = 5.0


class CallRefusedError(Exception):
    """A call has no answer. `code` is the name of a gRPC status."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(slots=True)
class Targets:
    """The targets of the server's scaling policy, as last read."""

    by_role: Mapping[str, int] = field(default_factory=dict[str, int])
    """Workers per role. Roles that the policy leaves out are missing."""
    problem: str = "the server was not asked yet"
    """Why the last read has failed. Empty: it has not."""
    read_s: float = -inf
    """When they were read."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after each change, and replaced."""

    def update(self, by_role: Mapping[str, int]) -> None:
        """Take the targets that were just read."""
        is_new = bool(self.problem) or by_role != self.by_role
        self.read_s, self.problem, self.by_role = now_s(), "", dict(by_role)
        if is_new:
            self.changed.set()
            self.changed = asyncio.Event()

    def of(self, metadata: Mapping[str, str]) -> int:
        """Return the target of the role that an object's metadata names. Raises CallRefusedError."""
        role = self._role(metadata)
        if role not in self.by_role:
            reason = f"the scaling policy has no target for {role}: configure policy.scaling and start a {role} worker"
            raise CallRefusedError("FAILED_PRECONDITION", reason)
        return self.by_role[role]

    def is_active(self, metadata: Mapping[str, str]) -> bool:
        """Return whether the role of an object needs a pod. Raises CallRefusedError.

        It does while its target is not known: a server without hosts runs no policy, and waits for them.
        """
        return self.by_role.get(self._role(metadata), 1) > 0

    def _role(self, metadata: Mapping[str, str]) -> str:
        role = role_of(metadata)
        if self.problem and now_s() - self.read_s > _FRESH_S:
            raise CallRefusedError("UNAVAILABLE", self.problem)
        return role


def role_of(metadata: Mapping[str, str]) -> str:
    """Return the role that an object's metadata names. Raises CallRefusedError."""
    role = metadata.get("role", "")
    if role not in ROLES:
        raise CallRefusedError("INVALID_ARGUMENT", f"metadata.role is {role[:40]!r}: write {', '.join(ROLES)}")
    return role


def workers_per_pod(metadata: Mapping[str, str]) -> float:
    """Return the workers of a pod that an object's metadata names, by default 1. Raises CallRefusedError."""
    text = metadata.get("workers", "1")
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 256:
        raise CallRefusedError("INVALID_ARGUMENT", f"metadata.workers is {text[:40]!r}: write 1 to 256")
    return float(text)


class ServerReader:
    """Reads the targets of a server periodically."""

    def __init__(self, url: str, api_key: str | None, targets: Targets, tell: Callable[[str], None]) -> None:
        self._url = f"{url.rstrip('/')}/cluster"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._targets = targets
        self._tell = tell

    async def run(self, poll_s: float) -> None:
        """Read every `poll_s` seconds. Print each new problem."""
        timeout, said = aiohttp.ClientTimeout(total=_TIMEOUT_S), ""
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session:
            while True:
                problem = await self._read(session)
                if problem != said:
                    self._tell(problem or f"{self._url} answers")
                said = problem
                await asyncio.sleep(poll_s)

    async def _read(self, session: aiohttp.ClientSession) -> str:
        try:
            async with session.get(self._url) as answer:
                body = await answer.read()
                if answer.status != 200:
                    problem = f"{self._url} answers {answer.status}: {body[:200].decode(errors='replace')}"
                else:
                    read = msgspec.json.decode(body, type=ClusterStatus).targets
                    self._targets.update({str(role): workers for role, workers in read.items()})
                    return ""
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            problem = f"{self._url} does not answer: {type(error).__name__}: {error}"
        self._targets.problem = problem
        return problem


@dataclass(frozen=True, slots=True)
class Metric:
    """The metric of an object, with a value or a target."""

    name: str
    value: float

    @staticmethod
    def of(metadata: Mapping[str, str], value: float) -> Metric:
        return Metric(f"baton-workers-{role_of(metadata)}", value)


class Scaler:
    """The methods of the service. They get the metadata of an object: `role`, and `workers` of each pod."""

    def __init__(self, targets: Targets, codes: Mapping[str, object]) -> None:
        """`codes`: the statuses of gRPC by their names."""
        self._targets = targets
        self._codes = codes

    async def is_active(self, metadata: Mapping[str, str], context: CallContext) -> bool:
        return await self._answer(context, lambda: self._targets.is_active(metadata))

    async def stream_is_active(self, metadata: Mapping[str, str], context: CallContext) -> AsyncIterator[bool]:
        """Yield whether the object is active: at once, and after each change. An unreachable server changes nothing."""
        await self._answer(context, lambda: role_of(metadata))
        said: bool | None = None
        while True:
            changed = self._targets.changed
            try:
                active = self._targets.is_active(metadata)
            except CallRefusedError:
                active = said
            if active is not None and active != said:
                said = active
                yield active
            await changed.wait()

    async def metric_spec(self, metadata: Mapping[str, str], context: CallContext) -> Metric:
        """Return the target of the metric for one pod."""
        return await self._answer(context, lambda: Metric.of(metadata, workers_per_pod(metadata)))

    async def metric_value(self, metadata: Mapping[str, str], context: CallContext) -> Metric:
        return await self._answer(context, lambda: Metric.of(metadata, float(self._targets.of(metadata))))

    async def _answer(self, context: CallContext, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except CallRefusedError as error:
            await context.abort(self._codes[error.code], str(error))
            raise


async def serve_scaler(address: str, targets: Targets, said: Callable[[], None]) -> None:
    """Serve on `HOST:PORT` until it is cancelled. `said` is called once it listens.

    Raises ConfigError if it cannot listen, or the extra is missing.
    """
    grpc, messages = import_grpc("keda", message_classes)
    server = import_module("grpc.aio").server(maximum_concurrent_rpcs=_CALLS_MAX)
    scaler = Scaler(targets, grpc.StatusCode.__members__)

    def of_reference(raw: bytes) -> dict[str, str]:
        return dict(messages["ScaledObjectRef"].FromString(raw).scalerMetadata)

    def of_request(raw: bytes) -> dict[str, str]:
        return dict(messages["GetMetricsRequest"].FromString(raw).scaledObjectRef.scalerMetadata)

    def activity(active: object) -> bytes:
        return messages["IsActiveResponse"](result=active).SerializeToString()

    def spec(metric: Metric) -> bytes:
        said = {"metricName": metric.name, "targetSize": int(metric.value), "targetSizeFloat": metric.value}
        return messages["GetMetricSpecResponse"](metricSpecs=[said]).SerializeToString()

    def value(metric: Metric) -> bytes:
        said = {"metricName": metric.name, "metricValue": int(metric.value), "metricValueFloat": metric.value}
        return messages["GetMetricsResponse"](metricValues=[said]).SerializeToString()

    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    methods = {
        "IsActive": unary(scaler.is_active, of_reference, activity),
        "StreamIsActive": stream(scaler.stream_is_active, of_reference, activity),
        "GetMetricSpec": unary(scaler.metric_spec, of_reference, spec),
        "GetMetrics": unary(scaler.metric_value, of_request, value),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    await run_server(server, address, said)
