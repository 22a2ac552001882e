"""Write the embedded model's weights in every format of the peers, rounded to bfloat16 in all of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from baton.compute.models.resolve import resolve_model

NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "blk.": "layers.",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
KINDS = {"bfloat16": gguf.GGMLQuantizationType.BF16, "int8": gguf.GGMLQuantizationType.Q8_0}


def write_folder(folder: Path) -> Path:
    """Write a Hugging Face folder: bfloat16 safetensors, config.json and the tokenizer's files."""
    if (folder / "tokenizer.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(resolve_model("smollm2-135m").path)
    reader = gguf.GGUFReader(source)
    config = _config_json(reader)
    tensors = {_hugging_face_name(tensor.name): _values(tensor, config) for tensor in reader.tensors}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    return folder


def _config_json(reader: gguf.GGUFReader) -> dict[str, Any]:
    fields = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["embedding_length"],
        "intermediate_size": fields["feed_forward_length"],
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": fields["attention.head_count"],
        "num_key_value_heads": fields["attention.head_count_kv"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["rope.freq_base"],
        "max_position_embeddings": fields["context_length"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }


def _values(tensor: gguf.ReaderTensor, config: dict[str, Any]) -> torch.Tensor:
    """Dequantize to bfloat16, with query and key rows in Hugging Face's order instead of llama.cpp's pairs."""
    values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for part, count in heads.items():
        if f".{part}." in tensor.name:
            values = values.view(count, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
    return values.to(torch.bfloat16).contiguous()


def _hugging_face_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name if name == "lm_head.weight" else f"model.{name}"


def write_gguf(path: Path, weights: str) -> Path:
    """Write the embedded GGUF file with matrices in bfloat16 or Q8_0. Norms stay float32."""
    if path.exists():
        return path
    reader = gguf.GGUFReader(resolve_model("smollm2-135m").path)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
            continue
        rounded = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
        if weights == "int8":
            values = gguf.quants.dequantize(rounded, gguf.GGMLQuantizationType.BF16)
            rounded = gguf.quants.quantize(values, KINDS[weights])
        writer.add_tensor(tensor.name, rounded, raw_dtype=KINDS[weights])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_of(engine: str, weights: str, work: Path, python: Path, log: IO[str]) -> Path:
    """Return the model of an engine at a precision of weights. It is made once, in `work`.

    Raises CalledProcessError if the engine's exporter fails; its output is in `log`.
    """
    embedded = Path(resolve_model("smollm2-135m").path)
    if engine == "baton":
        return embedded if weights == "int4" else write_folder(work / "bfloat16")
    if engine == "llamacpp":
        return embedded if weights == "int4" else write_gguf(work / f"{weights}.gguf", weights)
    if engine == "openvino":
        return _export_openvino(write_folder(work / "bfloat16"), work / f"openvino-{weights}", weights, python, log)
    return write_folder(work / "bfloat16")


def _export_openvino(source: Path, target: Path, weights: str, python: Path, log: IO[str]) -> Path:
    """Convert with Optimum. int4: asymmetric in groups of 32, as Q4_1 is; int8: per channel."""
    formats = {"bfloat16": ["fp16"], "int8": ["int8"], "int4": ["int4", "--group-size", "32", "--ratio", "1.0"]}
    if not (target / "openvino_model.xml").exists():
        command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(source)]
        task = ["--task", "text-generation-with-past", "--weight-format", *formats[weights], str(target)]
        subprocess.run([*command, *task], check=True, stdout=log, stderr=log)
    return target
