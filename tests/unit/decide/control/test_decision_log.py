"""INV-7: a log replays to the decisions that were made, and a decision that was changed is found."""

from __future__ import annotations

import json
from hashlib import sha256

import msgspec
import pytest

from baton.core.config import Plugin, PolicyConfig
from baton.core.copies import LandingWanted, LeaseWanted
from baton.core.errors import ConfigError
from baton.core.handoff_paths import HandoffView, LinkView, PathChosen
from baton.core.messages import (
    BlocksSealed,
    BlocksWanted,
    CloseRequest,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RoleSet,
    SendAhead,
    StartDecode,
    StartPrefill,
    WorkerJoined,
    WorkerLost,
)
from baton.core.prefixes import CachedRun, EngineCacheChanged
from baton.core.tier_messages import FromTier, TierOpened
from baton.core.types import BlockHash, HostId, Request, RequestId, Sampling, Slo, WorkerId, WorkerView
from baton.decide.control.build import build_coordinator, build_policies
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import ClusterEvent, HostAdded, ToPool, WorkerSaid
from baton.decide.control.decision_log import LOG_VERSION, Decision, LogEntry, LogHeader, decided, replay
from baton.decide.control.host_pools import PoolRules
from baton.decide.control.retries import RetryRules
from baton.decide.cost.linear import LinearCost
from baton.decide.kv.layout import KVLayout
from baton.decide.kv.tier import TierRules
from baton.decide.policy.eviction import LeastRecentlyUsed
from baton.decide.policy.policy_sets import policy_set

HEADER = LogHeader(policy=policy_set("distserve"), block_tokens=4, retries=RetryRules(attempts_max=2))
HOST, P, D = HostId("h"), WorkerId("p"), WorkerId("d")
SALT = "known-to-one-tenant"
HASHES = (BlockHash(b"one"), BlockHash(b"two"))
ROAD = LinkView(expected_s=0.1, is_measured=True)
"""On which nothing has ever failed."""


FORMAT = (22, "8c3bb68ef8e93bca")
"""The version of the log, and the digest of what may stand in one of that version."""


def bare(schema: object, *, names: bool = False) -> object:
    """A schema without what is said about it in words, and without defaults: a log is read alike whatever these say."""
    if isinstance(schema, dict):
        kept = {key: part for key, part in schema.items() if names or key not in ("title", "description", "default")}
        return {key: bare(part, names=not names and key in ("properties", "$defs")) for key, part in kept.items()}
    return [bare(part) for part in schema] if isinstance(schema, list) else schema


def test_a_change_of_the_format_raises_the_version() -> None:
    """A log of another format would be read wrongly, or refused with words that help nobody."""
    digest = sha256(json.dumps(bare(msgspec.json.schema(LogEntry)), sort_keys=True).encode()).hexdigest()[:16]
    assert (LOG_VERSION, digest) == FORMAT, (
        "what stands in decision logs has changed: raise LOG_VERSION, say there what is new, and write both here"
    )


def fresh(header: LogHeader = HEADER) -> Cluster:
    coordinator = build_coordinator(header, build_policies(header.policy, LinearCost()))
    return Cluster(coordinator, PoolRules(eviction=LeastRecentlyUsed, prompts=header.prompts))


def request(name: str) -> Request:
    sampling = Sampling(logit_bias=((1, 0.5),), stop_token_ids=(0, 2))
    slo = Slo(ttft_s=9.0, tpot_s=1.0)
    return Request(
        id=RequestId(name),
        prompt_tokens=9,
        block_hashes=HASHES,
        output_tokens_max=5,
        arrived_at_s=0.5,
        sampling=sampling,
        slo=slo,
        cache_salt=SALT,
    )


LAYOUT = KVLayout(layers=2, block_tokens=4, kv_heads=1, head_dim=4, dtype="float32")
EARLY, SECOND = RequestId("early"), RequestId("second")
EVENTS: list[ClusterEvent] = [
    HostAdded(HOST, 16, LAYOUT, (TierRules(name="file", blocks_max=8, latency_s=0.001),)),
    FromTier(HOST, TierOpened("file", (BlockHash(b"from before"),))),
    RequestArrived(request("early")),
    WorkerJoined(WorkerView(id=P, host=HOST, role="prefill")),
    WorkerJoined(WorkerView(id=D, host=HOST, role="decode")),
    WorkerSaid(P, events=(BlocksWanted(EARLY, 1, P, 3, HASHES),)),
    WorkerSaid(
        P,
        events=(BlocksSealed(EARLY, 1, P, 0, HASHES), PrefillFinished(EARLY, 1, P, 9)),
        view=WorkerView(id=P, host=HOST, role="prefill", queued_tokens=3),
    ),
    RequestArrived(request("second")),
    WorkerSaid(D, events=(RequestFinished(EARLY, 1, D, "stop"),)),
    RoleSet(D, "mixed"),
    EngineCacheChanged(HOST, (CachedRun(None, 0, (BlockHash(b"three"),)),), (HASHES[1],)),
    WorkerLost(P, "killed"),
    RequestCancelled(SECOND),
]


@pytest.fixture
def decisions() -> list[Decision]:
    """A small run, as a cluster decides it."""
    cluster, made = fresh(), list[Decision]()
    for second, event in enumerate(EVENTS):
        cluster.handle(event, float(second))
        made.append(decided(float(second), event, cluster.decided))
    return made


def test_a_log_that_was_stored_replays_to_the_same_decisions(decisions: list[Decision]) -> None:
    stored = [msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=LogEntry) for entry in (HEADER, *decisions)]
    header, *read = stored
    assert header == HEADER
    assert isinstance(header, LogHeader)
    assert sum(isinstance(command, CloseRequest) for entry in decisions for command in entry.commands) == 2
    assert replay(fresh(header), [entry for entry in read if isinstance(entry, Decision)]) == (len(EVENTS), None)


def test_what_is_logged_has_no_salt_and_what_is_handled_has_it(decisions: list[Decision]) -> None:
    """The replay of such a log is the test above: no decision depends on a salt."""
    assert SALT.encode() not in msgspec.msgpack.encode(decisions)
    assert any(isinstance(entry.event, RequestArrived) for entry in decisions)
    salted = request("early")
    starts = [StartPrefill(salted, 1, P, "prompt"), SendAhead(salted, 1, HOST, D), StartDecode(salted, 1, D)]
    wanted = [LandingWanted(salted, 1, D, 3, HASHES), LeaseWanted(salted, HASHES), starts[0]]
    view = HandoffView(
        request=salted, tokens=9, pooled_tokens=0, direct=ROAD, put=ROAD, get=ROAD, run_ratio=1.0, rest_s=0.0
    )
    commands = [*starts, *(ToPool(HOST, event) for event in wanted), PathChosen(view, "direct")]
    assert SALT.encode() not in msgspec.msgpack.encode(decided(0.0, RequestArrived(salted), commands))
    assert {command.request.cache_salt for command in starts} == {SALT}


@pytest.mark.parametrize("index", [2, 3, 5, 6, len(EVENTS) - 1])
def test_a_changed_decision_is_reported_where_it_was_made(decisions: list[Decision], index: int) -> None:
    recorded = decisions[index]
    changed = msgspec.structs.replace(recorded, commands=(*recorded.commands, CloseRequest(RequestId("x"), "failed")))
    agreed, difference = replay(fresh(), [*decisions[:index], changed, *decisions[index + 1 :]])
    assert agreed == index
    assert difference is not None
    assert (difference.index, difference.recorded, difference.replayed) == (index, changed, recorded.commands)


def test_an_empty_log_agrees() -> None:
    assert replay(fresh(), []) == (0, None)


def test_other_attempts_decide_otherwise(decisions: list[Decision]) -> None:
    """The header is part of the log: with one attempt the loss of a worker ends the request."""
    once = msgspec.structs.replace(HEADER, retries=RetryRules(attempts_max=1))
    agreed, difference = replay(fresh(once), decisions)
    assert isinstance(EVENTS[agreed], WorkerLost)
    assert difference is not None
    assert any(isinstance(command, CloseRequest) for command in difference.replayed)


def test_a_policy_that_is_not_there_any_more_is_a_configuration_error() -> None:
    policy = PolicyConfig(routing=Plugin(use="tests.hosting:Gone"))
    with pytest.raises(ConfigError, match="has no Gone"):
        build_policies(policy, LinearCost())


@pytest.mark.parametrize("family", ["admission", "routing", "placement", "fairness"])
def test_a_policy_of_another_family_is_refused(family: str) -> None:
    """Each is checked against its own family."""
    wrong = Plugin(use="lru")
    with pytest.raises(ConfigError, match="is no"):
        build_policies(msgspec.structs.replace(PolicyConfig(), **{family: wrong}), LinearCost())
