"""LoRA adapters in the format of PEFT: check their files, and add them to the weights of their base model.

The sum is made once, when the engine loads the weights, so a step with an adapter costs what a step of the base model
costs. Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from baton.compute.models.bfloat16 import to_float32
from baton.compute.models.json_file import read_json
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.quantized import QuantizedMatrix
from baton.compute.models.safetensors_file import SafetensorsWeights, read_tensors
from baton.compute.models.tensor_names import expected_shapes
from baton.compute.models.weights import TensorSlice, WeightReader
from baton.core.errors import ModelError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT puts this before the name of every tensor."""
RANK_MAX = 4096
PIECE_ROWS = 1024
"""Rows of a matrix that are added at a time: their float64 products stay small beside the matrix."""


class _AdapterConfig(msgspec.Struct):
    """The keys of `adapter_config.json` that change the result. Others are ignored."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, Any] | None = None
    alpha_pattern: dict[str, Any] | None = None

    def problem(self) -> str:
        """Return what Baton cannot compute of this adapter. Empty: nothing."""
        if self.peft_type != "LORA":
            return f"it is of the type {self.peft_type!r}"
        if not 1 <= self.r <= RANK_MAX or not math.isfinite(self.lora_alpha):
            return f"its rank is {self.r} and its alpha {self.lora_alpha}"
        if self.use_dora:
            return "it uses DoRA"
        if self.fan_in_fan_out:
            return "its weights are transposed (fan_in_fan_out)"
        if self.bias != "none":
            return f"it trains biases ({self.bias})"
        if self.modules_to_save:
            return f"it replaces whole modules ({', '.join(self.modules_to_save)[:200]})"
        if self.rank_pattern or self.alpha_pattern:
            return "its ranks or alphas differ by module (rank_pattern, alpha_pattern)"
        return ""

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The files of a checked adapter."""

    folder: Path
    scale: float
    """Factor of the product of an adapter's two matrices."""
    pairs: Mapping[str, tuple[str, str]]
    """The adapter's matrices A [rank, inputs] and B [rows, rank], by the name of the base model's tensor."""


def read_adapter(folder: Path, base: ModelConfig) -> Adapter:
    """Return the adapter in a folder. Reads headers only.

    Raises ModelError if files are missing, if they are not of this base model, or need what Baton cannot compute.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} holds no {name}; name the folder of a LoRA adapter that PEFT has saved")
    config = read_json(folder / CONFIG_FILE, _AdapterConfig)
    if problem := config.problem():
        raise ModelError(
            f"the adapter {folder} cannot be served: {problem}; merge it into its base model "
            "(`merge_and_unload()` of PEFT) and serve that folder"
        )
    shapes = {name: tensor.shape for name, tensor in read_tensors(folder / WEIGHTS_FILE).items()}
    return Adapter(folder, config.scale, dict(_pairs(folder, shapes, expected_shapes(base), config.r)))


def _pairs(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], targets: Mapping[str, tuple[int, ...]], rank: int
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each adapted tensor of the base model with the names of its two matrices."""
    for name in sorted(shapes):
        module, found, _ = name.removeprefix(PREFIX).partition(".lora_A.weight")
        if not found:
            if not name.endswith(".lora_B.weight") or name.replace(".lora_B.", ".lora_A.") not in shapes:
                raise ModelError(f"{folder}: tensor {name} is no lora_A or lora_B matrix of a linear layer")
            continue
        other, target = name.replace(".lora_A.", ".lora_B."), f"{module}.weight"
        wanted = targets.get(target)
        if wanted is None or len(wanted) != 2:
            raise ModelError(
                f"{folder} adapts {module}, which is no linear layer of the base model; "
                "serve the adapter with the model that it was trained on"
            )
        rows, inputs = wanted
        if shapes[name] != (rank, inputs) or shapes.get(other) != (rows, rank):
            raise ModelError(
                f"{folder}: the matrices of {module} have shapes {list(shapes[name])} and "
                f"{list(shapes.get(other, ()))}, its base model needs {[rank, inputs]} and {[rows, rank]}; "
                "serve the adapter with the model that it was trained on"
            )
        yield target, (name, other)


class AdaptedWeights:
    """The weights of a base model with an adapter added: W + scale * B A. Implements `WeightReader`."""

    def __init__(self, base: WeightReader, adapter: Adapter) -> None:
        self._base = base
        self._adapter = adapter
        self._matrices = SafetensorsWeights(read_tensors(adapter.folder / WEIGHTS_FILE))

    def read(self, name: str, part: TensorSlice | None = None) -> np.ndarray:
        """Return one tensor, or a part of it. Adapted matrices are float32."""
        stored = self._base.read(name, part)
        if name not in self._adapter.pairs:
            return stored
        first, second = (to_float32(self._matrices.read(each)) for each in self._adapter.pairs[name])
        if part is not None and part.dimension == 0:
            second = second[part.index]
        elif part is not None:
            first = first[part.index]
        # Float64 makes the sum, after rounding, independent of the machine and of the part that a rank reads.
        down = first.astype(np.float64) * self._adapter.scale
        whole = np.array(to_float32(stored))
        for start in range(0, len(whole), PIECE_ROWS):
            rows = slice(start, start + PIECE_ROWS)
            whole[rows] = whole[rows] + second[rows].astype(np.float64) @ down
        return whole

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        """Return None for an adapted matrix: the codes of the file stand for the weights without the adapter."""
        return None if name in self._adapter.pairs else self._base.read_quantized(name)


def adapter_digest(folder: Path) -> bytes:
    """Return a digest of an adapter's files. Raises ModelError if they cannot be read."""
    digest = blake2b(digest_size=16)
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            with (folder / name).open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
    except OSError as error:
        raise ModelError(f"cannot read the adapter {folder}: {error}") from error
    return digest.digest()
