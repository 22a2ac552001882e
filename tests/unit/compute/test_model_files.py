"""Hostile model files are refused with a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import Struct

from baton.compute.models.json_file import read_json
from baton.compute.models.safetensors_file import read_checkpoint
from baton.core.errors import ModelError

DEEP = "[" * 100_000


class _Config(Struct):
    layers: int = 0


@pytest.mark.parametrize("shard", ["/etc/passwd", "../other/model.safetensors", "sub/model.safetensors"])
def test_an_index_names_only_files_of_its_folder(shard: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    folder = tmp_path / "model"
    folder.mkdir()
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="is not a file of its folder"):
        read_checkpoint(folder)


def test_a_safetensors_header_that_is_nested_deep_is_refused(tmp_path: Path) -> None:
    header = f'{{"model.norm.weight": {DEEP}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="its header is no valid JSON of tensors"):
        read_checkpoint(tmp_path)


def test_a_config_that_is_nested_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"other": {DEEP}')
    with pytest.raises(ModelError, match=r"cannot read .*config.json"):
        read_json(path, _Config)
