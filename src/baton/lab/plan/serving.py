"""Convert a planned fleet to Baton's configuration: a server's TOML file and a `baton host` command per worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import structs

from baton.core.config import BatchLimits, Config, HostsConfig, ParallelConfig, SloConfig, Topology
from baton.core.kv_config import KVConfig
from baton.decide.cost.catalog import hub_name, model_shape, models
from baton.lab.plan.cluster import BLOCK_TOKENS, batch_requests_max, cost_section, step_tokens_max
from baton.lab.plan.planned_fleet import PlannedFleet, WorkerGroup
from baton.lab.plan.recommend import Recommendation
from baton.lab.plan.tune import policy_lines

HTTP_PORT, HOSTS_PORT = 8000, 8001
"""Ports of the server: HTTP for clients, and the connections of joined hosts."""
SHIPPED = "smollm2-135m"
"""Catalogue name of the one model that `baton serve` also accepts by that name."""
_ALWAYS = ("block_tokens", "step_tokens_max", "requests_max")
"""Keys that are always written, because the plan depends on their values even if they are defaults."""


def served_model(llm: str) -> str:
    """Return the model argument of `baton serve`: a hub name, or the folder of the given config.json."""
    if llm.endswith(".json"):
        return str(Path(llm).parent)
    return llm if "/" in llm else hub_name(model_shape(llm).name) or llm


def is_alone(fleet: PlannedFleet) -> bool:
    """Return whether the server's own host runs the whole fleet.

    Workers on one host share its GPUs, so each worker of a larger fleet has a host of its own.
    """
    return sum(group.workers for group in fleet.groups) == 1


def serve_config(found: Recommendation) -> Config:
    """Return the server's configuration, with the plan's only worker or with the number of hosts to expect.

    The batch limits apply to all workers of a server, so they are the largest of all groups. The SLO is the one the
    user asked for: the server itself subtracts the time to load from a tier.
    """
    slo, groups = found.question.demand.slo, found.best.groups
    config = Config(
        model=served_model(found.question.spec.llm),
        dtype="bfloat16",
        batch=BatchLimits(
            step_tokens_max=max(step_tokens_max(group) for group in groups),
            requests_max=max(batch_requests_max(group) for group in groups),
        ),
        kv=KVConfig(block_tokens=BLOCK_TOKENS),
        slo=SloConfig(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s) if enforces_slo(found) or found.tuned else SloConfig(),
        cost=_prices(found.best),
    )
    return _with_own(config, groups[0]) if is_alone(found.best) else _with_hosts(config, found.best)


def _prices(fleet: PlannedFleet) -> dict[str, Any]:
    """Return the `cost` section that the server predicts step times with, from a group that decodes if there is one.

    Without it, a server without a GPU would predict with its CPU's speed and reject every request.
    """
    group = next((each for each in fleet.groups if each.role != "prefill"), fleet.groups[0])
    return cast("dict[str, Any]", _without_none(msgspec.to_builtins(cost_section(group, same_host=False))))


def _without_none(value: object) -> object:
    """Return the value without keys that are None, because TOML cannot express them."""
    if not isinstance(value, Mapping):
        return value
    items = cast("Mapping[str, object]", value).items()
    return {key: _without_none(each) for key, each in items if each is not None}


def _with_own(config: Config, group: WorkerGroup) -> Config:
    parallel, blocks = group.option.cost.parallel, kv_blocks(group)
    experts = group.option.cost.model.experts
    is_divided = experts is not None and parallel.ep == parallel.tp > 1 and experts.experts % parallel.tp == 0
    return structs.replace(
        config,
        topology=Topology(**{group.role: 1}),
        parallel=ParallelConfig(tensor=parallel.tp, pipeline=parallel.pp, experts=is_divided),
        kv=KVConfig(block_tokens=BLOCK_TOKENS, blocks=blocks),
    )


def _with_hosts(config: Config, fleet: PlannedFleet) -> Config:
    hosts = sum(group.workers for group in fleet.groups)
    return structs.replace(config, hosts=HostsConfig(expected=hosts, port=HOSTS_PORT))


def kv_blocks(group: WorkerGroup) -> int:
    """Return the number of KV blocks of a worker's arena, or 0 if its host must choose it.

    The host chooses if Baton's engine lacks a feature of the plan, such as the KV format.
    """
    return 0 if missing_features(group) else group.option.facts.kv_tokens_max // BLOCK_TOKENS


def enforces_slo(found: Recommendation) -> bool:
    """Return whether the server should reject requests that are predicted to miss the SLO."""
    return found.admissions[0].admission == "slo" if found.admissions else "slo" in found.question.spec.admission


def host_command(group: WorkerGroup, *, url: str) -> list[str]:
    """Return the command that starts a host with one worker of the group."""
    return ["baton", "host", "--join", url, f"--{group.role}=1", *host_flags(group)]


def host_flags(group: WorkerGroup) -> list[str]:
    """Return the flags of `baton host` for one worker of the group, without its role."""
    parallel, blocks = group.option.cost.parallel, kv_blocks(group)
    flags = ["--device=cuda", f"--tp={parallel.tp}", f"--pp={parallel.pp}"]
    return flags + ([f"--kv-blocks={blocks}"] if blocks else [])


def missing_features(group: WorkerGroup) -> list[str]:
    """Return the features that the plan uses for this group and Baton's own engine lacks on a GPU."""
    cost = group.option.cost
    found: list[str] = []
    if cost.precision.weights != "bf16":
        found.append(
            f"weights in {cost.precision.weights} (it computes with bfloat16, which takes more memory and time)"
        )
    if cost.precision.kv != "bf16":
        found.append(f"KV in {cost.precision.kv} (it keeps bfloat16, which takes more memory)")
    found += [f"{name} {degree}" for name, degree in (("cp", cost.parallel.cp), ("dp", cost.parallel.dp)) if degree > 1]
    return found


def missing_feature_lines(fleet: PlannedFleet) -> list[str]:
    """Return one warning for each group whose planned features Baton's engine lacks."""
    return [
        f"{group.role} on {group.option.name}: Baton's own engine has no {', no '.join(missing)} on a GPU; it does not "
        "reach the planned rate"
        for group in fleet.groups
        for missing in (missing_features(group),)
        if missing
    ]


def serve_toml(found: Recommendation) -> str:
    """Return the server's configuration as TOML. Comments give the fleet, the host commands and the warnings."""
    config, fleet = serve_config(found), found.best
    lines = [
        f"# {fleet.name}",
        f"# {fleet.rate_rps:.2f} req/s within the SLO; `baton serve --config FILE`",
        *(f"# {line}" for line in _host_lines(fleet)),
        *(f"# not as planned: {line}" for line in missing_feature_lines(fleet)),
        *(
            f"# with the tier {tier.name}, {tier.size_bytes:.3g} bytes {'for all hosts' if tier.shared else 'a host'}: "
            "add [[tiers]] with its url (docs/handoff-and-tiers.md)"
            for tier in found.question.spec.tiers
            if found.tiers and tier.name == found.tiers[0].tier
        ),
    ]
    if config.model in models() and config.model != SHIPPED:
        lines.append("# no hub name of this model is known: put its hub name, its folder or its .gguf file here")
    lines += [f"model = {_value(config.model)}", f"dtype = {_value(config.dtype)}"]
    plain = Config(model=config.model, dtype=config.dtype)
    for name in ("topology", "parallel", "batch", "kv", "slo", "hosts"):
        section, usual = structs.asdict(config)[name], structs.asdict(plain)[name]
        chosen, known = structs.asdict(section), structs.asdict(usual)
        keys = {key: value for key, value in chosen.items() if value != known[key] or key in _ALWAYS}
        if section != usual:
            lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in keys.items())]
    lines += ["", "[cost]", *(f"{key} = {_value(value)}" for key, value in config.cost.items())]
    lines += policy_lines(found.tuned.choice) if found.tuned else []
    return "\n".join(lines) + "\n"


def _host_lines(fleet: PlannedFleet) -> list[str]:
    """Return comment lines that tell how to start the hosts of each group. Empty if the server runs the only worker."""
    if is_alone(fleet):
        return []
    return [
        "give the server --host ADDRESS, which hosts reach, and --api-key-file FILE; then start, each with a --name, "
        "--api-key-file FILE and GPUs of its own (--device cuda:N where several share a node):",
        *(
            f"{group.workers} on {group.option.facts.gpus} x {group.option.stock.hardware.name} each: "
            f"{' '.join(host_command(group, url=f'http://ADDRESS:{HTTP_PORT}'))}"
            for group in fleet.groups
        ),
    ]


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return "{" + ", ".join(f"{key} = {_value(each)}" for key, each in items) + "}"
    return msgspec.json.encode(value).decode()
