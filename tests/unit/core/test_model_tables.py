"""The tables of several models: each over the settings of its server, and every problem at once."""

from __future__ import annotations

import pytest

from baton.core.config import Config, Topology, load
from baton.core.errors import ConfigError
from baton.core.kv_config import KVConfig
from baton.core.model_tables import config_of, model_configs
from baton.core.served_model import MODELS_MAX, ServedModelConfig

TWO = """
dtype = "bfloat16"
[kv]
blocks = 64
block_tokens = 32
[topology]
prefill = 1
decode = 2
[[models]]
model = "hash:a"
[[models]]
model = "hash:b"
name = "b"
mixed = 3
kv = { blocks = 8 }
dtype = "float32"
"""


def test_a_table_changes_what_it_names_and_nothing_else() -> None:
    server = load(TWO)
    first, second = model_configs(server)
    assert (first.model, first.topology, first.kv, first.dtype) == (
        "hash:a",
        Topology(prefill=1, decode=2),
        server.kv,
        "bfloat16",
    )
    assert (second.served_name, second.topology, second.dtype) == ("b", Topology(mixed=3), "float32")
    assert second.kv == KVConfig(blocks=8, block_tokens=32)


def test_a_server_without_tables_has_its_one_model() -> None:
    assert model_configs(Config(model="hash")) == [Config(model="hash")]


def test_prices_of_the_server_are_not_those_of_another_model() -> None:
    config = config_of(Config(cost={"prefill_token_s": 1e-3}), ServedModelConfig(model="hash"))
    assert config.cost == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[models]]\nname = 'a'", r"models\[0\].model is missing"),
        ("[[models]]\nmodel = 'hash'\nblocks = 3", "unknown key models\\[0\\].blocks"),
        ("[[models]]\nmodel = 'hash'\ncores = -1", "cores is -1"),
    ],
)
def test_a_wrong_table_is_refused_with_the_file(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = 'x'\n[[models]]\nmodel = 'hash'", "move `model`, `served_name` and `adapter`"),
        ("[[tiers]]\nurl = 'memory:'\n[[models]]\nmodel = 'hash'", "move them into the tables"),
        ("[hosts]\nexpected = 1\n[[models]]\nmodel = 'hash'", "leave out hosts.expected"),
        ("[[models]]\nmodel = 'hash'\nkv = { blocs = 3 }", "unknown key kv.blocs"),
        ("[[models]]\nmodel = 'hash'\nprefill = 1", "model hash: 1 prefill workers, but no worker can decode"),
        ("[[models]]\nmodel = 'hash'\ndtype = 'int3'", "dtype is 'int3'"),
        ("[[models]]\nmodel = 'hash'\n" * (MODELS_MAX + 1), f"at most {MODELS_MAX} are allowed: remove 1"),
    ],
)
def test_every_problem_of_the_models_is_told(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_configs(load(text))
