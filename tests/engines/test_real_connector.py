"""BatonConnector in vLLM itself (the CPU build), in one process, with a pool node of Baton."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.test_real_vllm import PEERS, SETTINGS, installed_model
from tests.store_servers import baton_pool

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1200)]
SOURCE = Path(__file__).resolve().parents[2] / "src"


def test_kv_is_copied_by_layer_and_read_from_the_pool() -> None:
    """The second answer begins with the KV of the first one, which vLLM has forgotten, and is equal."""
    model = str(installed_model())
    with baton_pool(size_bytes=5e8) as (_, url):
        done = subprocess.run(
            [str(PEERS / "vllm" / "bin" / "python"), str(Path(__file__).with_name("connector_driver.py")), model, url],
            env=os.environ | SETTINGS | {"PYTHONPATH": str(SOURCE), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    first, second = told["answers"]
    assert first["cached"] == 0
    assert second["cached"] == 256, "two blocks of 128 tokens"
    assert first["tokens"] == second["tokens"]
    assert len(told["copied"]) == 30, "every layer of the model"
    assert min(told["copied"].values()) >= 1
