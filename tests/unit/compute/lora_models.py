"""Random LoRA adapters of the small models, in PEFT's format, and the same weights merged by hand."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

RANK = 4
ALPHA = 6.0
MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")


def write_adapter(
    folder: Path, base: Path, *, modules: Sequence[str] = MODULES, seed: int = 0, **config: object
) -> Path:
    """Write a random adapter of a model in a folder with safetensors, and return its folder."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith(tuple(f"{module}.weight" for module in modules)):
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, weight.shape[1])
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(weight.shape[0], RANK) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **config}
    (folder / "adapter_config.json").write_bytes(msgspec.json.encode(values))
    return folder


def merge_adapter(target: Path, base: Path, adapter: Path, scale: float = ALPHA / RANK) -> Path:
    """Write the base model with the adapter added by torch, and return its folder."""
    shutil.copytree(base, target)
    weights, matrices = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, down in matrices.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = matrices[name.replace(".lora_A.", ".lora_B.")]
            weights[f"{module}.weight"] += scale * up @ down
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target
