"""The embedded model in transformers. Loading it takes 12 s, so all tests of a process share it."""

from __future__ import annotations

import pytest
import transformers

from tests.numerics.smollm2_reference import load_model


@pytest.fixture(scope="session")
def reference() -> transformers.PreTrainedModel:
    return load_model()
