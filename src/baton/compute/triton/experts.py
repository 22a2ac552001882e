"""Launch the Triton kernel that multiplies rows with their experts' weights."""

from __future__ import annotations

from torch import Tensor

from baton.compute.triton.kernels import expert_rows_kernel

OUTPUTS, INPUTS = 32, 128
"""Numbers of a matrix that one program reads at a time: 32 rows of it, 128 each."""


class TritonRowProduct:
    """See `RowProduct`."""

    def __call__(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        rows, experts = rows.contiguous(), experts.contiguous()
        _, outputs, inputs = weights.shape
        out = rows.new_empty((len(experts), outputs))
        expert_rows_kernel[(len(experts), -(-outputs // OUTPUTS))](
            rows, weights, experts, out, inputs, outputs, len(experts) // len(rows), OUTPUTS=OUTPUTS, INPUTS=INPUTS
        )
        return out
