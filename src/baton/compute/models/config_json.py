"""Read a model's configuration from a Hugging Face folder: config.json, and stop tokens of generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from baton.compute.models.config_experts import DEEPSEEK, read_experts, read_latent
from baton.compute.models.json_file import read_json
from baton.compute.models.model_config import (
    ARCHITECTURES,
    LAYERS_MAX,
    SIZE_MAX,
    ModelConfig,
    RopeScaling,
    check_config,
)
from baton.core.errors import ModelError

Json = Mapping[str, Any]


class _Config(Struct, kw_only=True):
    """The keys of config.json that Baton reads, in old and new spellings. Other keys are ignored."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    architectures: list[str] | None = None
    model_type: str = ""
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qkv_bias: bool = True
    mlp_bias: bool = False
    use_sliding_window: bool | None = None
    sliding_window: int | None = None
    max_window_layers: int | None = None
    layer_types: list[str] | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | list[int] | None = None
    partial_rotary_factor: float = 1.0
    quantization_config: dict[str, Any] | None = None


def read_config_json(folder: Path) -> ModelConfig:
    """Return the model's configuration. Raises ModelError for an architecture or option that Baton does not support."""
    raw = _read_json(folder / "config.json")
    try:
        return check_config(folder / "config.json", _model_config(folder, raw, msgspec.convert(raw, _Config)))
    except msgspec.ValidationError as error:
        names = raw.get("architectures")
        known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else None
        _architecture(folder, known, str(raw.get("model_type", "")))
        raise ModelError(f"{folder / 'config.json'}: {error}; use the file that came with the model") from error
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} lacks {error}; use the file that came with the model") from error
    except (TypeError, ValueError, ArithmeticError) as error:  # a number that is text, zero, or out of range
        raise ModelError(
            f"{folder / 'config.json'} has an impossible value: {error}; use the file that came with the model"
        ) from error


def _model_config(folder: Path, raw: Json, config: _Config) -> ModelConfig:
    architecture = _architecture(folder, config.architectures, config.model_type)
    _refuse_unsupported(folder, config)
    rope, context_tokens = _rope(folder, config)
    latent = read_latent(folder / "config.json", raw, architecture, _score_temperature(config))
    return ModelConfig(
        architecture=architecture,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=1 if latent else config.num_key_value_heads or config.num_attention_heads,
        head_dim=latent.kv_rank + latent.rope_dim if latent else config.head_dim or _head_dim(architecture, config),
        intermediate=config.intermediate_size,
        vocab_tokens=config.vocab_size,
        rms_eps=config.rms_norm_eps,
        rope_theta=_rope_theta(config),
        rope=rope,
        context_tokens=context_tokens,
        tied_embeddings=config.tie_word_embeddings,
        qkv_bias=_qkv_bias(architecture, config),
        o_bias=architecture in ("llama", "qwen3", "qwen3moe", *DEEPSEEK) and config.attention_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=architecture in ("qwen3", "qwen3moe"),
        windows=_windows(architecture, config),
        eos_token_ids=_eos_token_ids(folder, config),
        bos_token_id=config.bos_token_id if isinstance(config.bos_token_id, int) else None,
        experts=read_experts(folder / "config.json", raw, architecture, config.num_hidden_layers),
        latent=latent,
    )


def _qkv_bias(architecture: str, config: _Config) -> bool:
    match architecture:
        case "qwen2":
            return True
        case "qwen2moe":
            return config.qkv_bias
        case _:
            return config.attention_bias


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"{path} is missing; a model folder holds config.json and *.safetensors")
    return read_json(path, dict[str, Any])


def _architecture(folder: Path, names: list[str] | None, model_type: str) -> str:
    for name in names or ():
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and model_type in ARCHITECTURES.values():
        return model_type
    found = ", ".join(names or ()) or model_type or "none"
    raise ModelError(f"{folder} has the architecture {found[:200]}; Baton serves {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(folder: Path, config: _Config) -> None:
    where = folder / "config.json"
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "unknown")
        raise ModelError(
            f"{where}: weights quantized by {method} are not supported; use the original checkpoint or a GGUF file"
        )
    if config.hidden_act != "silu":
        raise ModelError(f"{where}: hidden_act is {config.hidden_act}; Baton computes silu")
    if config.partial_rotary_factor != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor is {config.partial_rotary_factor}; Baton rotates whole heads")
    sizes = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.vocab_size)
    layers_fit = config.num_hidden_layers <= LAYERS_MAX
    if (
        not layers_fit
        or min(sizes) <= 0
        or config.num_attention_heads % (config.num_key_value_heads or config.num_attention_heads)
    ):
        raise ModelError(
            f"{where}: sizes do not fit: {config.num_attention_heads} heads, {config.num_key_value_heads} KV heads, "
            f"hidden size {config.hidden_size}, {config.num_hidden_layers} layers; use the model's own file"
        )


def _head_dim(architecture: str, config: _Config) -> int:
    return 128 if architecture in ("qwen3", "qwen3moe") else config.hidden_size // config.num_attention_heads


def _rope_theta(config: _Config) -> float:
    value = (config.rope_parameters or {}).get("rope_theta", config.rope_theta)
    return 10_000.0 if value is None else float(value)


def _rope(folder: Path, config: _Config) -> tuple[RopeScaling, int]:
    """Return the rope scaling, and the context length (in tokens) that the model supports with it."""
    options: Json = config.rope_parameters or config.rope_scaling or {}
    kind = options.get("rope_type", options.get("type", "default"))
    context_tokens = config.max_position_embeddings
    original = int(options.get("original_max_position_embeddings") or context_tokens)
    match kind:
        case "default":
            return RopeScaling(), context_tokens
        case "linear":
            return RopeScaling(kind="linear", factor=float(options["factor"])), context_tokens
        case "dynamic":
            # Dynamic scaling changes frequencies with the length of the request, so cached keys would be wrong past the
            # original context. Up to that length there is no scaling.
            return RopeScaling(), min(original, context_tokens)
        case "llama3":
            scaling = RopeScaling(
                kind="llama3",
                factor=float(options["factor"]),
                low_freq_factor=float(options["low_freq_factor"]),
                high_freq_factor=float(options["high_freq_factor"]),
                original_context_tokens=original,
            )
            return scaling, context_tokens
        case "yarn":
            return _yarn(options, original, context_tokens), context_tokens
        case _:
            raise ModelError(f"{folder}: rope scaling {kind}; Baton computes default, linear, dynamic, llama3 and yarn")


def _yarn(options: Json, original: int, context_tokens: int) -> RopeScaling:
    factor = float(options.get("factor") or context_tokens / original)
    attention_factor = options.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, options.get("mscale"), options.get("mscale_all_dim"))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context_tokens=original,
        beta_fast=float(options.get("beta_fast") or 32.0),
        beta_slow=float(options.get("beta_slow") or 1.0),
        attention_factor=float(attention_factor),
        truncate=bool(options.get("truncate", True)),
    )


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Return the factor on cosine and sine. Source: YaRN (arXiv 2309.00071), section 3.4."""
    if mscale and mscale_all_dim:
        return _temperature(factor, mscale) / _temperature(factor, mscale_all_dim)
    return _temperature(factor, 1.0)


def yarn_score_temperature(factor: float, mscale_all_dim: float) -> float:
    """Return DeepSeek's factor on attention scores: its yarn scales these, instead of cosine and sine."""
    return _temperature(factor, mscale_all_dim) ** 2 if mscale_all_dim else 1.0


def _temperature(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _score_temperature(config: _Config) -> float:
    options: Json = config.rope_parameters or config.rope_scaling or {}
    if options.get("rope_type", options.get("type", "default")) == "default":
        return 1.0
    return yarn_score_temperature(float(options.get("factor") or 1.0), float(options.get("mscale_all_dim") or 0.0))


def _windows(architecture: str, config: _Config) -> tuple[int | None, ...]:
    layers, window = config.num_hidden_layers, config.sliding_window
    if window is None or architecture in ("llama", *DEEPSEEK):
        return (None,) * layers
    if architecture in ("mistral", "mixtral"):
        return (window,) * layers
    if not config.use_sliding_window:
        return (None,) * layers
    if architecture == "qwen3moe":
        return (window,) * layers
    if config.layer_types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types[:layers])
    first = 28 if config.max_window_layers is None else config.max_window_layers
    return tuple(window if layer >= first else None for layer in range(layers))


def _eos_token_ids(folder: Path, config: _Config) -> tuple[int, ...]:
    """Return the stop tokens of both files: many chat models name the end of a turn in generation_config.json only."""
    ids = _as_ids(config.eos_token_id)
    path = folder / "generation_config.json"
    if path.exists():
        ids += _as_ids(_read_json(path).get("eos_token_id"))
    return tuple(dict.fromkeys(ids))


def _as_ids(value: object) -> list[int]:
    items: list[object] = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, int) and 0 <= item < SIZE_MAX]
