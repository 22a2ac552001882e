"""Main function of a worker process: receive the setup, map the arena, load the model, warm up, run steps."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from baton.compute.constrained import ConstrainedEngine
from baton.compute.load_engine import EngineChoice, RankComputation, choose_engine, load_engine, load_parallel_engine
from baton.compute.native.build import has_to_be_built
from baton.compute.native.load_native import native_problem
from baton.compute.step_engine import StepEngine
from baton.core.errors import BatonError
from baton.core.messages import WorkerFailed, WorkerProgress, WorkerReady
from baton.core.plugin import load_plugin
from baton.decide.control.batcher import Batcher
from baton.decide.cost.load import load_cost
from baton.decide.policy.batching import BatcherPolicies, BatchingPolicy
from baton.decide.policy.fairness import FairnessPolicy
from baton.move.arena.cuda import DeviceArray
from baton.move.arena.spill import SpillMemory
from baton.move.clock import now_s
from baton.move.ipc.child import die_with_parent
from baton.move.weights_file import WeightsFile
from baton.serve.messages.setup import WorkerSetup
from baton.serve.worker.crew import RankCrew
from baton.serve.worker.layers import LayerWatch
from baton.serve.worker.link import ServerLink
from baton.serve.worker.loop import StepLoop, WorkerSpill
from baton.serve.worker.rank_wire import open_rank_arena, rank_cores
from baton.serve.worker.step_log import StepLogWriter

DRAFTED_TOKENS_MAX = 8
"""Maximum drafted tokens per request and step in the native engine, unless configured."""


def run_worker(descriptor: int) -> int:
    """Serve on an inherited Unix socket until the host hangs up. Return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; only the server ends this process
    die_with_parent()
    link = ServerLink(socket.socket(fileno=descriptor))
    setup, (arena_fd, *others) = link.receive_setup()
    crew: RankCrew | None = None
    try:
        arena = open_rank_arena(setup, arena_fd, 0)
        if setup.layout.ranks > 1 and setup.card.format != "hash":
            crew = RankCrew(setup, arena.fd)
        _pin(setup)
        spill = _spill(setup, arena.memory, others.pop(0)) if setup.spill_blocks else None
        choice = replace(
            _choose(setup, link),
            weights_file=_weights_file(others),
            spill=spill.memory.memory if spill is not None else None,
        )
        engine = _load(setup, arena.memory, link, crew, choice)
        batcher = _batcher(setup, choice)
        steps = _step_log(setup)
    except BatonError as error:
        link.put(WorkerFailed(setup.view.id, str(error)))
        return 1
    link.put(WorkerReady(setup.view.id, os.getpid(), choice.attention))
    try:
        StepLoop(link, batcher, engine, steps, _watch(setup, engine, link), spill).run()
    finally:
        if crew is not None:
            crew.close()
    if steps is not None:
        steps.close()
    return 0


def _spill(setup: WorkerSetup, memory: memoryview | DeviceArray, descriptor: int) -> WorkerSpill:
    assert not isinstance(memory, DeviceArray), "the configuration of the host refuses a spill space for GPUs"
    return WorkerSpill(SpillMemory(descriptor, setup.layout, setup.spill_blocks), memory)


def _weights_file(descriptors: Sequence[int]) -> WeightsFile | None:
    return WeightsFile(descriptors[0]) if descriptors else None


def _choose(setup: WorkerSetup, link: ServerLink) -> EngineChoice:
    """Choose the engine. Raises ModelError if no engine can compute the model as configured."""
    may_be_native = setup.attention_backend in ("auto", "native")
    if may_be_native and not native_problem(setup.card, setup.layout, setup.device) and has_to_be_built():
        text = "compiling the native engine, once per machine and version: about half a minute"
        link.put(WorkerProgress(setup.view.id, text))
    weights, attention = setup.precision.weights, setup.attention_backend
    choice = choose_engine(setup.card, setup.layout, device=setup.device, weights=weights, attention=attention)
    requests_max = setup.limits.requests_max
    return replace(choice, guest_cores=setup.guest_cores, sandbox=setup.sandbox, requests_max=requests_max)


def _load(
    setup: WorkerSetup,
    memory: memoryview | DeviceArray,
    link: ServerLink,
    crew: RankCrew | None,
    choice: EngineChoice,
) -> StepEngine:
    started_s = now_s()
    size_mib, precision = setup.card.weight_bytes / 2**20, setup.precision
    types = precision.dtype if precision.weights == "dense" else f"{precision.dtype}, {precision.weights} weights"
    link.put(WorkerProgress(setup.view.id, f"loading {setup.card.name} ({size_mib:.0f} MiB, {types}) on the {choice}"))
    engine = _engine(setup, memory, choice, crew)
    link.put(WorkerProgress(setup.view.id, f"loaded in {now_s() - started_s:.1f} s, warming up"))
    engine.warm_up()
    return engine


def _engine(
    setup: WorkerSetup, memory: memoryview | DeviceArray, choice: EngineChoice, crew: RankCrew | None
) -> StepEngine:
    card, layout = setup.card, setup.layout
    if crew is None:
        return load_engine(card, layout, memory, dtype=setup.precision.dtype, threads=setup.threads, choice=choice)
    threads, _ = rank_cores(setup, 0)
    computed = RankComputation(dtype=setup.precision.dtype, threads=threads, parallel=setup.parallel)
    engine = load_parallel_engine(card, layout, memory, crew, computed)
    return ConstrainedEngine(engine, card, setup.sandbox)


def _batcher(setup: WorkerSetup, choice: EngineChoice) -> Batcher:
    speculation = setup.speculation
    if speculation.tokens_max is None and choice.kind == "native":  # its texts are the same with drafts
        speculation = structs.replace(speculation, tokens_max=DRAFTED_TOKENS_MAX)
    return Batcher(
        setup.view,
        block_tokens=setup.layout.block_tokens,
        hash_tokens=setup.hash_tokens,
        limits=setup.limits,
        policies=BatcherPolicies(
            batching=load_plugin(setup.batching.use, setup.batching.options, expects=BatchingPolicy),
            fairness=load_plugin(setup.fairness.use, setup.fairness.options, expects=FairnessPolicy),
            cost=load_cost(setup.cost, folder=Path()).cost.on(setup.view.kind),
            speculation=speculation,
        ),
    )


def _watch(setup: WorkerSetup, engine: StepEngine, link: ServerLink) -> LayerWatch | None:
    """Return the watch for the step loop, or None if finished layers cannot be observed.

    On a GPU, the kernels of a layer may still run after their launch. Ranks finish a layer at different times.
    """
    if setup.device != "cpu" or setup.layout.ranks > 1:
        return None
    return LayerWatch(setup.view.id, engine.progress, setup.layout.layers, tell=link.put)


def _step_log(setup: WorkerSetup) -> StepLogWriter | None:
    if not setup.step_log:
        return None
    return StepLogWriter(Path(setup.step_log), setup.view.id, setup.log_bytes_max)


def _pin(setup: WorkerSetup) -> None:
    """Pin this process to its cores. In a parallel worker, this process is the first rank."""
    _, cores = rank_cores(setup, 0) if setup.card.format != "hash" else (0, setup.cores)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
