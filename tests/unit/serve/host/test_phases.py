"""Workers of a host whose phases have precisions of their own, and the prices that policies see."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.compute.models.dtype import Precision
from baton.compute.models.resolve import resolve_model
from baton.core.config import Config, PhaseConfig, Topology
from baton.core.errors import ConfigError
from baton.core.kv_config import KVConfig
from baton.core.types import HostId
from baton.decide.cost.load import load_cost
from baton.serve.host.build import build_host, choose_computing, priced

PHASES = Config(
    topology=Topology(prefill=1, decode=1, mixed=1),
    prefill=PhaseConfig(dtype="bfloat16"),
    decode=PhaseConfig(weights="stored"),
    kv=KVConfig(blocks=4),
    threads=1,
)


def test_each_worker_gets_the_precision_of_its_role_and_keeps_it() -> None:
    card = resolve_model("smollm2-135m")
    computing = choose_computing(PHASES, card)
    assert computing.layout.dtype == "bfloat16", "that of decode"
    parts = build_host(priced(PHASES, card, computing), card, computing, HostId("local"))
    parts.arena.close()
    found = {setup.view.role: setup for setup in parts.setups}
    assert found["prefill"].precision == Precision("bfloat16", "dense")
    assert found["decode"].precision == Precision("bfloat16", "stored")
    assert found["mixed"].precision == Precision("float32", "dense")
    assert [setup.view.kind for setup in parts.setups] == ["prefill", "decode", "mixed"]


def test_policies_see_the_prices_of_each_phase() -> None:
    """A step of 4-bit weights reads fewer bytes. Prices of the configuration apply to every phase."""
    card = resolve_model("smollm2-135m")
    config = Config(decode=PhaseConfig(weights="stored"), cost={"prefill_token_s": 7.0})
    cost = load_cost(priced(config, card, choose_computing(config, card)).cost, folder=Path()).cost
    assert (
        cost.on("decode").decode_run_s(requests=1, context_tokens=0, steps=1)[0]
        < (cost.on("mixed").decode_run_s(requests=1, context_tokens=0, steps=1)[0])
    )
    assert cost.on("decode").prefill_s(new_tokens=1, cached_tokens=0) >= 7.0


def test_heads_without_whole_groups_are_refused_before_the_start() -> None:
    card = resolve_model("hash")
    assert choose_computing(Config(kv=KVConfig(dtype="mxfp4")), card).layout.dtype == "uint8"
    odd = msgspec.structs.replace(resolve_model("smollm2-135m"), head_dim=80)
    with pytest.raises(ConfigError, match="one scale per 32 numbers, and heads have 80"):
        choose_computing(Config(kv=KVConfig(dtype="mxfp4")), odd)
