"""The client of one SGLang server, by its native routes, which take and return token ids. Written for SGLang 0.5.23.

A server of a pair computes a prompt only while its decode server waits for the KV: both get the request at once, with
the same bootstrap room.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from baton.core.types import Role
from baton.integrations.engines.http import EngineHttp, decoded, event_data, samples
from baton.integrations.engines.legs import OpenLeg, abort_quietly
from baton.integrations.engines.port import (
    Choice,
    EngineBrokenError,
    EngineFacts,
    EngineLoad,
    EngineRefusedError,
    Generation,
    PromptAnswer,
)

_GENERATE = "/generate"
_SEED_MASK = 2**63 - 1
_ROLES: dict[str, Role] = {"null": "mixed", "prefill": "prefill", "decode": "decode"}
_WAITING = (
    "sglang:num_queue_reqs",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)
"""Queues of a server. A server without a partner has the first one only."""


class InternalState(Struct, frozen=True):
    effective_max_running_requests_per_dp: int = 0


class ServerInfo(Struct, frozen=True):
    """The answer of /server_info, of which Baton reads these fields."""

    version: str = ""
    max_total_num_tokens: int = 0
    """Size of the KV cache of one data-parallel rank."""
    dp_size: int = 1
    disaggregation_mode: Literal["null", "prefill", "decode"] = "null"
    disaggregation_bootstrap_port: int = 8998
    internal_states: list[InternalState] = []
    """One of each data-parallel rank."""


class FinishReason(Struct, frozen=True):
    type: Literal["stop", "length", "abort"]
    message: str = ""
    status_code: int | None = None


class MetaInfo(Struct, frozen=True):
    completion_tokens: int = 0
    finish_reason: FinishReason | None = None


class StreamError(Struct, frozen=True):
    message: str = ""
    code: int | None = None


class Event(Struct, frozen=True):
    """One event of a stream."""

    output_ids: list[int] = []
    """All output tokens so far; with --incremental-streaming-output those since the last event."""
    meta_info: MetaInfo = MetaInfo()
    error: StreamError | None = None


class SglangServer:
    """Implements `EngineServer` for SGLang. Create it in the event loop."""

    context_flag = "its --context-length or --max-total-tokens"

    def __init__(self, url: str, key: str, *, answer_s: float) -> None:
        """`key`: bearer key, empty if the server needs none. `answer_s`: deadline in seconds of all but generations."""
        self._http = EngineHttp(url, key, answer_s=answer_s)
        self._model = ""
        self._info = ServerInfo()

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def is_paired(self) -> bool:
        return self._info.disaggregation_mode != "null"

    async def disconnect(self) -> None:
        await self._http.disconnect()

    async def close(self) -> None:
        await self._http.close()

    async def facts(self) -> EngineFacts:
        info = self._info = await self._http.get("/server_info", ServerInfo)
        model = await self._http.served_model()
        self._model = model.id
        try:
            load, problem = await self.load(), ""
        except EngineRefusedError as error:
            load, problem = EngineLoad(kv_tokens=self._kv_tokens), f"start it with --enable-metrics: {error}"
        if not load.kv_tokens:
            problem = "its /server_info has no max_total_num_tokens: it is no SGLang server"
        is_alone = info.disaggregation_mode == "null"
        return EngineFacts(
            name=f"SGLang {info.version}",
            context_tokens=model.max_model_len or 0,
            requests_max=sum(state.effective_max_running_requests_per_dp for state in info.internal_states),
            interface="token ids" if is_alone else f"token ids, disaggregation mode {info.disaggregation_mode}",
            role=_ROLES[info.disaggregation_mode],
            problem=problem,
            load=load,
        )

    async def load(self) -> EngineLoad:
        load = read_load(await self._http.metrics())
        return replace(load, kv_tokens=self._kv_tokens)

    @property
    def _kv_tokens(self) -> int:
        return self._info.max_total_num_tokens * self._info.dp_size

    async def tokenize(self, text: str) -> list[int] | None:
        return await self._http.tokenize({"model": self._model, "prompt": text, "add_special_tokens": False})

    async def stream(self, generation: Generation) -> AsyncGenerator[Choice]:
        """Yield the answer. A decode server that no prompt was computed for asks the partner for it."""
        if generation.partner is not None:
            prompt = await generation.partner.prefill(replace(generation, hands_off=True, partner=self))
            assert prompt.leg is not None, "a prompt with a partner has an answer"
            async with aclosing(prompt.leg.choices()) as choices:
                async for choice in choices:
                    yield choice
            return
        output = StreamOutput(generation.sampling.stop_token_ids)
        body = generate_body(generation, stream=True)
        async with self._http.request(_GENERATE, body, traceparent=generation.traceparent) as response:
            async for line in response.content:
                data = event_data(line)
                if data is not None:
                    event = decoded(data, Event)
                    yield Choice(token_ids=output.take(event))
                    if event.meta_info.finish_reason is not None:
                        yield Choice(finish_reason=output.finish(event.meta_info.finish_reason))

    async def prefill(self, generation: Generation) -> PromptAnswer:
        """Compute a prompt on a prefill server, while the decode server (`generation.partner`) waits for its KV.

        Compute nothing without a partner, or if this is no prefill server: `stream` then asks a prefill server.
        """
        partner = generation.partner
        if partner is None or self._info.disaggregation_mode != "prefill":
            return PromptAnswer([], None)
        pair = {
            "bootstrap_host": urlsplit(self.url).hostname,
            "bootstrap_port": self._info.disaggregation_bootstrap_port,
            "bootstrap_room": secrets.randbits(63),
        }
        paired = replace(generation, hands_off=False, partner=None, kv_transfer_params=pair)
        leg = OpenLeg(partner, paired)
        computing = asyncio.ensure_future(self._compute(paired))
        is_computed = False
        try:
            await asyncio.wait((computing, leg.task), return_when=asyncio.FIRST_COMPLETED)
            leg.check()
            await computing
            is_computed = True
        finally:
            if not is_computed:
                computing.cancel()
                leg.cancel()
        return PromptAnswer([], None, leg)

    async def _compute(self, generation: Generation) -> None:
        """Compute a prompt. The answer comes once the partner has its KV."""
        body = generate_body(generation, stream=False)
        try:
            async with self._http.request(_GENERATE, body, traceparent=generation.traceparent) as response:
                event = decoded(await response.read(), Event)
        except asyncio.CancelledError:
            await abort_quietly(self, generation.id)
            raise
        if event.meta_info.finish_reason is not None:
            _check(event.meta_info.finish_reason)

    async def abort(self, generation_id: str) -> None:
        async with self._http.request("/abort_request", {"rid": generation_id}, self._http.short):
            pass


class StreamOutput:
    """The output of a stream so far."""

    def __init__(self, stop_tokens: Sequence[int]) -> None:
        self._stop_tokens = stop_tokens
        self._tokens = 0
        self._last: int | None = None

    def take(self, event: Event) -> list[int]:
        """Return the new tokens of an event, from either form. Raises as `EngineServer.stream` does."""
        if event.error is not None:
            _fail(event.error.message, event.error.code)
        total = event.meta_info.completion_tokens
        # An event with all tokens so far may have more than it counts, because tokens arrive while it is written.
        has_all = len(event.output_ids) >= total
        tokens = event.output_ids[self._tokens :] if has_all else event.output_ids
        self._tokens += len(tokens)
        if self._tokens < total:
            raise EngineBrokenError(f"the stream has {self._tokens} of {total} tokens: an event was lost")
        self._last = tokens[-1] if tokens else self._last
        return tokens

    def finish(self, reason: FinishReason) -> str:
        """Return the reason of the port. Raises EngineBrokenError if the server has stopped too early."""
        _check(reason)
        if reason.type == "stop" and self._last not in self._stop_tokens:
            raise EngineBrokenError(f"it stopped at token {self._last}, which is no stop token of the request")
        return reason.type


def _check(reason: FinishReason) -> None:
    if reason.type == "abort":
        _fail(reason.message, reason.status_code)


def _fail(message: str, status: int | None) -> None:
    """Raise the error for a status that came within an answer with status 200."""
    text = f"{_GENERATE} failed with {status}: {message}"
    raise EngineRefusedError(text) if status is not None and 400 <= status < 500 else EngineBrokenError(text)


def generate_body(generation: Generation, *, stream: bool) -> dict[str, Any]:
    """Return the body for `/generate`, with all sampling parameters, because the server has other defaults."""
    sampling, begun = generation.sampling, generation.output_tokens
    body = {
        "rid": generation.id,
        "input_ids": list(generation.tokens),
        "stream": stream,
        "sampling_params": {
            "max_new_tokens": generation.tokens_max,
            "min_new_tokens": min(generation.tokens_max, max(0, sampling.output_tokens_min - begun)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias},
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": not sampling.stop_token_ids,  # it ignores `stop_token_ids` too
            "sampling_seed": None if sampling.temperature == 0 else sampling.seed & _SEED_MASK,
        },
        **(generation.kv_transfer_params or {}),
    }
    # Older servers know `extra_key` only, and ignore the other field.
    salts = {"cache_salt": generation.cache_salt, "extra_key": generation.cache_salt}
    return {**body, **salts} if generation.cache_salt else body


def read_load(metrics: str) -> EngineLoad:
    """Return the load of a server from the text of its metrics, summed over its data-parallel ranks."""
    totals: dict[str, float] = {}
    usages: list[float] = []
    for name, _labels, value in samples(metrics, "sglang:"):
        totals[name] = totals.get(name, 0.0) + value
        if name == "sglang:token_usage":
            usages.append(value)
    return EngineLoad(
        running_requests=int(totals.get("sglang:num_running_reqs", 0)),
        waiting_requests=int(sum(totals.get(name, 0) for name in _WAITING)),
        kv_used_ratio=min(1.0, sum(usages) / max(1, len(usages))),
        started_unix_s=totals.get("sglang:startup_time_seconds", 0.0),
    )
