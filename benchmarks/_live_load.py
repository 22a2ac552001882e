"""Load on a live server, from one process: requests at given times, and what their clients saw."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp
import msgspec
import numpy as np

from baton.core.types import Slo
from baton.lab.bench.wire import StreamedAnswer, request_fields
from baton.lab.report.summary import RequestRecord
from baton.move.clock import now_s
from tests.serving import RunningServer, serving

MODEL = "smollm2-135m"
QUEUE_S = "10"
"""The default of `limits.queue_s`, which the tests' server raises."""
_WORDS = (1000, 40_000)
"""Range of token ids of drawn prompts: no special token, and no two prompts share a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request to send. `hang_up_s`: the client closes the connection this long after sending. None: it does not."""

    at_s: float = 0.0
    input_tokens: int
    output_tokens: int
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    hang_up_s: float | None = None
    label: str = ""


@dataclass(slots=True)
class Answer:
    """What one client saw."""

    planned: Planned
    sent_s: float
    status: int = 0
    code: str = ""
    """Code of a refusal."""
    ended_s: float = 0.0
    token_times_s: Sequence[float] = ()
    text: str = ""
    failure: str = ""

    @property
    def is_refused(self) -> bool:
        return self.status in (429, 503)

    @property
    def is_whole(self) -> bool:
        return not self.failure and len(self.token_times_s) > 0

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        gaps = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / gaps if gaps > 0 else 0.0

    @property
    def gap_s_max(self) -> float:
        """The longest time between two tokens."""
        times_s = self.token_times_s
        return max((late - early for early, late in pairwise(times_s)), default=0.0)

    def meets(self, slo: Slo) -> bool:
        return self.is_whole and self.ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s

    def record(self) -> RequestRecord:
        """Return it as the reports of simulated runs take it. The label is its tenant."""
        return RequestRecord(
            arrival_s=self.sent_s,
            end_s=self.ended_s,
            outcome="finished" if self.is_whole else "failed",
            input_tokens=self.planned.input_tokens,
            token_times_s=list(self.token_times_s),
            tenant=self.planned.label,
        )


class Load:
    """Clients of one server. Use as an async context manager."""

    def __init__(self, server: RunningServer, seed: int = 0) -> None:
        self._url = f"{server.url}/v1/completions"
        self._draw = Random(seed)

    async def __aenter__(self) -> Load:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300.0))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    def body(self, planned: Planned) -> bytes:
        prompt = [self._draw.randrange(*_WORDS) for _ in range(planned.input_tokens)]
        fields = request_fields(
            model=MODEL, endpoint="completions", prompt=prompt, output_tokens=planned.output_tokens, ignore_eos=True
        )
        return msgspec.json.encode(fields)

    async def send(self, planned: Planned, body: bytes | None = None) -> Answer:
        """Send one request and read its answer until it ends, or until its client hangs up."""
        data = body if body is not None else self.body(planned)
        answer, stream = Answer(planned, now_s()), StreamedAnswer(text=[])
        try:
            async with asyncio.timeout(planned.hang_up_s):
                await self._read(planned, data, answer, stream)
        except TimeoutError:
            answer.failure = "hung up"
        except (aiohttp.ClientError, OSError) as error:
            answer.failure = f"{type(error).__name__}: {error}"
        answer.ended_s = now_s()
        answer.token_times_s, answer.text = stream.token_times_s(), "".join(stream.text or ())
        if not answer.failure and not stream.done:
            answer.failure = stream.error or answer.code or "cut off"
        return answer

    async def _read(self, planned: Planned, data: bytes, answer: Answer, stream: StreamedAnswer) -> None:
        headers = {"Content-Type": "application/json", **planned.headers}
        async with self._http.post(self._url, data=data, headers=headers) as response:
            answer.status = response.status
            if response.status != 200:
                answer.code = str((await response.json())["error"]["code"])
                return
            async for part in response.content.iter_any():
                stream.feed(part, now_s())

    async def play(self, plan: Sequence[Planned]) -> list[Answer]:
        """Send every request at its time, whether earlier ones have been answered or not."""
        bodies = [self.body(planned) for planned in plan]
        start_s = now_s()

        async def send(planned: Planned, body: bytes) -> Answer:
            await asyncio.sleep(max(0.0, start_s + planned.at_s - now_s()))
            return await self.send(planned, body)

        return list(await asyncio.gather(*map(send, plan, bodies)))

    async def keep(self, planned: Planned, *, clients: int, until: asyncio.Event) -> list[Answer]:
        """Let this many clients send one request after another. Ends with the last answer after the event."""

        async def client() -> list[Answer]:
            answers: list[Answer] = []
            while not until.is_set():
                answers.append(await self.send(planned))
                if answers[-1].is_refused:
                    await asyncio.sleep(1.0)  # the shortest `Retry-After`
            return answers

        return [answer for each in await asyncio.gather(*(client() for _ in range(clients))) for answer in each]

    async def one_by_one(self, planned: Planned, count: int, *, pause_s: float = 0.0) -> list[Answer]:
        """Send requests that meet an idle server."""
        answers: list[Answer] = []
        for _ in range(count):
            answers.append(await self.send(planned))
            await asyncio.sleep(pause_s)
        return answers


def poisson(rate_rps: float, duration_s: float, request: Planned, seed: int) -> list[Planned]:
    """Return arrivals of a Poisson process."""
    draw, at_s, plan = Random(seed), 0.0, list[Planned]()
    while (at_s := at_s + draw.expovariate(rate_rps)) < duration_s:
        plan.append(replace(request, at_s=at_s))
    return plan


NO_DRAFTS = "speculation = { tokens_max = 0 }\n"
"""Configuration of servers whose latencies become an SLO: requests with an SLO are not drafted."""


@contextmanager
def configured(config: str, *arguments: str) -> Iterator[RunningServer]:
    """Run the server with the text of a configuration file, and with the default deadline of the queue."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "baton.toml"
        path.write_text(config)
        with serving(MODEL, "--queue-s", QUEUE_S, "--config", str(path), *arguments) as server:
            yield server


def percentile(values: Sequence[float], share_ratio: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return float(np.quantile(values, share_ratio))


def latencies(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, the 99th percentile and the number of some latencies."""
    if not values:
        return {"p50_s": None, "p99_s": None, "count": 0}
    return {"p50_s": round(median(values), 4), "p99_s": round(percentile(values, 0.99), 4), "count": len(values)}
