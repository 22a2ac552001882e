"""The external push scaler for KEDA: answer how many hosts each role needs, by the targets of a running server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import aiohttp
import msgspec

from baton.core.types import ROLES
from baton.integrations import protobuf
from baton.integrations.grpc.http2 import FAILED_PRECONDITION, INVALID_ARGUMENT, UNAVAILABLE, Services, Stream
from baton.integrations.grpc.server import Listening, import_messages, serve_calls
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


SERVICE = f"{PACKAGE}.ExternalScaler"
_CALLS_MAX = 256
"""Maximum calls at once on a connection. KEDA keeps one open for each of its objects."""
_MESSAGE_BYTES_MAX = 64 * 1024
_FRESH_S = 15.0
"""Targets count for this long after the server's last answer."""
_TIMEOUT_S = 5.0


class CallRefusedError(Exception):
    """A call has no answer. `code` is a gRPC status."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(slots=True, eq=False)
class Watch:
    """A call that is told whether an object is active, at once and after each change. Implements `Call`.

    A server that does not answer changes nothing.
    """

    scaler: Scaler
    stream: Stream
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    told: bool | None = None

    def handle(self, message: bytes) -> None:
        try:
            self.metadata = self.scaler.metadata(message)
            role_of(self.metadata)
        except CallRefusedError as error:
            self.stream.end(error.code, str(error))
            return
        self.scaler.targets.watches.add(self)
        self.push()

    def push(self) -> None:
        """Tell the client if the object has changed."""
        with suppress(CallRefusedError):
            active = self.scaler.targets.is_active(self.metadata)
            if active != self.told:
                self.told = active
                self.stream.send(self.scaler.activity(active=active))

    def finish(self) -> None:
        """Note that the client has asked: the call lasts until the client cancels it."""

    def close(self) -> None:
        self.scaler.targets.watches.discard(self)


@dataclass(slots=True)
class Targets:
    """The targets of the server's scaling policy, as last read."""

    by_role: Mapping[str, int] = field(default_factory=dict[str, int])
    """Workers per role. Roles that the policy leaves out are missing."""
    problem: str = "the server was not asked yet"
    """Why the last read has failed. Empty: it has not."""
    read_s: float = -inf
    """When they were read."""
    watches: set[Watch] = field(default_factory=set[Watch])
    """The open calls that wait for changes."""

    def update(self, by_role: Mapping[str, int]) -> None:
        """Take the targets that were just read."""
        self.read_s, self.problem, self.by_role = now_s(), "", dict(by_role)
        for watch in self.watches:
            watch.push()

    def of(self, metadata: Mapping[str, str]) -> int:
        """Return the target of the role that an object's metadata names. Raises CallRefusedError."""
        role = self._role(metadata)
        if role not in self.by_role:
            reason = f"the scaling policy has no target for {role}: configure policy.scaling and start a {role} worker"
            raise CallRefusedError(FAILED_PRECONDITION, reason)
        return self.by_role[role]

    def is_active(self, metadata: Mapping[str, str]) -> bool:
        """Return whether the role of an object needs a pod. Raises CallRefusedError.

        It does while its target is not known: a server without hosts runs no policy, and waits for them.
        """
        return self.by_role.get(self._role(metadata), 1) > 0

    def _role(self, metadata: Mapping[str, str]) -> str:
        role = role_of(metadata)
        if self.problem and now_s() - self.read_s > _FRESH_S:
            raise CallRefusedError(UNAVAILABLE, self.problem)
        return role


def role_of(metadata: Mapping[str, str]) -> str:
    """Return the role that an object's metadata names. Raises CallRefusedError."""
    role = metadata.get("role", "")
    if role not in ROLES:
        raise CallRefusedError(INVALID_ARGUMENT, f"metadata.role is {role[:40]!r}: write {', '.join(ROLES)}")
    return role


def workers_per_pod(metadata: Mapping[str, str]) -> int:
    """Return the workers of a pod that an object's metadata names, by default 1. Raises CallRefusedError."""
    text = metadata.get("workers", "1")
    if not text.isascii() or not text.isdigit() or len(text) > 3 or not 1 <= int(text) <= 256:
        raise CallRefusedError(INVALID_ARGUMENT, f"metadata.workers is {text[:40]!r}: write 1 to 256")
    return int(text)


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


class Scaler:
    """Answers calls about an object by its metadata: `role`, and `workers` of each pod. All messages are encoded."""

    def __init__(self, targets: Targets, messages: Mapping[str, Any]) -> None:
        """`messages`: their classes by their names."""
        self.targets = targets
        self._messages = messages

    def metadata(self, request: bytes) -> dict[str, str]:
        """Return the metadata of a ScaledObjectRef."""
        return dict(self._messages["ScaledObjectRef"].FromString(request).scalerMetadata)

    def activity(self, *, active: bool) -> bytes:
        return self._messages["IsActiveResponse"](result=active).SerializeToString()

    def is_active(self, request: bytes) -> bytes:
        """Answer whether the role of an object needs a pod. Raises CallRefusedError, as the other answers do."""
        return self.activity(active=self.targets.is_active(self.metadata(request)))

    def metric_spec(self, request: bytes) -> bytes:
        """Answer with the target of an object's metric for one pod."""
        metadata = self.metadata(request)
        workers = workers_per_pod(metadata)
        spec = {"metricName": _metric(metadata), "targetSize": workers, "targetSizeFloat": workers}
        return self._messages["GetMetricSpecResponse"](metricSpecs=[spec]).SerializeToString()

    def metric_value(self, request: bytes) -> bytes:
        """Answer with the value of an object's metric: the target of its role."""
        metadata = dict(self._messages["GetMetricsRequest"].FromString(request).scaledObjectRef.scalerMetadata)
        workers = self.targets.of(metadata)
        value = {"metricName": _metric(metadata), "metricValue": workers, "metricValueFloat": workers}
        return self._messages["GetMetricsResponse"](metricValues=[value]).SerializeToString()


def _metric(metadata: Mapping[str, str]) -> str:
    return f"baton-workers-{role_of(metadata)}"


@dataclass(frozen=True, slots=True)
class _Question:
    """A call with one answer. Implements `Call`."""

    answer: Callable[[bytes], bytes]
    stream: Stream

    def handle(self, message: bytes) -> None:
        try:
            self.stream.send(self.answer(message))
            self.stream.end()
        except CallRefusedError as error:
            self.stream.end(error.code, str(error))

    def finish(self) -> None:
        self.stream.end(INVALID_ARGUMENT, "the call has no message")

    def close(self) -> None: ...


async def serve_scaler(address: str, targets: Targets, said: Callable[[], None]) -> None:
    """Serve on `HOST:PORT` until it is cancelled. `said` is called once it listens.

    Raises ConfigError if it cannot listen, or the extra is missing.
    """
    scaler = Scaler(targets, import_messages("keda", message_classes))
    services: Services = {
        f"/{SERVICE}/IsActive": partial(_Question, scaler.is_active),
        f"/{SERVICE}/StreamIsActive": partial(Watch, scaler),
        f"/{SERVICE}/GetMetricSpec": partial(_Question, scaler.metric_spec),
        f"/{SERVICE}/GetMetrics": partial(_Question, scaler.metric_value),
    }
    await serve_calls(Listening(address), services, said, streams_max=_CALLS_MAX, message_bytes_max=_MESSAGE_BYTES_MAX)
