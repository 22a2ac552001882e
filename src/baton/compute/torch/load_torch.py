"""Load a torch engine: configuration, weights, kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.compute.attention_choice import TRITON_FORMS, flex_problem
from baton.compute.decode_sizes import BATCH_BUCKETS
from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.open_model import open_model
from baton.compute.torch.engine import TorchEngine
from baton.compute.torch.kernels import e4m3
from baton.compute.torch.kernels.attention_backend import AttentionBackend
from baton.compute.torch.kernels.expert_rows import RowProduct
from baton.compute.torch.kernels.flex import FlexBackend
from baton.compute.torch.kernels.fp8_linear import check_fp8
from baton.compute.torch.kernels.jagged import JaggedBackend
from baton.compute.torch.kernels.layer_ops import LayerOps
from baton.compute.torch.kernels.paged_decode import DecodeKernel
from baton.compute.torch.kernels.paged_kv import TORCH_DTYPES, PagedKV
from baton.compute.torch.kernels.reference import ReferenceBackend
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.layers.tensor_loader import TensorLoader
from baton.compute.torch.step_runner import CudaCapture, EagerRunner, FlexRunner, GraphRunner
from baton.core.config import WeightsChoice
from baton.core.errors import ModelError
from baton.decide.kv.layout import SCALED, KVLayout
from baton.move.arena.cuda import DeviceArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchComputation:
    """The precision, device and attention of a torch engine."""

    dtype: Dtype
    """Type to compute in."""
    threads: int
    device: str
    attention: str = ""
    """Name of the attention backend. Empty: that of the device."""
    weights: WeightsChoice = "dense"
    """Format of the layers' weights: dense or fp8."""
    spill: memoryview | None = None
    """Memory of the spill space, for the backend `sdpa` on a CPU. None: there is none."""
    requests_max: int = BATCH_BUCKETS[-1]
    """The most requests of a step. More graphs are not captured."""


def load_torch_engine(
    card: ModelCard,
    layout: KVLayout,
    memory: memoryview | DeviceArray | Tensor,
    computation: TorchComputation,
) -> TorchEngine:
    """Load a model for torch, on a CPU or a GPU, and bind it to an arena.

    memory: the arena's bytes, in device memory if the computation is on a GPU.
    Raises ModelError where the model, the arena, the device and the attention backend do not fit together.
    """
    check_layout(card, layout)
    torch.set_num_threads(computation.threads)
    target, weight_form = torch.device(computation.device), computation.weights
    kv = PagedKV(on_device(memory, target), layout)
    if computation.spill is not None:
        kv.use_spill(computation.spill)
    if weight_form == "fp8":
        check_fp8(target)
    number, (config, weights) = TORCH_DTYPES[computation.dtype], open_model(card)
    name = computation.attention or ("triton" if target.type == "cuda" else "sdpa")
    if name not in TRITON_FORMS:
        backend = plain_backend(name, layout, computation)
        with torch.inference_mode():
            model = Decoder(config, TensorLoader(weights, number, target, weights=weight_form))
        is_flex = isinstance(backend, FlexBackend)
        runner = FlexRunner(model, backend, kv, target) if is_flex else EagerRunner(model, backend, target)
        return TorchEngine(model, kv, runner, target)
    kernels = triton_kernels(config, number, name)
    with torch.inference_mode():
        loader = TensorLoader(weights, number, target, kernels.row_product, kernels.ops, weight_form)
        model = Decoder(config, loader)
    eager = EagerRunner(model, kernels.backend, target)
    sizes = card.context_tokens, computation.requests_max
    return TorchEngine(model, kv, GraphRunner(eager, kv, kernels.decode, CudaCapture(), *sizes), target)


def on_device(memory: memoryview | DeviceArray | Tensor, device: torch.device) -> memoryview | Tensor:
    """Return an arena's bytes in a form that torch can use on this device. A GPU becomes the current device.

    Raises ModelError if torch cannot compute on the device, or the arena lies in other memory.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            f"torch {torch.__version__} finds no CUDA device, and the arena lies on {device}; use --device cpu"
        )
    if device.type != "cpu" and isinstance(memory, memoryview):
        raise ModelError(f"the arena lies in host memory, which an engine on {device} cannot use; set device to cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device, even if its tensors are on another
    return torch.as_tensor(memory, device=device) if isinstance(memory, DeviceArray) else memory


def plain_backend(name: str, layout: KVLayout, computation: TorchComputation) -> AttentionBackend:
    """Return a backend without Triton kernels. Raises ModelError if it cannot compute with this arena."""
    plain: dict[str, AttentionBackend] = {
        "sdpa": SdpaBackend(),
        "jagged": JaggedBackend(),
        "reference": ReferenceBackend(),
    }
    if name in plain:
        return plain[name]
    if refusal := flex_problem(layout, computation.device, computation.dtype):
        raise ModelError(refusal)
    return FlexBackend()


def check_layout(card: ModelCard, layout: KVLayout) -> None:
    """Raise ModelError if the arena's layout does not fit this model, or has a type that torch cannot write."""
    if layout.dtype in SCALED and layout.dtype != "fp8":
        raise ModelError(
            f"the torch engine has no KV cache in {layout.dtype}, only the native one has; use --kv-dtype fp8"
        )
    if layout.dtype == "fp8" and layout.head_dim % e4m3.SCALE_BYTES:
        raise ModelError(
            f"the torch engine reads fp8 scales at multiples of {e4m3.SCALE_BYTES} bytes, and heads have "
            f"{layout.head_dim} numbers; use --kv-dtype bfloat16"
        )
    wanted = card.layout(
        block_tokens=layout.block_tokens,
        dtype=layout.dtype,
        tensor_parallel=layout.tensor_parallel,
        pipeline_parallel=layout.pipeline_parallel,
        context_parallel=layout.context_parallel,
        data_parallel=layout.data_parallel,
    )
    if layout != wanted or layout.dtype == "uint8":
        raise ModelError(
            f"the arena's layout ({layout.layers} layers, {layout.kv_heads} KV heads of {layout.head_dim}, "
            f"{layout.dtype}) does not hold {card.name} ({card.layers} layers, {card.kv_heads} KV heads of "
            f"{card.head_dim}); start both workers with the same model and --kv-dtype"
        )


@dataclass(frozen=True, slots=True)
class DeviceKernels:
    """The kernels of a GPU."""

    backend: AttentionBackend
    decode: DecodeKernel
    """Attention of the decode steps that CUDA graphs replay."""
    row_product: RowProduct
    ops: LayerOps


def triton_kernels(config: ModelConfig, dtype: torch.dtype, name: str = "triton") -> DeviceKernels:
    """Return Triton's kernels for a model. name: see TRITON_FORMS. Raises ModelError if triton is not installed."""
    try:
        from baton.compute.triton.fused import FusedBackend, ticket_pools
        from baton.compute.triton.launch import TritonBackend, TritonDecodeKernel, TritonRowProduct
        from baton.compute.triton.layer_ops import TritonOps
        from baton.compute.triton.persistent import PersistentDecodeKernel, resident_programs
    except ImportError as error:
        raise ModelError(
            "decoding on CUDA needs triton, which CUDA builds of PyTorch bring along; install it: pip install triton"
        ) from error
    rope_dim = config.latent.rope_dim if config.latent is not None else 0
    if name == "persistent":
        kernel = PersistentDecodeKernel(products=dtype, rope_dim=rope_dim, programs=resident_programs())
    else:
        kernel = TritonDecodeKernel(products=dtype, rope_dim=rope_dim)
    is_fused = name == "fused"
    backend = FusedBackend(kernel, resident_programs(), ticket_pools()) if is_fused else TritonBackend(kernel)
    return DeviceKernels(backend, kernel, TritonRowProduct(), TritonOps())
