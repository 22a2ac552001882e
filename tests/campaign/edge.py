"""The real HTTP routes over a simulated cluster, on its virtual clock."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from baton.compute.hash_engine import hash_card
from baton.compute.models.tokenizer import Tokenizer, load_tokenizer
from baton.compute.sandbox.template import load_chat_template
from baton.core.config import SandboxConfig
from baton.core.types import OutputToken, Request, RequestId, Slo, WorkerId
from baton.decide.kv.window import request_tokens_max
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.journal import Life
from baton.lab.sim.loop import EventLoop
from baton.serve.http.app import build_app
from baton.serve.http.grammar_checks import GrammarChecker
from baton.serve.http.identity import Keyring, KeySources
from baton.serve.http.model_services import ModelServices
from baton.serve.http.services import HttpSettings, Services
from baton.serve.live.history import History
from baton.serve.live.hooks import Hooks
from baton.serve.live.live_request import Finish, LiveRequest
from baton.serve.live.metrics_registry import Metrics
from baton.serve.live.recorder import Recorder
from tests.campaign.clients import CLIENT, HttpClient, PlannedClient
from tests.campaign.triggers import cancel_request

CARD = hash_card()
_LOST = WorkerId("lost")
"""Stands for the worker of a token whose worker has died since."""


class ClientLoop(asyncio.SelectorEventLoop):
    """Runs the tasks of clients and routes between two events of a simulation, on the clock of the simulation."""

    def __init__(self, clock: EventLoop) -> None:
        self._clock = clock
        self._is_stirred = False
        super().__init__()

    def time(self) -> float:
        return self._clock.now_s

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:
        self._is_stirred = True
        return super().call_soon(callback, *args, context=context)

    def settle(self) -> None:
        """Run until every task waits for a later event of the simulation."""
        while self._is_stirred:
            self._is_stirred = False
            super().call_soon(self.stop)
            self.run_forever()


class SimGateway:
    """Gateway of the HTTP routes to a simulated cluster. It passes tokens and results on as the live driver does."""

    def __init__(self, cluster: SimCluster) -> None:
        self.card = CARD
        self.state = "ready"
        self.slo: Slo | None = None
        self._cluster = cluster
        self._open: dict[RequestId, LiveRequest] = {}
        spec = cluster.spec
        blocks = min(spec.kv_of(host).blocks * spec.kv_of(host).block_tokens for host in spec.hosts())
        longest = request_tokens_max(spec.window, blocks, spec.kv.block_tokens, spec.prompt_rules.spill)
        self.request_tokens_max = min(CARD.context_tokens, longest or CARD.context_tokens)

    def missing(self) -> str:
        return ""

    def submit(self, request: Request, prompt: Sequence[int]) -> LiveRequest:
        request = replace(request, arrived_at_s=self._cluster.loop.now_s)
        live = self._open[request.id] = LiveRequest(request, prompt)
        CLIENT.get().requests.append(request.id)
        self._cluster.server.submit(request, prompt)
        return live

    def finish(self, live: LiveRequest) -> None:
        live.stopped = True
        self.cancel(live)

    def cancel(self, live: LiveRequest) -> None:
        if live.request.id in self._open:
            cancel_request(self._cluster, live.request.id)

    def mark_sent(self, live: LiveRequest, tokens: int) -> None:
        live.stamps.sent(tokens, self._cluster.loop.now_s)

    def pass_on(self) -> None:
        """Give every open request the tokens that the simulated server has recorded since the last call."""
        lives = self._cluster.server.journal.lives
        for request_id, live in self._open.items():
            self._pass_tokens(live, lives[request_id])

    def closed(self, life: Life) -> None:
        """Give a request its last tokens and its result."""
        live = self._open.pop(life.request.id, None)
        if live is None:
            return
        self._pass_tokens(live, life)
        close = life.closes[-1][1]
        is_stopped = bool(life.output) and life.output[-1] in life.request.sampling.stop_token_ids
        live.close(
            Finish(
                outcome="finished" if live.stopped and close.outcome == "cancelled" else close.outcome,
                reason="stop" if live.stopped or is_stopped else "length",
                message=close.reason,
                reject=close.reject,
                retry_after_s=close.retry_after_s,
            )
        )

    def _pass_tokens(self, live: LiveRequest, life: Life) -> None:
        request_id, output = life.request.id, life.output if len(life.token_times_s) > live.output_tokens else []
        for index in range(live.output_tokens, len(output)):
            token = OutputToken(request_id, live.attempt, index, output[index])
            live.push(token, life.worker or _LOST, self._cluster.loop.now_s)


class HttpEdge:
    """The HTTP application of a scenario, and its clients."""

    def __init__(self, cluster: SimCluster, planned: Sequence[PlannedClient]) -> None:
        self._clock = cluster.loop
        self._loop = ClientLoop(cluster.loop)
        self.gateway = SimGateway(cluster)
        sandbox, recorder = SandboxConfig(), Recorder(Metrics())
        model = ModelServices(
            gateway=self.gateway,
            hosts=self.gateway,
            tokenizer=tokenizer(),
            template=load_chat_template(CARD, sandbox),
            grammars=GrammarChecker(CARD, sandbox),
            history=History(self.gateway, recorder),
            block_tokens=cluster.spec.kv.block_tokens,
        )
        services = Services(
            models={CARD.name: model},
            settings=HttpSettings(seed=cluster.seed),
            keyring=Keyring(KeySources()),
            hooks=Hooks(),
            render_metrics=lambda with_tenants: b"",
            recorder=recorder,
        )
        self._app = build_app(services)
        self.clients = [HttpClient(each, cluster.loop) for each in planned]

    def schedule(self) -> None:
        for client in self.clients:
            self._clock.at(client.planned.at_s, functools.partial(client.arrive, self._app, self._loop))

    def after_event(self) -> None:
        """Let the routes and clients react to an event of the simulation."""
        self.gateway.pass_on()
        self._loop.settle()

    def close(self) -> None:
        """Cancel the requests of clients whose response did not end."""
        for client in self.clients:
            if client.serving is not None and not client.serving.done():
                client.serving.cancel()
        self._loop.settle()
        self._loop.close()


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(CARD)
