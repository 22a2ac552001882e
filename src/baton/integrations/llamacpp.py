"""The client of one llama.cpp server, by the routes of that server that take and return token ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any
from zlib import crc32

from msgspec import Struct

from baton.integrations.engines.http import EngineHttp, ErrorInfo, decoded, event_data
from baton.integrations.engines.port import (
    Choice,
    EngineBrokenError,
    EngineFacts,
    EngineLoad,
    Generation,
    PromptAnswer,
)

_SEED_MASK = 2**31 - 1


class GenerationSettings(Struct, frozen=True):
    n_ctx: int = 0
    """Context of one slot, in tokens."""


class Props(Struct, frozen=True):
    """The answer of /props."""

    total_slots: int = 0
    """Requests that the server computes at once."""
    build_info: str = ""
    media_marker: str = ""
    """A random text of each process. Older versions have none, or always the same."""
    default_generation_settings: GenerationSettings = GenerationSettings()


class Slot(Struct, frozen=True):
    is_processing: bool = False


class Event(Struct, frozen=True):
    """One event of a stream. The last one has `stop`, and no tokens."""

    tokens: list[int] = []
    stop: bool = False
    error: ErrorInfo | None = None


class LlamaCppServer:
    """Implements `EngineServer` for llama.cpp. Create it in the event loop."""

    context_flag = "its --ctx-size, which its --parallel slots share"

    def __init__(self, url: str, key: str, *, answer_s: float) -> None:
        """`key`: bearer key, empty if the server needs none. `answer_s`: deadline in seconds of all but generations."""
        self._http = EngineHttp(url, key, answer_s=answer_s)
        self._context_tokens = 0
        self._kv_tokens = 0

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def is_paired(self) -> bool:
        return False

    async def disconnect(self) -> None:
        await self._http.disconnect()

    async def close(self) -> None:
        await self._http.close()

    async def facts(self) -> EngineFacts:
        props = await self._http.get("/props", Props)
        self._context_tokens = props.default_generation_settings.n_ctx
        self._kv_tokens = props.total_slots * self._context_tokens
        return EngineFacts(
            name=f"llama.cpp {props.build_info}",
            context_tokens=self._context_tokens,
            requests_max=props.total_slots,
            interface=f"{props.total_slots} slots",
            problem="" if self._kv_tokens else "its /props has no total_slots or no n_ctx: it is no llama.cpp server",
            load=await self._load(props),
        )

    async def load(self) -> EngineLoad:
        return await self._load(await self._http.get("/props", Props))

    async def _load(self, props: Props) -> EngineLoad:
        """Return the load, with the process's random text as the number that each start changes."""
        slots = await self._http.get("/slots", list[Slot])
        running, started = sum(slot.is_processing for slot in slots), float(crc32(props.media_marker.encode()))
        return EngineLoad(running_requests=running, kv_tokens=self._kv_tokens, started_unix_s=started)

    async def tokenize(self, text: str) -> list[int] | None:
        return await self._http.tokenize({"content": text, "add_special": False})

    async def stream(self, generation: Generation) -> AsyncGenerator[Choice]:
        """Send the request in parts: until its least number of tokens, and after a stop token that is not its own.

        llama.cpp has neither a least number nor a choice of stop tokens: it ends at each token that ends a turn.
        """
        tokens, sampling = list(generation.tokens), generation.sampling
        begun = generation.output_tokens
        most = len(tokens) + generation.tokens_max
        while len(tokens) < most:
            least = sampling.output_tokens_min - begun
            part_tokens_max = min(least, most - len(tokens)) if least > 0 else most - len(tokens)
            body = self._body(generation, tokens, part_tokens_max, ignores_stops=least > 0)
            part_tokens = 0
            async for event in self._events(body, generation):
                if event.tokens:
                    part_tokens += len(event.tokens)
                    tokens += event.tokens
                    yield Choice(token_ids=event.tokens)
            if not part_tokens:
                raise EngineBrokenError("the server ended the answer without a token")
            begun += part_tokens
            if least <= 0 and tokens[-1] in sampling.stop_token_ids:
                yield Choice(finish_reason="stop")
                return
        yield Choice(finish_reason="length")

    async def prefill(self, generation: Generation) -> PromptAnswer:
        """Compute a prompt. llama.cpp keeps no KV for other servers, so they compute it again."""
        body = self._body(generation, list(generation.tokens), 1, ignores_stops=False)
        return PromptAnswer([token async for event in self._events(body, generation) for token in event.tokens], None)

    async def abort(self, generation_id: str) -> None:
        """Do nothing: the server ends a request whose connection is closed."""

    async def _events(self, body: dict[str, Any], generation: Generation) -> AsyncGenerator[Event]:
        """Yield the events of one stream. Raises EngineBrokenError if it ends before its last event."""
        async with self._http.request("/completion", body, traceparent=generation.traceparent) as response:
            async for line in response.content:
                data = event_data(line)
                event = decoded(data, Event) if data is not None else Event()
                if event.error is not None:
                    raise EngineBrokenError(event.error.message or "the stream has an error without a text")
                yield event
                if event.stop:
                    return
        raise EngineBrokenError("the stream ended before its last event")

    def _body(
        self, generation: Generation, tokens: list[int], tokens_max: int, *, ignores_stops: bool
    ) -> dict[str, Any]:
        """Return a body with all sampling parameters, because the server has other defaults."""
        sampling, begun = generation.sampling, len(tokens) - len(generation.tokens) + generation.output_tokens
        return {
            "prompt": tokens,
            "n_predict": tokens_max,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": not generation.cache_salt,
            "ignore_eos": ignores_stops or not sampling.stop_token_ids,
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "temperature": sampling.temperature,
            "top_k": max(0, sampling.top_k),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": self._context_tokens,
            "logit_bias": [[token, bias] for token, bias in sampling.logit_bias],
            "seed": (sampling.seed + begun) & _SEED_MASK,  # a continued answer must not draw its first numbers again
        }
