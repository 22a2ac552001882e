"""Small random models, and engines over arenas of plain memory, for the tests of engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import torch
import transformers

from baton.compute.load_engine import EngineChoice, choose_engine, load_engine
from baton.compute.models.card import ModelCard
from baton.compute.models.gguf_names import gguf_name
from baton.compute.models.open_model import read_config
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tensor_names import expected_shapes
from baton.compute.step_engine import StepEngine
from baton.decide.kv.layout import KVDtype
from tests.unit.compute.steps import GREEDY as GREEDY
from tests.unit.compute.steps import all_logprobs as all_logprobs
from tests.unit.compute.steps import generate as generate
from tests.unit.compute.steps import part_of as part_of
from tests.unit.compute.steps import run as run

VOCAB = 96

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}


def tiny_model(config: transformers.PretrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """Make a random model with random biases and norms."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    return model


def tiny_llama() -> transformers.PreTrainedModel:
    return tiny_model(transformers.LlamaConfig(**TINY, tie_word_embeddings=True))


def engine_of(
    card: ModelCard,
    *,
    blocks: int = 64,
    block_tokens: int = 4,
    kv_dtype: KVDtype = "float32",
    kind: Literal["torch", "native"] | None = None,
) -> tuple[StepEngine, bytearray]:
    """Load a model over a new arena, and return both. kind: the engine; None takes the server's choice."""
    layout = card.layout(block_tokens=block_tokens, dtype="uint8" if card.format == "hash" else kv_dtype)
    arena = bytearray(layout.block_bytes * blocks)
    choice = EngineChoice(kind="torch") if kind == "torch" else choose_engine(card, layout)
    assert kind in (None, choice.kind), choice.reason
    return load_engine(card, layout, memoryview(arena), threads=1, choice=choice), arena


def huggingface_logprobs(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)])).logits[0, :-1]
    return logits.float().log_softmax(-1).numpy()


def poison(arena: bytearray) -> None:
    """Fill an arena with NaN (0xFF is one in every float type)."""
    arena[:] = b"\xff" * len(arena)


# ---- GGUF --------------------------------------------------------------------------------------------------------


def write_gguf(
    model: transformers.PreTrainedModel, folder: Path, path: Path, *, rope_freqs: Sequence[float] | None = None
) -> None:
    """Write a Llama model as llama.cpp does: its names, and interleaved query and key rows. Values stay float32."""
    model.save_pretrained(folder)
    config = read_config(resolve_model(str(folder)))
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, model.config)
    tensors = model.state_dict()
    for name in expected_shapes(config):
        weight = tensors[name].numpy()
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
        if heads is not None:
            weight = weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(gguf_name(name).tensor, np.ascontiguousarray(weight))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, dtype=np.float32))
    close_gguf(writer)


def add_sizes(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)


def close_gguf(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
