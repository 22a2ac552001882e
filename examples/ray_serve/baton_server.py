"""Baton as the server class of an LLM application of Ray Serve. It has the methods of Ray's `LLMServerProtocol`.

    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    config = LLMConfig(
        model_loading_config={"model_id": "smollm2-135m"},
        server_cls="baton_server:BatonServer",
        engine_kwargs={"arguments": ["--prefill", "1", "--decode", "1"]},
    )
    serve.run(build_openai_app({"llm_configs": [config]}))

Each replica starts `baton serve` with these arguments on loopback, and ends it when it ends itself. With
`engine_kwargs={"url": "http://HOST:8000", "api_key": KEY}` all replicas use a server that runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator, Mapping
from importlib import import_module
from typing import Any, Protocol

import aiohttp

PASSED_HEADERS = ("x-request-id", "x-slo-ttft-ms", "x-slo-tpot-ms")
"""Headers of clients that Baton gets. Their keys are Ray's."""


class ModelSource(Protocol):
    model_id: str
    model_source: str | None


class ServeConfig(Protocol):
    """What is used of Ray's `LLMConfig`."""

    model_loading_config: ModelSource
    engine_kwargs: Mapping[str, Any]
    deployment_config: Mapping[str, Any]


class ApiRequest(Protocol):
    """A request of a client, as Ray has checked it."""

    def model_dump(self, *, mode: str, exclude_unset: bool) -> dict[str, Any]: ...


class RawRequest(Protocol):
    """What is used of Ray's `RawRequestInfo`."""

    headers: Mapping[str, str]


Answers = AsyncGenerator[object, None]
"""One response, lists of events, or one error."""


class BatonServer:
    """A replica: requests go to a Baton server, answers come back as Ray's response objects or events."""

    async def __init__(self, llm_config: ServeConfig) -> None:
        """Start the server. Raises RuntimeError if it does not start."""
        self._process: asyncio.subprocess.Process | None = None
        self._llm_config = llm_config
        self._model: str = llm_config.model_loading_config.model_id
        self._url: str = llm_config.engine_kwargs.get("url", "")
        self._reading: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        await self.start()

    @classmethod
    def get_deployment_options(cls, llm_config: ServeConfig) -> dict[str, Any]:
        """Return the options of the deployment: those of the configuration, with a CPU unless they name any."""
        options = dict(llm_config.deployment_config)
        options["ray_actor_options"] = {"num_cpus": 1, **options.get("ray_actor_options", {})}
        return options

    async def llm_config(self) -> ServeConfig:
        return self._llm_config

    async def start(self) -> None:
        """Start `baton serve` unless a URL is given, and wait until it is ready. Further calls do nothing."""
        if self._session is not None:
            return
        key = self._llm_config.engine_kwargs.get("api_key", "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), headers=headers)
        if self._url:
            return
        source = self._llm_config.model_loading_config.model_source or self._model
        command = [sys.executable, "-u", "-m", "baton.cli.main", "serve", str(source), "--port", "0"]
        command += ["--served-name", self._model, *self._llm_config.engine_kwargs.get("arguments", ())]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE)
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            words = line.decode(errors="replace").split()
            if words[:2] == ["listening", "on"]:
                self._url = words[2]
            if words[:1] == ["ready:"]:
                self._reading = asyncio.create_task(_pass_on(self._process.stdout))
                return
        raise RuntimeError(f"baton serve ended with code {await self._process.wait()}; its log has the reason")

    async def check_health(self) -> None:
        """Raise RuntimeError if the server has ended or is not ready: Ray then starts another replica."""
        if self._process is not None and self._process.returncode is not None:
            raise RuntimeError(f"baton serve ended with code {self._process.returncode}")
        async with self._open().get(f"{self._url}/ready") as answer:
            if answer.status != 200:
                raise RuntimeError(f"{self._url}/ready answers {answer.status}")

    async def stop(self) -> None:
        """End the server and its connections."""
        if self._session is not None:
            await self._session.close()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    def __del__(self) -> None:
        """End the server with the replica: Ray calls no other method then."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    # ---- requests: Ray awaits a method, and reads the generator that it returns

    async def chat(self, request: ApiRequest, raw_request_info: RawRequest | None = None) -> Answers:
        """Return a generator: of the response, of lists of events if the request asks for a stream, or of an error."""
        return self._ask("/v1/chat/completions", request, raw_request_info)

    async def completions(self, request: ApiRequest, raw_request_info: RawRequest | None = None) -> Answers:
        return self._ask("/v1/completions", request, raw_request_info)

    async def embeddings(self, request: ApiRequest, raw_request_info: RawRequest | None = None) -> Answers:
        return self._ask("/v1/embeddings", request, raw_request_info)

    async def reset_prefix_cache(self) -> None:
        """Raise NotImplementedError: Baton's host owns its cache, and other workers use it."""
        raise NotImplementedError("Baton keeps its prefix cache; give requests another cache_salt instead")

    async def _ask(self, path: str, request: ApiRequest, info: RawRequest | None) -> Answers:
        models = import_module("ray.serve.llm.openai_api_models")
        responses = {
            "/v1/chat/completions": models.ChatCompletionResponse,
            "/v1/completions": models.CompletionResponse,
            "/v1/embeddings": models.EmbeddingResponse,
        }
        body = {**request.model_dump(mode="json", exclude_unset=True), "model": self._model}
        given = info.headers if info is not None else {}
        headers = {name: value for name, value in given.items() if name.lower() in PASSED_HEADERS}
        # The block ends when Ray cancels the request: the closed connection aborts it in Baton.
        async with self._open().post(f"{self._url}{path}", json=body, headers=headers) as answer:
            if answer.status != 200:
                error = (await answer.json(content_type=None))["error"]
                named = {"message": error["message"], "type": error["type"], "code": answer.status}
                yield models.ErrorResponse.model_validate({"error": named})
            elif not body.get("stream"):
                yield responses[path].model_validate(await answer.json())
            else:
                async for line in answer.content:
                    if line.strip():
                        yield [f"{line.decode().strip()}\n\n"]

    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "start() comes first"
        return self._session


async def _pass_on(lines: asyncio.StreamReader) -> None:
    """Write the server's output to this process's, so that its pipe is never full."""
    async for line in lines:
        sys.stdout.write(line.decode(errors="replace"))
