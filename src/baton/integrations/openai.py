"""The client of one server with OpenAI's API, by `/v1/completions`: in token ids where it takes them, else in text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import Struct

from baton.compute.models.tokenizer import StreamDecoder, Tokenizer
from baton.core.engine_config import EngineConfig
from baton.integrations.engines.http import EngineHttp, ErrorInfo, decoded, error_text, event_data, samples
from baton.integrations.engines.port import (
    PROBE,
    Choice,
    EngineBrokenError,
    EngineFacts,
    EngineLoad,
    EngineRefusedError,
    Generation,
    PromptAnswer,
)

COMPLETIONS = "/v1/completions"
_PAGE = "docs/integrations/openai.md"
_SEED_MASK = 2**31 - 1
_KV_TOKENS = 131_072
"""Assumed size of the server's KV cache if the configuration does not say it."""
_ANCHORS = ("", "\n", "0")
"""Texts before a piece of an answer, so that SentencePiece adds no space to the piece itself."""


class TextChoice(Struct, frozen=True):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class Usage(Struct, frozen=True):
    prompt_tokens: int | None = None


class TextAnswer(Struct, frozen=True):
    """A complete answer, or one event of a stream."""

    choices: list[TextChoice] = []
    usage: Usage | None = None
    error: ErrorInfo | None = None


class OpenAiServer:
    """Implements `EngineServer` for any server with `/v1/completions`. Create it in the event loop."""

    context_flag = "its context length"

    def __init__(self, config: EngineConfig, key: str, tokenizer: Tokenizer, *, answer_s: float) -> None:
        """`key`: bearer key, empty if the server needs none. `answer_s`: deadline in seconds of all but generations."""
        self._http = EngineHttp(config.url.rstrip("/").removesuffix("/v1"), key, answer_s=answer_s)
        self._config = config
        self._tokenizer = tokenizer
        self._model = config.model
        self._takes_ids = False
        self._returns_ids = False
        self._adds_bos = False
        """The server puts a begin-of-sequence token before a prompt in text."""
        self._kv_tokens = 0
        self._has_metrics = False

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
        context_tokens = 0
        if not self._config.model:
            served = await self._http.served_model()
            self._model, context_tokens = served.id, served.max_model_len or 0
        self._kv_tokens = self._config.kv_tokens or max(_KV_TOKENS, context_tokens)
        started_unix_s = await self._started_unix_s()
        self._has_metrics = bool(started_unix_s)
        problem = await self._text_problem()
        if not problem:
            await self._find_forms()
        form = "token ids" if self._returns_ids else "token ids, answers in text" if self._takes_ids else "text"
        return EngineFacts(
            name=f"a server of {self._model}",
            context_tokens=context_tokens,
            interface=f"{form} by {COMPLETIONS}",
            problem=problem,
            load=EngineLoad(kv_tokens=self._kv_tokens, started_unix_s=started_unix_s),
        )

    async def load(self) -> EngineLoad:
        """Return the start time of the server's process if its metrics have it. Raises EngineBrokenError."""
        if self._has_metrics:
            started_unix_s = await self._started_unix_s()
            if not started_unix_s:
                raise EngineBrokenError("/metrics has no process_start_time_seconds any more")
            return EngineLoad(kv_tokens=self._kv_tokens, started_unix_s=started_unix_s)
        async with self._http.raw("/v1/models", None, self._http.short) as response:
            if response.status >= 500:
                raise EngineBrokenError(f"/v1/models answered {response.status}")
        return EngineLoad(kv_tokens=self._kv_tokens)

    async def _started_unix_s(self) -> float:
        """Return the start time of the server's process from its metrics. 0: they do not have it."""
        async with self._http.raw("/metrics", None, self._http.short) as response:
            text = (await response.read()).decode(errors="replace") if response.status == 200 else ""
        return sum(value for _, _, value in samples(text, "process_start_time_seconds"))

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the tokens of a server that has vLLM's route (as Baton has it) or llama.cpp's, whose fields differ."""
        named = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return await self._http.tokenize({**named, "content": text, "add_special": False}) or None

    async def stream(self, generation: Generation) -> AsyncGenerator[Choice]:
        """Send the request. While the answer is shorter than `tokens_max`, send it again with the tokens so far.

        A text has fewer tokens here than on the server if the server split it otherwise, and a server without
        `ignore_eos` or `min_tokens` ends at each of its stop tokens.
        """
        tokens, stops = list(generation.tokens), generation.sampling.stop_token_ids
        first = len(tokens)
        while len(tokens) < first + generation.tokens_max:
            begun, reason = len(tokens), None
            async with aclosing(self._choices(generation, tokens)) as choices:
                async for choice in choices:
                    new = choice.token_ids or []
                    tokens += new
                    reason = choice.finish_reason or reason
                    if new:
                        yield Choice(token_ids=new)
            output_tokens = generation.output_tokens + len(tokens) - first
            if reason == "stop" and stops and output_tokens >= generation.sampling.output_tokens_min:
                has_stop = len(tokens) > begun and tokens[-1] in stops
                yield Choice(token_ids=None if has_stop else [stops[0]], finish_reason="stop")
                return
            if reason == "length" and self._returns_ids:
                break
            if len(tokens) == begun:
                raise EngineRefusedError(
                    f"the server ended the answer ({reason}) after {output_tokens} tokens, before its limit"
                )
        yield Choice(finish_reason="length")

    async def prefill(self, generation: Generation) -> PromptAnswer:
        """Compute a prompt. The server keeps no KV for others, so they compute it again."""
        choices = self._choices(generation, generation.tokens, tokens_max=1)
        return PromptAnswer([token async for choice in choices for token in choice.token_ids or ()], None)

    async def abort(self, generation_id: str) -> None:
        """Do nothing: the server ends a request whose connection is closed."""

    # ---- what the server takes

    async def _text_problem(self) -> str:
        """Return the reason why the server cannot be a worker. Empty: it can. Also sets `_adds_bos`."""
        tokens = len(self._tokenizer.encode(PROBE, add_special=False))
        answer = await self._try(PROBE)
        if isinstance(answer, str):
            return f"it does not complete a text: {answer}; /v1/chat/completions alone is not enough, see {_PAGE}"
        counted = None if answer.usage is None else answer.usage.prompt_tokens
        self._adds_bos = counted == tokens + 1
        if counted in (None, tokens, tokens + 1):
            return ""
        return f"its tokenizer is not the model's: it counts {counted} tokens of a text with {tokens}"

    async def _find_forms(self) -> None:
        """Find out whether the server takes a prompt of token ids, and returns token ids."""
        tokens = self._tokenizer.encode(PROBE, add_special=False)
        self._takes_ids = self._returns_ids = False
        for extra in ({"return_token_ids": True}, {}):
            answer = await self._try(tokens, extra)
            if not isinstance(answer, str):
                counted = None if answer.usage is None else answer.usage.prompt_tokens
                self._takes_ids = counted in (None, len(tokens))
                self._returns_ids = self._takes_ids and any(each.token_ids for each in answer.choices)
                return

    async def _try(self, prompt: str | Sequence[int], extra: dict[str, Any] | None = None) -> TextAnswer | str:
        """Let the server generate one token. Return its answer, or the text of a status from 400 to 499."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **(extra or {})}
        async with self._http.raw(COMPLETIONS, body, self._http.short) as response:
            data = await response.read()
            if response.status < 400:
                return decoded(data, TextAnswer)
            text = f"{COMPLETIONS} answered {response.status}: {error_text(data)}"
            if response.status >= 500 and response.status != 501:
                raise EngineBrokenError(text)
            return text

    # ---- one request

    async def _choices(
        self, generation: Generation, tokens: Sequence[int], tokens_max: int | None = None
    ) -> AsyncGenerator[Choice]:
        """Yield the tokens of one stream, in any form. Raises EngineBrokenError if it ends before its last event."""
        most = generation.tokens_max - (len(tokens) - len(generation.tokens)) if tokens_max is None else tokens_max
        body = self._body(generation, tokens, most)
        async with self._http.request(COMPLETIONS, body, traceparent=generation.traceparent) as response:
            async for line in response.content:
                data = event_data(line)
                answer = decoded(data, TextAnswer) if data is not None else TextAnswer()
                if answer.error is not None:
                    raise EngineBrokenError(answer.error.message or "the stream has an error without a text")
                for choice in answer.choices:
                    yield Choice(token_ids=self._tokens_of(choice), finish_reason=choice.finish_reason)
                    if choice.finish_reason in ("stop", "length"):
                        return
                    if choice.finish_reason:
                        raise EngineRefusedError(f"the server ended the answer: {choice.finish_reason}")
        raise EngineBrokenError("the stream ended before its last event")

    def _tokens_of(self, choice: TextChoice) -> list[int]:
        if self._returns_ids:
            return choice.token_ids or []
        return tokens_of_piece(self._tokenizer, choice.text) if choice.text else []

    def _body(self, generation: Generation, tokens: Sequence[int], tokens_max: int) -> dict[str, Any]:
        """Return a body with OpenAI's parameters. Others are only there if they matter: a server may refuse them."""
        sampling, begun = generation.sampling, len(tokens) - len(generation.tokens) + generation.output_tokens
        least = max(0, min(tokens_max, sampling.output_tokens_min - begun))
        others = {
            "top_k": (sampling.top_k, 0),
            "min_p": (sampling.min_p, 0.0),
            "repetition_penalty": (sampling.repetition_penalty, 1.0),
            "logit_bias": ({str(token): bias for token, bias in sampling.logit_bias}, {}),
            "ignore_eos": (not sampling.stop_token_ids, False),
            "min_tokens": (least, 0),
            "stop_token_ids": (list(sampling.stop_token_ids) if self._returns_ids else [], []),
            "return_token_ids": (self._returns_ids, False),
            "cache_salt": (generation.cache_salt if self._returns_ids else "", ""),
        }
        return {
            "model": self._model,
            "prompt": list(tokens) if self._takes_ids else self._text(tokens),
            "max_tokens": tokens_max,
            "stream": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "seed": (sampling.seed + begun) & _SEED_MASK,  # a continued answer must not draw its first numbers again
            **{name: value for name, (value, default) in others.items() if value != default},
        }

    def _text(self, tokens: Sequence[int]) -> str:
        """Return a prompt as text, without the first token that the server adds itself."""
        has_bos = self._adds_bos and bool(tokens) and self._tokenizer.is_special(tokens[0])
        return self._tokenizer.decode(tokens[1:] if has_bos else tokens, skip_special=False)


def tokens_of_piece(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return tokens that add a text to an answer. Raises EngineRefusedError if no tokens give exactly this text."""
    for anchor in _ANCHORS:
        before = tokenizer.encode(anchor, add_special=False) if anchor else []
        tokens = tokenizer.encode(anchor + text, add_special=False)
        if tokens[: len(before)] != before:
            continue
        added = tokens[len(before) :]
        stream = StreamDecoder(tokenizer, follows_text=True)
        if "".join(map(stream.push, added)) + stream.flush() == text:
            return added
    raise EngineRefusedError(f"the server's text {text[:40]!r} cannot be written in tokens of the model")
