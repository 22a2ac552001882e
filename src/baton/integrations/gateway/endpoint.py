"""A server of the pool: its load as its metrics show it, its requests, and the speed that its answers show."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from baton.core.report_parts import OtherLoad, StepPrices
from baton.core.types import HostId, Request, RequestId, Role, WorkerId, WorkerView
from baton.integrations.engines.port import EngineLoad

_KV_TOKENS = 1 << 17
"""Assumed size of a KV cache that the metrics do not show."""
_PROMPT_TOKENS = 512.0
"""Assumed length of a prompt until requests have come."""
_GAIN = 0.2
"""Share of the error of a predicted TTFT by which the speed changes, and of a prompt by which the mean length does."""
_ERROR_LOG_MAX = 1.0
_SPEED_LOG_MAX = math.log(1e4)
_IDLE_DECAY = 0.95
"""Factor of the speed's logarithm per report of a server without requests. So a server that seemed too slow for every
SLO gets requests again."""


@dataclass(slots=True)
class _Prompt:
    """A request on the server."""

    new_tokens: int
    """Prompt tokens that the server has not computed yet."""
    context_tokens: int


@dataclass(slots=True)
class Endpoint:
    """A server that takes requests."""

    address: str
    role: Role
    load: EngineLoad
    host: HostId = field(init=False)
    worker: WorkerId = field(init=False)
    suspected: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if a request could not be sent there: the server must be asked at once."""
    _requests: dict[RequestId, _Prompt] = field(default_factory=dict[RequestId, _Prompt])
    _queued_tokens: int = 0
    _queued_requests: int = 0
    _context_tokens: int = 0
    _newest: RequestId | None = None
    _known_requests: int = 0
    """Most requests of ours on the server since the last two reports."""
    _peak_requests: int = 0
    _prompt_tokens: float = _PROMPT_TOKENS
    _speed_log: float = 0.0
    _answers: int = 0

    def __post_init__(self) -> None:
        self.host, self.worker = HostId(self.address), WorkerId(self.address)

    @property
    def running_requests(self) -> int:
        """Requests that this picker has sent there."""
        return len(self._requests)

    @property
    def kv_tokens(self) -> int:
        return self.load.kv_tokens or _KV_TOKENS

    def start(self, request: Request, new_tokens: int) -> None:
        """Note a request that is sent to the server. `new_tokens`: prompt tokens to compute."""
        self.leave(request.id)
        self._requests[request.id] = _Prompt(new_tokens, request.prompt_tokens)
        self._queued_tokens += new_tokens
        self._queued_requests += new_tokens > 0
        self._context_tokens += request.prompt_tokens
        self._newest = request.id
        self._peak_requests = max(self._peak_requests, len(self._requests))
        self._prompt_tokens += _GAIN * (request.prompt_tokens - self._prompt_tokens)

    def begin(self, request_id: RequestId) -> None:
        """Note that the server has computed the prompt of a request."""
        prompt = self._requests.get(request_id)
        if prompt is not None:
            self._queued_tokens -= prompt.new_tokens
            self._queued_requests -= prompt.new_tokens > 0
            prompt.new_tokens = 0

    def leave(self, request_id: RequestId) -> None:
        """Note that a request has left the server. Ignored for an unknown one."""
        self.begin(request_id)
        prompt = self._requests.pop(request_id, None)
        if prompt is not None:
            self._context_tokens -= prompt.context_tokens

    def learn(self, predicted_s: float, actual_s: float) -> None:
        """Correct the speed by a predicted TTFT and the one that was measured."""
        error_log = math.log(max(1e-6, actual_s) / predicted_s)
        error_log = min(_ERROR_LOG_MAX, max(-_ERROR_LOG_MAX, error_log))
        gain = max(_GAIN, 1.0 / (self._answers + 1))
        self._answers += 1
        self._speed_log = min(_SPEED_LOG_MAX, max(-_SPEED_LOG_MAX, self._speed_log + gain * error_log))

    def note_load(self, load: EngineLoad) -> None:
        """Take a report of the server's metrics."""
        if not self._requests:
            self._speed_log *= _IDLE_DECAY
        self.load = load
        self._known_requests, self._peak_requests = max(self._peak_requests, len(self._requests)), len(self._requests)

    def view(self, at_s: float) -> WorkerView:
        """Return the load as the worker of the server would report it."""
        load = self.load
        speed = math.exp(self._speed_log)
        return WorkerView(
            id=self.worker,
            host=self.host,
            role=self.role,
            running_requests=len(self._requests),
            waiting_requests=load.waiting_requests,
            queued_tokens=self._queued_tokens,
            queued_requests=self._queued_requests,
            context_tokens=max(self._context_tokens, int(load.kv_used_ratio * self.kv_tokens)),
            observed_at_s=at_s,
            newest_request=self._newest,
            kv_tokens_max=self.kv_tokens,
            prices=StepPrices(speed, (), steps=self._answers) if self._answers else None,
            others=self._others(),
        )

    def _others(self) -> OtherLoad | None:
        """Return the load of other clients: what the metrics show beyond the requests of this picker."""
        load = self.load
        requests = load.running_requests + load.waiting_requests - self._known_requests
        if requests <= 0:
            return None
        queued_requests = min(requests, load.waiting_requests)
        return OtherLoad(requests, queued_requests, int(queued_requests * self._prompt_tokens))
