"""Cost models that interpolate published measurements: Splitwise's profile, DistServe's fits, Vidur's layers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

from baton.core.errors import ConfigError
from baton.core.types import StepShape, prompt_step
from baton.core.validation import did_you_mean
from baton.decide.cost.catalog import data_text
from baton.decide.cost.curve import Curve, rising_curve
from baton.decide.cost.handoff import HandoffLink

PROMPT_TOKENS, GENERATED_TOKENS = 512, 64
"""Splitwise's batches: prompts of this length, timed over 128 output tokens, of which half exist on average."""
MIXED_FACTOR = 1.1
"""Splitwise's simulator: a mixed step takes 1.1 times its prompt step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSetting:
    """The measured setting, and values that the measurement does not include."""

    llm: str
    hardware: str
    tp: int
    wire: HandoffLink
    kv_token_bytes: float
    prompt_factor: float = 1.0
    """Factor on prompt time: 1.3 for an H100 capped at 70 % of its power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredCost:
    """Handoff times as published simulators compute them: on one host only the latency, since no bytes are copied."""

    kv_token_bytes: float
    wire: HandoffLink

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        if same_host:
            return self.wire.latency_s
        return self.wire.transfer_s(tokens=tokens, token_bytes=self.kv_token_bytes)

    def on(self, kind: str) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCost(_MeasuredCost):
    """A curve over prompt tokens, a curve over decoding requests, and a price per token of context.

    Source: Splitwise (ISCA '24), `perf_model.csv`: vLLM of 2023, DGX-A100 and DGX-H100.
    """

    prompt: Curve
    """Seconds by prompt tokens of a step."""
    decode: Curve
    """Seconds by decoding requests, each with `PROMPT_TOKENS` + `GENERATED_TOKENS` of context."""
    context_token_s: float
    """Seconds per token of context beyond that."""
    mixed_factor: float = MIXED_FACTOR
    prompt_factor: float = 1.0

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        # Cached tokens are free, since the measurements have none.
        if new_tokens == 0:
            return 0.0
        return self.step_s(StepShape(prefill_tokens=new_tokens, prefill_chunks=1))

    def step_s(self, shape: StepShape) -> float:
        if shape.prefill_tokens == 0:
            return self._decode_s(shape.decode_requests, shape.context_tokens)
        prompt_s = self.prompt_factor * self.prompt.at(shape.prefill_tokens + shape.decode_requests)
        if not shape.decode_requests:
            return prompt_s
        return max(self.mixed_factor * prompt_s, self._decode_s(shape.decode_requests, shape.context_tokens))

    def _decode_s(self, requests: int, context_tokens: int) -> float:
        usual = requests * (PROMPT_TOKENS + GENERATED_TOKENS)
        return self.decode.at(requests) + self.context_token_s * max(0, context_tokens - usual)

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        reads = range(context_tokens, context_tokens + steps * requests, requests)
        return [self._decode_s(requests, read) for read in reads]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitwiseSimCost(_MeasuredCost):
    """The published simulator's step, with its error: decodes are looked up by requests, not by prompt x batch tokens.

    So a decode step hardly depends on its batch (Llama-2-70B on A100 tp 8, 64 requests: 42.8 ms, measured 71.6). Use it
    only to reproduce the paper's figures; `TableCost` uses the same data correctly.
    """

    prompt: Curve
    """Seconds by prompt x batch tokens."""
    decode: Curve
    """Seconds per token by prompt x batch tokens."""
    prompt_factor: float = 1.0

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        return self.prompt_factor * self.prompt.at(new_tokens) if new_tokens else 0.0

    def step_s(self, shape: StepShape) -> float:
        tokens = shape.prefill_tokens + shape.decode_requests
        if shape.prefill_tokens == 0:
            return self.decode.at(tokens)
        return (MIXED_FACTOR if shape.decode_requests else 1.0) * self.prompt_factor * self.prompt.at(tokens)

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        return [self.decode.at(requests)] * steps


@dataclass(frozen=True, slots=True, kw_only=True)
class DistServeCost(_MeasuredCost):
    """Step times of DistServe's simulator: quadratic in the prompt length, linear for decodes in two regimes.

    The two decode fits do not meet: at `decode_large` requests a step can become cheaper. A prompt after cached tokens
    uses (n + c)^2 - c^2 where the fit has n^2. The second regime starts at 95 requests.
    Source: DistServe (OSDI '24), `simdistserve/estimators/profile_data`.
    """

    prompt: tuple[float, float, float]
    """Seconds per step, per token, and per squared token."""
    decode: tuple[float, float, float]
    """Seconds per step, per token of context, and per request."""
    decode_many: tuple[float, float, float]
    decode_large: int = 95
    pp: int = 1
    engine_s: float = 0.002
    """Seconds that the simulator adds to every step."""
    engine_token_s: float = 1e-7
    """Seconds that the simulator adds per token of context."""

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        if new_tokens == 0:
            return 0.0
        return self.step_s(prompt_step(new_tokens, cached_tokens))

    def step_s(self, shape: StepShape) -> float:
        # A mixed step is the sum of its prompt step and its decode step.
        if shape.prefill_tokens == 0:
            fixed_s, token_s = self._decode(shape.decode_requests)
            return fixed_s + token_s * shape.context_tokens
        start_s, token_s, square_s = self.prompt
        squares = 2 * shape.prefill_pairs - shape.prefill_tokens
        prompt_s = (start_s + token_s * shape.prefill_tokens + square_s * max(0.0, squares)) / self.pp
        prompt_s += self.engine_s + (0.001 * self.pp if self.pp > 1 else 0.0)
        if not shape.decode_requests:
            return prompt_s
        fixed_s, token_s = self._decode(shape.decode_requests)
        return prompt_s + (fixed_s + token_s * shape.context_tokens - self.engine_s)

    def _decode(self, requests: int) -> tuple[float, float]:
        start_s, token_s, request_s = self.decode if requests < self.decode_large else self.decode_many
        fixed_s = (start_s + request_s * requests) / self.pp + self.engine_s
        return fixed_s, token_s / self.pp + self.engine_token_s

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        fixed_s, token_s = self._decode(requests)
        reads = range(context_tokens, context_tokens + steps * requests, requests)
        return [fixed_s + token_s * read for read in reads]


Row = dict[str, str]


@cache
def _rows(name: str) -> tuple[Row, ...]:
    return tuple(csv.DictReader(data_text(name).splitlines()))


def _matching(name: str, wanted: dict[str, str]) -> list[Row]:
    """Return the matching rows of a data file. Raise ConfigError with the available ones if none matches."""
    rows = _rows(name)
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if not found:
        asked = " ".join(f"{key} {value}" for key, value in wanted.items())
        have = sorted({" ".join(f"{key} {row[key]}" for key in wanted) for row in rows})
        raise ConfigError(f"{name} has no {asked}{did_you_mean(asked, have)}; it has: {'; '.join(have)}")
    return found


def splitwise_table(setting: TableSetting) -> TableCost:
    """Return a cost model from Splitwise's profile. Raise ConfigError if it lacks the setting."""
    rows = _matching("splitwise.csv", {"llm": setting.llm, "hardware": setting.hardware, "tp": str(setting.tp)})
    read = [
        (int(row["prompt_tokens"]), int(row["batch"]), float(row["prompt_ms"]) / 1e3, float(row["token_ms"]) / 1e3)
        for row in rows
    ]
    single = {tokens: token_s for tokens, batch, _, token_s in read if batch == 1}
    longest = max(single)
    slope_s = (single[longest] - single[PROMPT_TOKENS]) / (longest - PROMPT_TOKENS)
    return TableCost(
        prompt=rising_curve((tokens * batch, prompt_s) for tokens, batch, prompt_s, _ in read),
        decode=rising_curve((batch, token_s) for tokens, batch, _, token_s in read if tokens == PROMPT_TOKENS),
        context_token_s=max(0.0, slope_s),
        prompt_factor=setting.prompt_factor,
        kv_token_bytes=setting.kv_token_bytes,
        wire=setting.wire,
    )


def splitwise_sim(setting: TableSetting) -> SplitwiseSimCost:
    """Return the curves of Splitwise's published simulator. Raise ConfigError if it lacks the setting."""
    rows = _matching("splitwise-sim.csv", {"llm": setting.llm, "hardware": setting.hardware, "tp": str(setting.tp)})
    return SplitwiseSimCost(
        prompt=_from_zero([(float(row["batch_tokens"]), float(row["prompt_ms"]) / 1e3) for row in rows]),
        decode=_from_zero([(float(row["batch_tokens"]), float(row["token_ms"]) / 1e3) for row in rows]),
        prompt_factor=setting.prompt_factor,
        kv_token_bytes=setting.kv_token_bytes,
        wire=setting.wire,
    )


def _from_zero(points: list[tuple[float, float]]) -> Curve:
    """Return a curve that is extrapolated to zero from the first two points, as in the published simulator."""
    (x0, y0), (x1, y1) = points[:2]
    whole = [(0.0, max(0.0, y0 - (y1 - y0) / (x1 - x0) * x0)), *points]
    return Curve(tuple(position for position, _ in whole), tuple(value for _, value in whole))


def distserve_table(setting: TableSetting, *, engine: str, pp: int) -> DistServeCost:
    """Return a cost model from DistServe's fits for A100-80G. Raise ConfigError if it lacks the setting."""
    rows = _matching("distserve.csv", {"engine": engine, "llm": setting.llm, "tp": str(setting.tp)})
    fits = {row["phase"]: row for row in rows}

    def seconds(phase: str) -> tuple[float, float, float]:
        row = fits[phase]
        return float(row["a_ms"]) / 1e3, float(row["b_ms_per_token"]) / 1e3, float(row["c_ms"]) / 1e3

    return DistServeCost(
        prompt=seconds("prefill"),
        decode=seconds("decoding_smallbs"),
        decode_many=seconds("decoding_largebs"),
        pp=pp,
        kv_token_bytes=setting.kv_token_bytes,
        wire=setting.wire,
    )


def vidur_layer(*, llm: str, gpu: str, tp: int) -> Curve:
    """Return Vidur's measured seconds of one layer without attention, by tokens. Raise ConfigError if none match."""
    rows = _matching("vidur.csv", {"llm": llm, "hardware": gpu, "tp": str(tp)})
    return rising_curve((float(row["tokens"]), float(row["layer_ms"]) / 1e3) for row in rows)
