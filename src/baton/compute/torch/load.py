"""Load a torch engine: configuration, weights, kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.weights import open_model
from baton.compute.torch.engine import TorchEngine
from baton.compute.torch.kernels.backend import AttentionBackend
from baton.compute.torch.kernels.paged import TORCH_DTYPES, PagedKV
from baton.compute.torch.kernels.paged_decode import DecodeKernel
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.layers.loader import Loader
from baton.compute.torch.step_runner import CudaCapture, EagerRunner, GraphRunner
from baton.core.errors import ModelError
from baton.decide.kv.layout import SCALE_BYTES, KVLayout
from baton.move.arena.cuda import DeviceArray


def load_torch_engine(
    card: ModelCard,
    layout: KVLayout,
    memory: memoryview | DeviceArray | Tensor,
    *,
    dtype: Dtype,
    threads: int,
    device: str,
) -> TorchEngine:
    """See `load_engine`. An engine on a GPU needs an arena there: `memory` as a tensor of bytes on its device."""
    check_layout(card, layout)
    torch.set_num_threads(threads)
    target = torch.device(device)
    memory = on_device(memory, target)
    number, (config, weights) = TORCH_DTYPES[dtype], open_model(card)
    if target.type == "cuda":
        return _on_cuda(config, Loader(weights, number, target), memory, layout)
    with torch.inference_mode():
        model = Decoder(config, Loader(weights, number, target))
    return TorchEngine(model, PagedKV(memory, layout), EagerRunner(model, SdpaBackend(), target), target)


def on_device(memory: memoryview | DeviceArray | Tensor, device: torch.device) -> memoryview | Tensor:
    """Take over an arena's bytes where they lie, and make that GPU the current one. See `load_torch_engine`.

    Raises ModelError where they cannot be computed on there.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            f"torch {torch.__version__} finds no CUDA device, and the arena lies on {device}; use --device cpu"
        )
    if device.type != "cpu" and isinstance(memory, memoryview):
        raise ModelError(f"the arena lies in host memory, which an engine on {device} cannot use; set device to cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device, whatever its tensors are on
    return torch.as_tensor(memory, device=device) if isinstance(memory, DeviceArray) else memory


def check_layout(card: ModelCard, layout: KVLayout) -> None:
    """Raise ModelError for an arena that this model does not fit, or that torch cannot write."""
    if layout.dtype in SCALE_BYTES:
        raise ModelError(
            f"the torch engine has no KV cache in {layout.dtype}, only the native one has; use --kv-dtype bfloat16"
        )
    wanted = card.layout(
        block_tokens=layout.block_tokens,
        dtype=layout.dtype,
        tensor_parallel=layout.tensor_parallel,
        pipeline_parallel=layout.pipeline_parallel,
    )
    if layout != wanted or layout.dtype == "uint8":
        raise ModelError(
            f"the arena's layout ({layout.layers} layers, {layout.kv_heads} KV heads of {layout.head_dim}, "
            f"{layout.dtype}) does not hold {card.name} ({card.layers} layers, {card.kv_heads} KV heads of "
            f"{card.head_dim}); start both workers with the same model and --kv-dtype"
        )


def triton_attention(config: ModelConfig, loader: Loader) -> tuple[AttentionBackend, DecodeKernel]:
    """Return the kernels of a GPU, and give the loader the one for experts. Raises ModelError without triton."""
    try:
        from baton.compute.triton.decode import TritonBackend, TritonDecodeKernel
        from baton.compute.triton.experts import TritonRowProduct
    except ImportError as error:
        raise ModelError(
            "decoding on CUDA needs triton, which CUDA builds of PyTorch bring along; install it: pip install triton"
        ) from error
    loader.row_product = TritonRowProduct()
    rope_dim = config.latent.rope_dim if config.latent is not None else 0
    kernel = TritonDecodeKernel(products=loader.dtype, rope_dim=rope_dim)
    return TritonBackend(kernel), kernel


def _on_cuda(config: ModelConfig, loader: Loader, memory: memoryview | Tensor, layout: KVLayout) -> TorchEngine:
    """Decode with Triton's kernels, replayed as CUDA graphs."""
    backend, kernel = triton_attention(config, loader)
    with torch.inference_mode():
        model = Decoder(config, loader)
    kv = PagedKV(memory, layout)
    eager = EagerRunner(model, backend, loader.device)
    return TorchEngine(model, kv, GraphRunner(eager, kv, kernel, CudaCapture()), loader.device)
