"""The KV of layers that an engine reports as finished does not change while the step continues."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Literal

import pytest
import transformers

from baton.compute.models.resolve import resolve_model
from tests.unit.compute.models import TINY, engine_of, part_of, run, tiny_model

LAYERS, TOKENS, BLOCK_TOKENS = 24, 512, 16
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": LAYERS, "max_position_embeddings": TOKENS}


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_kv_of_finished_layers_does_not_change(kind: Literal["native", "torch"], tmp_path: Path) -> None:
    """Another thread reads each layer from the blocks as soon as it is finished, as a layer-wise transfer does."""
    tiny_model(transformers.LlamaConfig(**(TINY | SIZES), tie_word_embeddings=True)).save_pretrained(tmp_path)
    blocks = TOKENS // BLOCK_TOKENS
    engine, arena = engine_of(resolve_model(str(tmp_path)), blocks=blocks, block_tokens=BLOCK_TOKENS, kind=kind)
    layout, seen = engine.layout, dict[int, list[bytes]]()

    def layer_bytes(layer: int) -> list[bytes]:
        size = layout.block_bytes // LAYERS
        starts = [block * layout.block_bytes + layer * size for block in range(blocks)]
        return [bytes(arena[start : start + size]) for start in starts]

    part = part_of([3 + token % 80 for token in range(TOKENS)], range(blocks))
    engine.progress.layers = 0
    step = threading.Thread(target=run, args=(engine, part))
    step.start()
    while len(seen) < LAYERS:  # a thread that failed leaves it short: then the last count ends the loop
        is_over = not step.is_alive()
        for layer in range(len(seen), engine.progress.layers):
            seen[layer] = layer_bytes(layer)
        if is_over:
            break
    step.join()
    assert list(seen) == list(range(LAYERS))
    assert seen == {layer: layer_bytes(layer) for layer in range(LAYERS)}
    assert all(any(piece) for pieces in seen.values() for piece in pieces)
