"""Run by test_triton_decode.py in a process of its own: count the launches of a step without a GPU.

A model decodes over CPU tensors with the kernels of a GPU, then computes a mixed step in each form. Triton's launches
are counted by a driver without a device, torch's by their operators; views and allocations launch nothing. Prints the
launches of one layer.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from baton.compute.models.open_model import open_model
from baton.compute.models.resolve import resolve_model
from baton.compute.torch.kernels.paged_decode import DecodeTables
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.layers.attention import PlannedStep
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.layers.tensor_loader import TensorLoader
from baton.compute.torch.load_torch import triton_kernels
from tests.dummies import small
from tests.unit.compute.triton_compile import Device

REQUESTS = 4
NO_LAUNCH = (
    "alias", "as_strided", "chunk", "detach", "empty", "expand", "permute", "select", "slice", "split", "squeeze",
    "t.", "transpose", "unsafe_view", "unsqueeze", "view",
)  # fmt: skip
"""Beginnings of the names of operators that launch nothing."""


class CountingDevice(Device):
    """Counts the launches of Triton's kernels."""

    def __init__(self) -> None:
        super().__init__(90)
        self.launched: list[str] = []

    def launcher_cls(self, source: object, metadata: object) -> object:
        name = source.fn.__name__  # type: ignore[attr-defined]
        return lambda *arguments: self.launched.append(name)


class CountedOperators(TorchDispatchMode):
    """Counts torch's operators that launch a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., object], types: Sequence[type], args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:  # fmt: skip
        name = str(func).removeprefix("aten.").removeprefix("_").removeprefix("new_")
        if not name.startswith(NO_LAUNCH):
            self.launched.append(name)
        return func(*args, **(kwargs or {}))


def launches(name: str, layers: int, device: CountingDevice) -> dict[str, list[str]]:
    """Return the launches of a model with this many layers: of a decode step, and of a mixed step in each form."""
    with tempfile.TemporaryDirectory() as folder:
        card = resolve_model(small(name, Path(folder), num_hidden_layers=layers, head_dim=64), "dummy")
        config, weights = open_model(card)
        layout = card.layout(block_tokens=16, dtype="bfloat16")
        kv = PagedKV(torch.zeros(layout.block_bytes * REQUESTS, dtype=torch.uint8), layout)
        kernels = triton_kernels(config, torch.bfloat16)
        loader = TensorLoader(weights, torch.bfloat16, torch.device("cpu"), kernels.row_product, kernels.ops)
        model = Decoder(config, loader)
    tables = DecodeTables(torch.arange(REQUESTS, dtype=torch.int32)[:, None], torch.ones(REQUESTS, dtype=torch.int32))
    zeros = torch.zeros(REQUESTS, dtype=torch.int32)
    slots = kv.decode_slots(zeros, tables.blocks, tables.lengths)
    step = PlannedStep(zeros, slots, kv, kernels.decode.plan(tables, kv))
    found = {"decode": counted(device, lambda: model.compute(zeros, model.attention.begin_decode(step)))}
    rows = [Row(0, 1, 0, torch.tensor([0])), Row(1, REQUESTS - 1, 0, torch.tensor([1]))]
    for form in ("triton", "fused"):
        backend = triton_kernels(config, torch.bfloat16, form).backend
        found[form] = counted(device, lambda: model.forward(zeros, rows, kv, backend))  # noqa: B023 (called at once)
    return found


def counted(device: CountingDevice, compute: Callable[[], object]) -> list[str]:
    """Return the sorted names of the launches of a computation."""
    device.launched.clear()
    with torch.inference_mode(), CountedOperators() as operators:
        compute()
    return sorted(device.launched + operators.launched)


def main() -> None:
    device = CountingDevice()
    triton.runtime.driver.set_active(device)
    for name in sys.argv[1:]:
        one, two = (launches(name, layers, device) for layers in (1, 2))
        for step, launched in two.items():
            for launch in one[step]:
                launched.remove(launch)
            print(f"{name} {step}: {len(launched)} {' '.join(launched)}")


if __name__ == "__main__":
    main()
