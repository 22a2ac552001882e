"""Models with random weights in small sizes: a config.json, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

SHAPES = Path(__file__).resolve().parent.parent / "examples" / "shapes"
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 300, "head_dim": 8, "num_key_value_heads": 2, "num_experts": 4,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip


def small(name: str, folder: Path, **changes: object) -> str:
    """Write the config of a shipped model in a small size, and return the folder."""
    config = json.loads((SHAPES / name / "config.json").read_text())
    sizes = {key: value for key, value in SMALL.items() if key in config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | sizes | changes))
    return str(folder)
