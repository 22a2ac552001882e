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
from baton.core.step import Slice, SliceResult, Step
from baton.core.types import BlockId, RequestId, Sampling
from baton.decide.kv.layout import KVDtype

VOCAB = 96
GREEDY = Sampling(temperature=0.0)

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


def part_of(
    tokens: Sequence[int], table: Sequence[int], *, start: int = 0, end: int | None = None, **options: object
) -> Slice:
    """Build the slice [start, end) of a request. It samples if it contains the last token."""
    end = len(tokens) if end is None else end
    values: dict[str, object] = {
        "request_id": RequestId("r"),
        "sampling": GREEDY,
        "prompt_tokens": len(tokens),
        "sample": end == len(tokens),
        **options,
    }
    return Slice(
        tokens=tokens, start=start, count=end - start, block_table=[BlockId(block) for block in table], **values
    )


def run(engine: StepEngine, *parts: Slice) -> list[SliceResult]:
    return list(engine.execute(Step(parts)).slices)


def generate(
    engine: StepEngine, prompt: Sequence[int], table: Sequence[int], count: int, sampling: Sampling = GREEDY
) -> list[int]:
    """Generate `count` tokens of one request."""
    tokens = list(prompt)
    start = 0
    while len(tokens) < len(prompt) + count:
        part = part_of(tokens, table, start=start, sampling=sampling, prompt_tokens=len(prompt))
        token = run(engine, part)[0].token
        assert token is not None
        start = len(tokens)
        tokens.append(token)
    return tokens[len(prompt) :]


def all_logprobs(engine: StepEngine, tokens: Sequence[int], table: Sequence[int], vocab: int) -> np.ndarray:
    """Return the log probabilities of the whole vocabulary after every token but the last: [tokens - 1, vocab]."""
    sampling = Sampling(temperature=0.0, top_logprobs=vocab, prompt_logprobs=True)
    result = run(engine, part_of(tokens, table, sampling=sampling))[0]
    rows = np.full((len(tokens) - 1, vocab), np.nan)
    for row, entry in zip(rows, result.prompt_logprobs, strict=True):
        for token, logprob in entry.top:
            row[token] = logprob
    return rows


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
