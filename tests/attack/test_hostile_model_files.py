"""Two hundred hostile model files: each is opened or refused in one line, within 20 s and 1 GiB of memory."""

from __future__ import annotations

import json
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from baton.cli.main import main
from baton.compute.models.config_json import read_config_json
from baton.compute.models.gguf_names import gguf_name
from baton.compute.models.lora import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from baton.compute.models.tensor_names import expected_shapes
from tests.attack import hostile_models

MODELS = 200
BATCH = 50
BATCH_S = 120
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "sliding_window": None,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
MOE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
DEEP = json.loads("[" * 500 + "]" * 500)
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 3, 2**31, 2**53, 2**60, 2**64 - 1, 2**70, -(2**63), 0.5, 1e308, -1e308, 5e-324),
    *("", "abc", "/etc/passwd", "../x", "a" * 100_000, "\n\x1b[31m", None, True, [], {}, [[]], [2**62], DEEP),
    *([1] * 10_000, {"factor": 0}, {"rope_type": "yarn"}, {"rope_type": "llama3"}, {"rope_type": 7}, ["x"]),
)
COUNTS = (0, 1, 2**16, 2**24, 2**31 - 1, 2**32 - 1, 2**60, 2**63 - 1, 2**64 - 1)


def write_folder(folder: Path) -> None:
    """Write a valid model of safetensors in two shards, with its tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "add_bos_token": True, "chat_template": "{{ messages }}"})
    )
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    pipeline = tokenizers.Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.save(str(folder / "tokenizer.json"))
    shapes = expected_shapes(read_config_json(folder))
    tensors = {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}
    shards = {name: f"model-{index % 2 + 1}-of-2.safetensors" for index, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard)
    index = {"metadata": {}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_adapter(folder: Path) -> None:
    """Write a valid LoRA adapter of the model."""
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps({"r": 2, "lora_alpha": 4, "peft_type": "LORA", "bias": "none"}))
    module = f"{PREFIX}model.layers.0.mlp.down_proj"
    rows, columns = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {"lora_A": (2, columns), "lora_B": (rows, 2)}
    tensors = {f"{module}.{name}.weight": np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / WEIGHTS_FILE)


def write_gguf(path: Path, folder: Path) -> None:
    """Write the same model as a GGUF file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet())[:-1], "ab"])
    writer.add_token_types([1] * 256)
    writer.add_token_merges(["a b"])
    for name, shape in expected_shapes(read_config_json(folder)).items():
        writer.add_tensor(gguf_name(name).tensor, np.full(shape, 0.5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def mutate_json(value: Any, rng: random.Random) -> Any:
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(list(places(value)))
        if rng.random() < 0.2:
            del container[key]
        else:
            container[key] = json.loads(json.dumps(rng.choice(VALUES)))
        if not value:
            break
    return value


def mutate_bytes(data: bytes, rng: random.Random, head_bytes: int) -> bytes:
    """Flip bytes, write a number, cut, or repeat a part within the head of a file."""
    changed, at = bytearray(data), rng.randrange(head_bytes)
    match rng.randrange(4):
        case 0:
            for _ in range(rng.randint(1, 20)):
                changed[rng.randrange(head_bytes)] = rng.randrange(256)
        case 1:
            changed[at : at + 8] = struct.pack("<Q", rng.choice(COUNTS))
        case 2:
            del changed[at:]
        case _:
            changed[at:at] = changed[max(0, at - 64) : at] * rng.choice((1, 1000))
    return bytes(changed)


def harm_config(folder: Path, rng: random.Random) -> None:
    config = {**CONFIG, **(MOE if rng.random() < 0.4 else {})}
    (folder / "config.json").write_text(json.dumps(mutate_json(json.loads(json.dumps(config)), rng)))


def harm_other_json(folder: Path, rng: random.Random) -> None:
    name = rng.choice(
        ("generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors.index.json")
    )
    path = folder / name
    if rng.random() < 0.3:
        data = path.read_bytes()
        path.write_bytes(mutate_bytes(data, rng, len(data)))
    else:
        path.write_text(json.dumps(mutate_json(json.loads(path.read_text()), rng)))


def harm_header(folder: Path, rng: random.Random) -> None:
    harm_safetensors(folder / "model-1-of-2.safetensors", rng)


def harm_safetensors(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    if rng.random() < 0.3:
        path.write_bytes(mutate_bytes(data, rng, size + 8))
        return
    header = json.dumps(mutate_json(json.loads(data[8 : 8 + size]), rng)).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])


def harm_gguf(folder: Path, rng: random.Random) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    data = (folder.parent.parent / "valid.gguf").read_bytes()
    (folder / "model.gguf").write_bytes(mutate_bytes(data, rng, data.find(b"blk.1") + 200))


def harm_adapter(folder: Path, rng: random.Random) -> None:
    adapter = folder / hostile_models.ADAPTER
    write_adapter(adapter)
    if rng.random() < 0.5:
        config = mutate_json(json.loads((adapter / CONFIG_FILE).read_text()), rng)
        (adapter / CONFIG_FILE).write_text(json.dumps(config))
    else:
        harm_safetensors(adapter / WEIGHTS_FILE, rng)


HARMS: tuple[Callable[[Path, random.Random], None], ...] = (
    *(harm_config, harm_other_json, harm_header, harm_gguf, harm_adapter),
)


def opened(folder: Path) -> list[dict[str, str]]:
    """Open the models of a folder in a process of its own. Fails if it ends early."""
    run = subprocess.run(
        [sys.executable, hostile_models.__file__, str(folder)], capture_output=True, text=True, timeout=BATCH_S
    )
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, f"ended with {run.returncode} after {found[-1:]}: {run.stderr[-2000:]}"
    assert len(found) == len(list(folder.iterdir()))
    return found


def is_one_line(text: str) -> bool:
    return text.isprintable() and len(text) < 2000


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    write_folder(tmp_path / "valid")
    write_gguf(tmp_path / "valid.gguf", tmp_path / "valid")
    return tmp_path / "valid"


@pytest.mark.deep
@pytest.mark.parametrize("batch", range(MODELS // BATCH))
def test_a_hostile_model_is_opened_or_refused(batch: int, valid: Path) -> None:
    folder = valid.parent / "hostile"
    folder.mkdir()
    for number in range(BATCH):
        rng = random.Random(f"{batch} {number}")
        model = folder / f"{number:03d}-{HARMS[number % len(HARMS)].__name__}"
        shutil.copytree(valid, model)
        HARMS[number % len(HARMS)](model, rng)
    found = opened(folder)
    assert all(is_one_line(one["refusal"]) for one in found)
    assert sum(bool(one["refusal"]) for one in found) > BATCH // 4


def test_the_valid_model_is_opened(valid: Path) -> None:
    assert hostile_models.open_whole(valid) == ""
    assert hostile_models.open_whole(valid.parent / "valid.gguf") == ""
    write_adapter(valid / hostile_models.ADAPTER)
    assert hostile_models.open_whole(valid) == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", "abc"),
        ("rope_theta", 0),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}),
        ("num_key_value_heads", -2),
        ("head_dim", 3),
        ("head_dim", 2**60),
        ("max_position_embeddings", -1),
        ("intermediate_size", 0),
        ("vocab_size", 2**40),
        ("rms_norm_eps", -1.0),
    ],
)
def test_an_impossible_config_ends_with_code_2(
    key: str, value: object, valid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (valid / "config.json").write_text(json.dumps(CONFIG | {key: value}))
    assert main(["serve", str(valid)]) == 2
    output = capsys.readouterr().err.rstrip("\n")
    assert "config.json" in output
    assert is_one_line(output)
