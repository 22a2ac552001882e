"""The section `launcher` of the configuration: the system that starts the hosts of a server, and ends them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Struct, structs

from baton.core.errors import ConfigError
from baton.core.types import Role
from baton.core.validation import Range

Launcher = Literal["local", "ray", "external"]
Count = Annotated[int, Range(least=0, most=256)]


class ScalingRules(Struct, frozen=True, kw_only=True):
    """How a server carries out the targets of its scaling policy. The header of the decision log has these rules."""

    starts: Literal["workers", "hosts", "none"] = "workers"
    """`workers`: workers on the present hosts. `hosts`: new hosts of one worker each. `none`: nothing, because another
    system reads the targets."""
    hosts_max: int = 0
    """Maximum number of hosts, if `starts` is `hosts`."""


class HostGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts of one kind. All of them are in one placement group of Ray, each on a node of its own where possible."""

    name: str = ""
    """Start of the names of its hosts. Empty: the roles of its workers."""
    hosts: Annotated[int, Range(least=1, most=4096)] = 1
    prefill: Count = 0
    """Workers of each host, by role."""
    decode: Count = 0
    mixed: Count = 0
    cpus: Annotated[float, Range(least=0, most=4096)] = 1.0
    """Resources of Ray for each worker."""
    gpus: Annotated[float, Range(least=0, most=64)] = 0.0
    memory_bytes: Annotated[int, Range(least=0, most=2**50)] = 0
    resources: dict[str, float] = {}
    """Resources of Ray with names of their own, for each worker."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `baton host`, such as `--kv-blocks=4096`."""

    def workers(self) -> dict[Role, int]:
        """Return the workers of one host, by role."""
        counts: dict[Role, int] = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return {role: count for role, count in counts.items() if count}

    def title(self) -> str:
        """Return the start of the names of its hosts."""
        return self.name or "-".join(self.workers())


class LauncherConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The system that starts hosts: [Ray](integrations/ray.md), or one that reads the targets of scaling."""

    use: Launcher = "local"
    """`local`: scaling starts workers on the present hosts. `ray`: Ray starts hosts. `external`: the server publishes
    the targets of scaling, and another system such as KEDA starts and ends hosts."""
    address: str = "auto"
    """Address of the Ray cluster. `auto`: the one of this machine."""
    url: str = ""
    """URL at which hosts reach the server. Empty: the address of HTTP, or this node's if that is a wildcard."""
    hosts_max: Annotated[int, Range(least=1, most=4096)] = 64
    """Maximum number of hosts, those of scaling included."""
    groups: tuple[HostGroup, ...] = ()
    """Hosts to start. Empty: a host for each worker of `topology`."""

    def rules(self) -> ScalingRules:
        """Return the rules for the scaling policy."""
        if self.use == "ray":
            return ScalingRules(starts="hosts", hosts_max=self.hosts_max)
        return ScalingRules(starts="none") if self.use == "external" else ScalingRules()

    def with_groups(self, counts: Mapping[Role, int], *, cpus: float, gpus: float) -> LauncherConfig:
        """Return the launcher with a group for each role of `counts`, of one host for each worker.

        `cpus` and `gpus`: for each worker. Raises ConfigError if it has groups already.
        """
        wanted = {role: count for role, count in counts.items() if count}
        if self.groups:
            if wanted:
                raise ConfigError(f"launcher.groups lists all workers: leave out {', '.join(wanted)} workers elsewhere")
            return self
        shares: dict[str, Any] = {"cpus": cpus, "gpus": gpus}
        groups = [
            structs.replace(HostGroup(hosts=count, **shares), **{role: 1})
            for role, count in (wanted or {"prefill": 1, "decode": 1}).items()
        ]
        return structs.replace(self, groups=tuple(groups))

    def problems(self) -> list[str]:
        """Return every problem of the section, for `Config.problems`."""
        found: list[str] = []
        if self.groups and self.use != "ray":
            found.append(f"launcher.groups has {len(self.groups)} groups, but launcher.use is {self.use!r}: take 'ray'")
        found += [
            f"launcher.groups[{number}] has no workers: give it prefill, decode or mixed"
            for number, group in enumerate(self.groups)
            if not group.workers()
        ]
        titles = [group.title() for group in self.groups]
        found += [
            f"launcher.groups has two groups {title!r}: give each a name of its own"
            for title in sorted({title for title in titles if titles.count(title) > 1})
        ]
        hosts = sum(group.hosts for group in self.groups)
        if hosts > self.hosts_max:
            found.append(f"launcher.groups has {hosts} hosts, but launcher.hosts_max is {self.hosts_max}: raise it")
        roles = {role for group in self.groups for role in group.workers()}
        for role, needs in (("prefill", "decode"), ("decode", "prefill")):
            if role in roles and not roles & {needs, "mixed"}:
                found.append(f"launcher.groups has {role} workers, but none that can {needs}: add one")
        return found
