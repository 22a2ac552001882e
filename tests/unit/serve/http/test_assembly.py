"""What is wrong in a configuration is told before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from baton.cli.logs import build_cluster
from baton.compute.models.resolve import resolve_model
from baton.core.config import Config, Plugin, PolicyChoice
from baton.core.errors import ConfigError
from baton.core.http_config import HttpConfig
from baton.core.keys import KeyEntry, KeyFile, digest_of
from baton.decide.cost.fitted import FittedCost, save_fitted
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.serve.live.assembly import assemble
from baton.serve.live.log_file import read_log


@pytest.mark.parametrize(
    ("use", "options", "words"),
    [
        ("slo-chunkd", {}, "did you mean 'slo-chunked'"),
        ("baton.decide.policy.batching:SloChunkd", {}, "built-in policies are named without their module"),
        ("slo-chunked", {"foo": 1}, "unknown option 'foo'"),
        ("static-roles", {}, "is no BatchingPolicy"),
    ],
)
def test_a_batching_policy_that_does_not_fit_is_told_at_the_start(
    use: str, options: dict[str, Any], words: str
) -> None:
    """Only workers ask it; without the check they would die of it, one after the other, until none is left."""
    config = Config(model="hash", policy=PolicyChoice(batching=Plugin(use=use, options=options)))
    with pytest.raises(ConfigError, match=words):
        assemble(config, resolve_model("hash"))


def test_workers_batch_as_was_chosen_for_them_whatever_the_set_says() -> None:
    mine = Plugin(use="slo-chunked")
    for choice, batching in (
        (PolicyChoice(name="vtc"), POLICY_SETS["vtc"].batching),
        (PolicyChoice(batching=mine), mine),
    ):
        parts = assemble(Config(model="hash", policy=replace(choice, name="vtc")), resolve_model("hash"))
        assert parts.own is not None
        for setup in parts.own.setups:
            assert (setup.batching, setup.fairness) == (batching, POLICY_SETS["vtc"].fairness)


def test_several_tenants_share_the_server_fairly_and_a_single_one_keeps_the_order_by_slo(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def fairness(*tenants: str) -> str:
        keys = [
            KeyEntry(id=f"k{place}", sha256=digest_of(b"%d" % place), tenant=name) for place, name in enumerate(tenants)
        ]
        operator = KeyEntry(id="operator", sha256=digest_of(b"operator"), tenant="operator", scopes=("admin",))
        path.write_bytes(msgspec.json.encode(KeyFile(keys=(*keys, operator))))
        path.chmod(0o600)
        config = Config(model="hash", http=HttpConfig(key_file=str(path)))
        return assemble(config, resolve_model("hash")).gateway.cluster().policy["fairness"]

    assert fairness("a", "a") == "slo-order"
    assert fairness("a", "b") == "vtc"
    several = Config(model="hash", http=HttpConfig(api_keys=("k1", "k2")))
    assert assemble(several, resolve_model("hash")).gateway.cluster().policy["fairness"] == "vtc"


def test_a_log_has_the_fitted_prices_and_not_the_name_of_their_file(tmp_path: Path) -> None:
    """INV-7: the file may be another one, or gone, when the log is replayed; so may it be for a host that joins."""
    cost = FittedCost(
        start_s=0.01, band_s=(0.001,) * 5, sequence_s=0.0, decode_s=0.002, pair_s=0.0, context_token_s=0.0
    )
    fit, log = tmp_path / "fit.json", tmp_path / "decisions.log"
    fit.write_text(save_fitted(cost))
    config = Config(model="hash", cost={"model": "fitted", "file": str(fit)}, log=str(log))
    parts = assemble(config, resolve_model("hash"))
    assert parts.driver.log is not None
    parts.driver.log.close()
    fit.unlink()
    header, _ = read_log(log)
    assert build_cluster(header).coordinator.policies.cost == cost
    assert "file" not in parts.config.cost
