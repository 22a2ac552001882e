"""The torch engine on a device that computes as late as it can, runs out of memory, or fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.compute.models.open_model import open_model
from baton.compute.models.resolve import resolve_model
from baton.compute.torch.engine import TorchEngine
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.layers.tensor_loader import TensorLoader
from baton.compute.torch.step_runner import EagerRunner
from baton.core.errors import DeviceError, StepMemoryError
from baton.core.step import Step
from baton.core.types import Sampling
from tests.unit.compute.models import VOCAB, engine_of, part_of, poison, run, tiny_llama

CPU = torch.device("cpu")
BLOCKS, BLOCK_TOKENS = 12, 4
PROMPT = [7, 3, 60, 41, 8, 22, 90, 5, 17, 33, 2]


class LaunchError(RuntimeError):
    """The host part of a step fails after some of its kernels were launched."""


@dataclass(slots=True)
class LateDevice:
    """Implements `StepRunner` and `KernelQueue`: a step's work is queued, and runs when its results are read."""

    eager: EagerRunner
    queued: list[Callable[[], object]] = field(default_factory=list)
    is_lost: bool = False
    launch_error: Exception | None = None

    def hidden(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        out = torch.full((len(tokens), self.eager.model.config.hidden), float("nan"))
        self.queued.append(lambda: out.copy_(self.eager.hidden(tokens, rows, kv)))
        if self.launch_error is not None:
            raise self.launch_error
        return out

    def logits(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        self.wait()
        return self.eager.logits(hidden, picked)

    def wait(self) -> None:
        if self.is_lost:
            raise DeviceError("device-side assert triggered")
        while self.queued:
            with torch.inference_mode():
                self.queued.pop(0)()


@pytest.fixture
def late(tmp_path: Path) -> tuple[TorchEngine, LateDevice, bytearray]:
    tiny_llama().save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    layout, (config, weights) = card.layout(block_tokens=BLOCK_TOKENS, dtype="float32"), open_model(card)
    arena = bytearray(layout.block_bytes * BLOCKS)
    poison(arena)
    with torch.inference_mode():
        model = Decoder(config, TensorLoader(weights, torch.float32, CPU))
    device = LateDevice(EagerRunner(model, SdpaBackend(), CPU))
    return TorchEngine(model, PagedKV(memoryview(arena), layout), device, CPU, queue=device), device, arena


def test_a_step_that_samples_nothing_returns_with_its_kv_written(
    late: tuple[TorchEngine, LateDevice, bytearray], tmp_path: Path
) -> None:
    """All chunks of a prompt, the last one too if a decode worker samples the first token."""
    engine, device, arena = late
    expected, reference = engine_of(resolve_model(str(tmp_path)), blocks=BLOCKS, kind="torch")
    poison(reference)
    for start, end in ((0, 6), (6, len(PROMPT))):
        part = part_of(PROMPT, [4, 9, 1], start=start, end=end, sample=False)
        assert run(engine, part)[0].token is None
        assert run(expected, part)[0].token is None
        assert not device.queued
        assert arena == reference


def test_prompt_logprobs_and_tokens_are_those_of_an_early_device(
    late: tuple[TorchEngine, LateDevice, bytearray], tmp_path: Path
) -> None:
    engine, _, _ = late
    expected, _ = engine_of(resolve_model(str(tmp_path)), blocks=BLOCKS, kind="torch")
    options = Sampling(temperature=0.0, top_logprobs=2, prompt_logprobs=True)
    part = part_of(PROMPT, [4, 9, 1], sampling=options)
    assert run(engine, part) == run(expected, part)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore lines"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["torch", "triton", "cublas", "cpu", "python"],
)
def test_a_step_without_memory_is_refused_and_the_next_one_runs(
    late: tuple[TorchEngine, LateDevice, bytearray], error: Exception
) -> None:
    """No kernel of the refused step is left, and the error names the settings."""
    engine, device, _ = late
    device.launch_error = error
    step = Step((part_of(PROMPT, [4, 9, 1], end=6, sample=False),))
    with pytest.raises(
        StepMemoryError, match=r"step of 6 tokens in 1 requests .* lower batch.step_tokens_max"
    ) as raised:
        engine.execute(step)
    assert "\n" not in str(raised.value)
    assert not device.queued
    device.launch_error = None
    engine.execute(step)


def test_a_failed_allocation_behind_another_error_counts(late: tuple[TorchEngine, LateDevice, bytearray]) -> None:
    """CUDA ends a graph capture with an error of its own."""
    engine, device, _ = late
    hidden = RuntimeError("operation failed due to a previous error during capture")
    hidden.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    device.launch_error = hidden
    with pytest.raises(StepMemoryError, match="CUDA out of memory"):
        engine.execute(Step((part_of(PROMPT, [4, 9, 1], end=6, sample=False),)))


@pytest.mark.parametrize("fails", [False, True], ids=["cancelled", "failed"])
def test_no_kernel_of_an_ended_request_writes_to_blocks_of_the_next(
    late: tuple[TorchEngine, LateDevice, bytearray], fails: bool
) -> None:
    """The pool gives the blocks of a cancelled or failed prompt to another request, which fills them."""
    engine, device, arena = late
    device.launch_error = LaunchError("a bug") if fails else None
    step = Step((part_of(PROMPT, [4, 9, 1], end=6, sample=False),))
    if fails:
        with pytest.raises(LaunchError):
            engine.execute(step)
    else:
        engine.execute(step)
    size = engine.layout.block_bytes
    arena[4 * size : 5 * size] = b"\x07" * size
    device.wait()
    assert arena[4 * size : 5 * size] == b"\x07" * size


def test_a_lost_device_is_reported_instead_of_the_error_that_hides_it(
    late: tuple[TorchEngine, LateDevice, bytearray],
) -> None:
    engine, device, _ = late
    device.is_lost = True
    device.launch_error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(DeviceError, match="device-side assert"):
        engine.execute(Step((part_of(PROMPT, [4, 9, 1], end=6, sample=False),)))


def test_a_token_outside_of_the_vocabulary_is_refused_before_a_launch(
    late: tuple[TorchEngine, LateDevice, bytearray],
) -> None:
    """On a GPU it would be a device assert, which ends the worker and every request on it."""
    engine, device, _ = late
    for token in (-1, VOCAB):
        with pytest.raises(ValueError, match=rf"token {token} of request r is no id of the vocabulary \(0 to 95\)"):
            engine.execute(Step((part_of([5, token], [0], sample=False),)))
    assert not device.queued
