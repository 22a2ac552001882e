"""Hosts on Ray start, start again when they are lost, and end, without a Ray cluster."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.cli.main import build_parser
from baton.cli.serve import configuration
from baton.core.config import Config, load
from baton.core.errors import ConfigError
from baton.core.launching import HostGroup, LauncherConfig
from baton.core.types import HostId, WorkerId
from baton.integrations.ray import cluster as ray_cluster
from baton.integrations.ray.cluster import HostEndedError, HostOfRay, RayCluster, Reservation
from baton.integrations.ray.host_actor import claim_cores
from baton.integrations.ray.launcher import RayLauncher
from baton.integrations.ray.orders import (
    ConnectRay,
    EndHosts,
    FromRay,
    HostGivenUp,
    LaunchedHost,
    RetireHost,
    StartHosts,
)
from baton.integrations.ray.process import RayHosts, with_address
from baton.move.backoff import Backoff

CONNECT = ConnectRay(
    address="auto", url="http://127.0.0.1:8000", is_on_all_addresses=False, join_key="k", start_s=60.0, leave_s=0.0
)
A, B = HostId("decode-0"), HostId("decode-1")
ADDED, WORKER = HostId("decode-added-1"), WorkerId("decode-added-1.decode-0")


def order(*hosts: LaunchedHost) -> StartHosts:
    return StartHosts(title="baton-decode", hosts=hosts, arguments=("--decode", "1"), resources={"CPU": 2.0}, cores=2)


@dataclass(slots=True)
class Started:
    """A host that a test ends by hand."""

    bundle: int
    arguments: Sequence[str]
    environment: Mapping[str, str]
    placed: asyncio.Future[str]
    ended: asyncio.Future[str]


@dataclass(slots=True)
class HandCluster(RayCluster):
    """A cluster whose hosts start and end when a test says so."""

    nodes: set[str] = field(default_factory=lambda: {"10.0.0.1"})
    started: list[Started] = field(default_factory=list)
    reserved: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def own_address(self) -> str:
        return "10.0.0.1"

    def addresses(self) -> set[str]:
        return self.nodes

    def reserve(self, title: str, resources: Mapping[str, float], hosts: int) -> Reservation:
        self.reserved.append(title)
        return Reservation(title, resources)

    def release(self, reservation: Reservation) -> None:
        self.reserved.remove(reservation.group)
        self.changed.set()

    def start(
        self,
        reservation: Reservation,
        bundle: int,
        *,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cores: int,
    ) -> HostOfRay:
        loop = asyncio.get_running_loop()
        host = Started(bundle, arguments, environment, loop.create_future(), loop.create_future())
        self.started.append(host)
        self.changed.set()
        return HostOfRay(host)

    async def place_of(self, host: HostOfRay) -> str:
        return await asyncio.shield(host.actor.placed)

    async def end_of(self, host: HostOfRay) -> str:
        return await asyncio.shield(host.actor.ended)

    def kill(self, host: HostOfRay) -> None:
        for future in (host.actor.placed, host.actor.ended):
            if not future.done():
                future.set_exception(HostEndedError("it was killed"))
                future.exception()  # so that no test warns of it

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60)


@dataclass(slots=True)
class Kit:
    """Hosts on a cluster by hand, and what they report."""

    cluster: HandCluster = field(default_factory=HandCluster)
    reports: list[FromRay] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    hosts: RayHosts = field(init=False)

    def __post_init__(self) -> None:
        self.hosts = RayHosts(
            self.cluster, CONNECT, self.reports.append, self.lines.append, backoff=Backoff(0.001, 0.001)
        )

    async def started(self, count: int) -> Started:
        """Wait until this many hosts were started in all. Return the last one, placed."""
        await self.cluster.until(lambda: len(self.cluster.started) >= count)
        last = self.cluster.started[count - 1]
        last.placed.set_result("node")
        return last


def played(test: Callable[[Kit], Coroutine[None, None, None]]) -> Kit:
    async def play() -> Kit:
        kit = Kit()
        running = asyncio.create_task(kit.hosts.run())
        await test(kit)
        kit.hosts.handle(EndHosts())
        await asyncio.wait_for(running, 60)
        return kit

    return asyncio.run(play())


def test_a_lost_host_starts_again_in_its_bundle() -> None:
    async def test(kit: Kit) -> None:
        kit.hosts.handle(order(LaunchedHost(name=A), LaunchedHost(name=B)))
        await kit.started(1)
        second = await kit.started(2)
        second.ended.set_exception(HostEndedError("its node died"))
        third = await kit.started(3)
        assert (third.bundle, third.arguments) == (second.bundle, second.arguments)
        assert third.arguments == ["host", "--join", "http://127.0.0.1:8000", "--name", B, "--decode", "1"]
        assert third.environment == {"BATON_JOIN_KEY": "k"}

    kit = played(test)
    assert f"{B} is lost: its node died" in kit.lines
    assert kit.cluster.reserved == [], "the end releases every placement group"
    assert all(host.ended.done() for host in kit.cluster.started), "the end kills every host"


def test_a_retired_host_does_not_start_again_and_its_group_is_released() -> None:
    async def test(kit: Kit) -> None:
        kit.hosts.handle(order(LaunchedHost(name=A)))
        host = await kit.started(1)
        kit.hosts.handle(RetireHost(A))
        host.ended.set_result("it ended with code 0")
        await kit.cluster.until(lambda: not kit.cluster.reserved)
        assert len(kit.cluster.started) == 1

    assert f"{A} has left" in played(test).lines


def test_a_retired_host_that_does_not_leave_is_killed() -> None:
    async def test(kit: Kit) -> None:
        kit.hosts.handle(order(LaunchedHost(name=A)))
        host = await kit.started(1)
        kit.hosts.handle(RetireHost(A))
        await kit.cluster.until(lambda: not kit.cluster.reserved)
        assert isinstance(host.ended.exception(), HostEndedError)

    played(test)


def test_a_host_of_scaling_that_does_not_start_is_given_up() -> None:
    """The configured ones are tried forever: nothing else would start them."""

    async def test(kit: Kit) -> None:
        kit.hosts.handle(order(LaunchedHost(name=ADDED, added_worker=WORKER)))
        for count in range(1, 4):
            await kit.cluster.until(lambda count=count: len(kit.cluster.started) >= count)
            kit.cluster.started[-1].placed.set_exception(HostEndedError("no memory"))
        await kit.cluster.until(lambda: not kit.cluster.reserved)

    assert played(test).reports == [HostGivenUp(ADDED, "no memory")]


def test_a_server_on_loopback_is_told_that_other_nodes_do_not_reach_it() -> None:
    async def test(kit: Kit) -> None:
        assert kit.hosts.problem() == ""
        kit.cluster.nodes = {"10.0.0.1", "10.0.0.2"}
        assert "hosts on 10.0.0.2 cannot reach http://127.0.0.1:8000" in kit.hosts.problem()

    played(test)
    assert with_address("http://127.0.0.1:80", "10.0.0.1") == "http://10.0.0.1:80"
    assert with_address("https://[::1]:80", "fe80::1") == "https://[fe80::1]:80"


def test_hosts_of_one_machine_claim_different_cores(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    first = claim_cores(1, tmp_path)
    assert len(first) == 1
    assert claim_cores(cores, tmp_path) == {}, "one core is taken"
    for lock in first.values():
        os.close(lock)
    again = claim_cores(cores, tmp_path)
    assert len(again) == cores, "the end of an actor frees its cores"
    for lock in again.values():
        os.close(lock)


def configured(*flags: str) -> Config:
    return configuration(build_parser(["serve"]).parse_args(["serve", "hash", "--launcher", "ray", *flags]))


def test_flags_make_a_group_of_hosts_for_each_role() -> None:
    config = configured("--prefill", "2", "--decode", "3", "--device", "cuda", "--tp", "2", "--threads", "4")
    assert config.launcher.groups == (
        HostGroup(prefill=1, hosts=2, cpus=4, gpus=2),
        HostGroup(decode=1, hosts=3, cpus=4, gpus=2),
    )
    assert config.hosts.expected == 5
    assert [group.title() for group in configured().launcher.groups] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[launcher.groups]]\nhosts = 2", "launcher.groups[0] has no workers"),
        ("[[launcher.groups]]\nmixed = 1\n[[launcher.groups]]\nmixed = 2", "two groups 'mixed'"),
        ("[[launcher.groups]]\nprefill = 1", "none that can decode"),
        ("[launcher]\nhosts_max = 1\n[[launcher.groups]]\nmixed = 1\nhosts = 2", "launcher.hosts_max is 1"),
    ],
)
def test_a_wrong_launcher_is_refused(text: str, problem: str) -> None:
    head, _, rest = text.partition("\n") if text.startswith("[launcher]") else ("[launcher]", "", text)
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[")):
        load(f'{head}\nuse = "ray"\n{rest}')


def test_groups_need_ray() -> None:
    with pytest.raises(ConfigError, match=r"launcher\.use is 'local'"):
        load("[[launcher.groups]]\nmixed = 1")


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'baton\[ray\]'"):
        RayLauncher(configured(), print)


def test_without_a_cluster_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_ray"))
    with pytest.raises(
        ConfigError, match=r"no Ray cluster at 10\.0\.0\.1:6379: Could not find .*; run `ray start --head`"
    ):
        RayCluster("10.0.0.1:6379")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)


def test_hosts_need_a_key_to_join_a_server_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda _name: object())
    RayLauncher(configured("--api-key", "one"), print)
    with pytest.raises(ConfigError, match="BATON_JOIN_KEY"):
        RayLauncher(configured("--api-key", "one", "--api-key", "two"), print)


def test_the_decision_log_has_the_rules_of_scaling() -> None:
    assert LauncherConfig(use="ray", hosts_max=3).rules().hosts_max == 3
    assert (LauncherConfig().rules().starts, LauncherConfig(use="external").rules().starts) == ("workers", "none")
