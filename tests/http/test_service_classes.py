"""Service classes at the HTTP edge: the class that a request gets, and the 403 for one that its key may not use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from baton.core.class_config import ClassConfig, RouteConfig
from baton.core.keys import KeyEntry, KeyFile, KeyLimits, digest_of
from baton.core.limits import LimitsConfig
from baton.decide.policy.classes import ClassTable
from baton.serve.http.budgets import Budgets
from baton.serve.http.edge import RequestContext
from baton.serve.http.identity import NO_LIMITS, Identity, KeySources
from baton.serve.http.service_class import choose_class
from baton.serve.http.services import HttpSettings
from baton.serve.http.wire.schemas import SloFields
from tests.http.conftest import House

CLASSES = ClassTable(
    (ClassConfig(name="gold", priority=-1, ttft_slo_s=1.0, tpot_slo_s=0.1), ClassConfig(name="bulk")),
    (RouteConfig(service_class="gold", headers={"x-tier": "gold"}),),
    "bulk",
)
GOLD = {"x-tier": "gold"}


@pytest.fixture
def house(tmp_path: Path, build: Callable[..., House]) -> House:
    """A server whose key `rich` may ask for the class gold, and whose key `plain` may not."""
    limits = {"plain": KeyLimits(), "rich": KeyLimits(classes=("gold", "bulk"))}
    keys = [KeyEntry(id=name, sha256=digest_of(name.encode()), tenant=name, limits=own) for name, own in limits.items()]
    path = tmp_path / "keys.json"
    path.write_bytes(msgspec.json.encode(KeyFile(keys=tuple(keys))))
    path.chmod(0o600)
    return build(keys=KeySources(file=path), waiting_max=0, settings=HttpSettings(classes=CLASSES))


def ask(house: House, key: str, headers: dict[str, str]) -> tuple[int, str]:
    """Send a request. The full queue refuses it if the edge has accepted it."""
    client = TestClient(house.app, base_url="http://localhost")
    response = client.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"Authorization": f"Bearer {key}", **headers}
    )
    return response.status_code, response.json().get("error", {}).get("code", "")


def test_a_header_gives_a_class_only_to_keys_that_may_have_it(house: House) -> None:
    assert ask(house, "plain", GOLD) == (403, "class_not_allowed")
    assert ask(house, "plain", {}) == (503, "queue_full")
    assert ask(house, "rich", GOLD) == (503, "queue_full")


def test_requests_of_a_batch_have_a_class_without_reserve_or_slo() -> None:
    """Whatever class the routes give to its key: its interactive requests come first."""
    table = ClassTable(
        (ClassConfig(name="gold", priority=-1, decode_ratio=0.5, kv_ratio=0.5, ttft_slo_s=1.0, tpot_slo_s=0.1),),
        default="gold",
    )
    budget = Budgets(LimitsConfig()).begin("me", NO_LIMITS, is_counted=False, now_s=0.0)
    context = RequestContext("r", 0.0, Identity(), "me", budget, SloFields(), "/v1/completions", {}, is_offline=True)
    choice = choose_class(context, None, table)
    assert choice.slo is None
    assert choice.service is not None
    assert (choice.service.decode_ratio, choice.service.kv_ratio) == (0.0, 0.0)
    assert choice.service.priority > 100
    assert choice.service.urgent_ttft_s == 1.0
