"""The embedded model in transformers. Loading it takes 15 s, so all tests of a run share it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from baton.compute.models.resolve import resolve_model


@pytest.fixture(scope="session")
def reference() -> transformers.PreTrainedModel:
    """SmolLM2-135M in float32, read from the same GGUF file by transformers."""
    path = Path(resolve_model("smollm2-135m").path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()
