"""Problems of the tiers' stores are reported together, before any store is opened."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest

from baton.cli.main import main
from baton.core.errors import ConfigError, StoreError
from baton.core.kv_config import TierConfig
from baton.decide.kv.layout import KVLayout
from baton.move.store.port import Store
from baton.serve.host import tier_opening
from baton.serve.host.tier_opening import (
    OpenTier,
    UnopenedTier,
    check_tiers,
    is_shared,
    open_tiers,
    open_usable_tiers,
)

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=16, block_tokens=16, dtype="uint8")


def test_two_bad_urls_are_told_together() -> None:
    with pytest.raises(ConfigError) as told:
        check_tiers([TierConfig(url="file:///x"), TierConfig(url="redis://a"), TierConfig(url="tape://b")])
    first, second = str(told.value).splitlines()
    assert first.startswith("tiers[0]: ")
    assert "bytes=" in first
    assert second.startswith("tiers[2]: ")
    assert "tape" in second


def test_a_host_hears_of_a_bad_url_before_it_joins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "--join", "http://127.0.0.1:9", "--tier", "file:///x", "--tier", "tape://b"]) == 2
    assert {"tiers[0]", "tiers[1]"} <= {word.rstrip(":") for word in capsys.readouterr().err.split()}


def test_a_store_that_cannot_be_opened_leaves_none_open(tmp_path: Path) -> None:
    """The first store's folder is not locked any more."""
    (tmp_path / "taken").write_text("a file")
    good = TierConfig(url=f"file://{tmp_path}/kv?bytes=64e6")
    bad = TierConfig(url=f"file://{tmp_path}/taken?bytes=64e6")
    with pytest.raises(ConfigError, match=r"tiers\[1\]"):
        open_tiers([good, bad], layout=LAYOUT, fingerprint="a")
    (tier,) = open_tiers([good], layout=LAYOUT, fingerprint="a")
    assert (tier.name, tier.rules.is_sized, tier.list_s) == ("file", True, 0.0)
    tier.store.close()


@pytest.mark.parametrize(
    ("url", "shared"), [("file:///x", False), ("memory://", False), ("pool://a:1", True), ("s3://b", True)]
)
def test_which_stores_are_of_all_hosts(url: str, *, shared: bool) -> None:
    assert is_shared(url) == shared


def test_a_store_that_is_down_is_left_out_and_the_others_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    down = TierConfig(url=f"file://{tmp_path}/taken?bytes=64e6")
    good = TierConfig(url=f"file://{tmp_path}/kv?bytes=64e6")
    late, tier = open_usable_tiers([down, good], layout=LAYOUT, fingerprint="a")
    assert isinstance(tier, OpenTier)
    assert tier.name == "file-1"
    tier.store.close()
    assert isinstance(late, UnopenedTier)
    assert late.problem.startswith("tiers[0]: ")
    assert (late.rules.name, late.rules.is_sized, late.rules.shared_as) == ("file", True, "")
    (tmp_path / "taken").unlink()
    opened = late.open()
    assert opened.name == "file"
    assert opened.rules.blocks_max < late.rules.blocks_max, "now its size is known"
    opened.store.close()
    with pytest.raises(ConfigError, match="tape"):
        open_usable_tiers([good, TierConfig(url="tape://b")], layout=LAYOUT, fingerprint="a")


@pytest.mark.parametrize("failure", [None, StoreError("the disk is gone")])
def test_a_store_that_hangs_while_it_is_opened_delays_no_host(
    failure: StoreError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tier counts as unopened. The attempt under way is used once it ends; after its failure there is another."""
    disk_answers, opens = Event(), tier_opening.open_store

    def hang(url: str, *, layout_fingerprint: str, block_bytes: int) -> Store:
        disk_answers.wait()
        if failure is not None and len(calls) == 0:
            calls.append(url)
            raise failure
        return opens(url, layout_fingerprint=layout_fingerprint, block_bytes=block_bytes)

    calls: list[str] = []
    monkeypatch.setattr(tier_opening, "open_store", hang)
    config = TierConfig(url=f"file://{tmp_path / 'tier'}?bytes=1e6&io=buffered")
    (tier,) = open_usable_tiers([config], layout=LAYOUT, fingerprint="f", wait_s=0.001)
    assert isinstance(tier, UnopenedTier)
    assert tier.problem == "the store of tier file is not open after 0.001 s"
    disk_answers.set()
    if failure is not None:
        with pytest.raises(StoreError, match="the disk is gone"):
            tier.open()
    opened = tier.open()
    assert (opened.name, opened.rules.is_sized) == ("file", True)
    opened.store.close()
