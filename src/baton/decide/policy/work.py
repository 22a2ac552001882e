"""What a worker has to do: whom it decodes for, and what prompts add to its steps."""

from __future__ import annotations

from msgspec import Struct

from baton.core.ports import CostModel
from baton.core.types import StepShape, WorkerView

_EMPTY = StepShape()


def decodes(worker: WorkerView) -> int:
    """Count the requests that are past their prompt on this worker, as far as is known."""
    running, queued = worker.running_requests, worker.queued_requests
    return running - queued if running > queued else 0


class PromptWork(Struct, frozen=True, gc=False):
    """Prompts to compute."""

    tokens: int
    alone_s: float
    """What they add to steps that are run anyway: beside decodes, no step is run for them."""


def prompt_work(tokens: int, cached_tokens: int, model: CostModel) -> PromptWork:
    """Predict the work of a prompt of so many tokens behind `cached_tokens` that need none."""
    if tokens <= 0:
        return PromptWork(0, 0.0)
    alone_s = model.prefill_s(new_tokens=tokens, cached_tokens=cached_tokens) - model.step_s(_EMPTY)
    return PromptWork(tokens, alone_s)


def queued_work(worker: WorkerView, model: CostModel) -> PromptWork:
    """Predict the work of the prompts that wait there, as if all were as long."""
    prompts = max(1, worker.queued_requests)
    one = prompt_work(max(1, worker.queued_tokens // prompts), 0, model)
    return PromptWork(worker.queued_tokens, prompts * one.alone_s)
