"""The client of one vLLM server: read its properties and its load, and send requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from baton.integrations.engines.http import EngineHttp, decoded, event_data
from baton.integrations.engines.port import (
    Choice,
    EngineBrokenError,
    EngineDeadError,
    EngineFacts,
    EngineLoad,
    Generation,
    PromptAnswer,
)
from baton.integrations.vllm.wire import (
    ABORT,
    COMPLETIONS,
    GENERATE,
    Answer,
    Version,
    completions_body,
    generate_body,
    read_load,
)


class VllmServer:
    """Implements `EngineServer` for vLLM. Create it in the event loop."""

    context_flag = "its --max-model-len"

    def __init__(self, url: str, key: str, *, answer_s: float) -> None:
        """`key`: bearer key, empty if the server needs none. `answer_s`: deadline in seconds of all but generations."""
        self._http = EngineHttp(url, key, answer_s=answer_s)
        self._model = ""
        self._has_generate = True
        """Whether the server has `/inference/v1/generate`, which takes and returns token ids."""

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
        version = (await self._http.get("/version", Version)).version
        model = await self._http.served_model()
        self._model, self._has_generate = model.id, await self._takes_tokens()
        load = await self.load()
        way = "token ids" if self._has_generate else "token ids by /v1/completions (start it with --enable-scale-out)"
        unsized = "its metrics have no vllm:cache_config_info with num_gpu_blocks and block_size"
        return EngineFacts(
            name=f"vLLM {version}",
            context_tokens=model.max_model_len or 0,
            interface=way,
            problem="" if load.kv_tokens else unsized,
            load=load,
        )

    async def load(self) -> EngineLoad:
        async with self._http.raw("/health", None, self._http.short) as response:
            if response.status >= 500:  # /metrics is answered without an engine
                raise EngineDeadError(f"/health answered {response.status}")
        return read_load(await self._http.metrics())

    async def tokenize(self, text: str) -> list[int] | None:
        return await self._http.tokenize({"model": self._model, "prompt": text, "add_special_tokens": False})

    async def stream(self, generation: Generation) -> AsyncGenerator[Choice]:
        path, body = self._body(generation, stream=True)
        async with self._http.request(path, body, traceparent=generation.traceparent) as response:
            async for line in response.content:
                data = event_data(line)
                if data is None:
                    continue
                answer = decoded(data, Answer)
                if answer.error is not None:
                    raise EngineBrokenError(answer.error.message or "the stream has an error without a text")
                for choice in answer.choices:
                    yield choice

    async def prefill(self, generation: Generation) -> PromptAnswer:
        path, body = self._body(generation, stream=False)
        async with self._http.request(path, body, traceparent=generation.traceparent) as response:
            answer = decoded(await response.read(), Answer)
        tokens = [token for choice in answer.choices for token in choice.token_ids or ()]
        return PromptAnswer(tokens, answer.kv_transfer_params)

    async def abort(self, generation_id: str) -> None:
        body = {"request_ids": [f"generate-tokens-{generation_id}"]}
        if self._has_generate:
            async with self._http.request(ABORT, body, self._http.short):
                pass

    def _body(self, generation: Generation, *, stream: bool) -> tuple[str, dict[str, Any]]:
        if self._has_generate:
            return GENERATE, generate_body(generation, self._model, stream=stream)
        return COMPLETIONS, completions_body(generation, self._model, stream=stream)

    async def _takes_tokens(self) -> bool:
        """Return whether the server has `/inference/v1/generate`. If so, it rejects an empty body as invalid."""
        async with self._http.raw(GENERATE, {}, self._http.short) as response:
            return response.status in (400, 422)
