"""`baton serve`, `baton host` and the Helm chart take what `baton plan` writes (tests/deploy renders the chart)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.cli import serve
from baton.cli.main import build_parser, main
from baton.compute.models.resolve import HUB_NAME
from baton.decide.cost.catalog import hub_names, models
from baton.decide.cost.load import load_cost
from baton.lab.plan.cluster import kind_name
from baton.lab.plan.files import cluster_yaml, helm_values
from baton.lab.plan.recommend import Recommendation, make_report, recommend
from baton.lab.plan.serving import serve_toml, served_model
from baton.lab.plan.spec import read_plan_input
from baton.lab.sim.spec import load_spec

QUESTION: dict[str, Any] = {
    "llm": "llama3.1-70b", "objective": "goodput-per-gpu", "finalists": 0, "tp": [4],
    "hardware": [{"name": "H100-80G-SXM", "gpus": 8}],
    "shape": "disaggregated", "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
    "workload": {"input_tokens": 1500, "output_tokens": 250},
}  # fmt: skip


def planned(**more: Any) -> Recommendation:
    return recommend(read_plan_input({**QUESTION, **more}, Path()))


@pytest.fixture(scope="module")
def found() -> Recommendation:
    """The answer to the question as it stands."""
    return planned()


def values(found: Recommendation) -> dict[str, Any]:
    return msgspec.yaml.decode(helm_values(found))


def test_serve_takes_the_configuration_and_waits_for_a_host_per_worker(found: Recommendation, tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(serve_toml(found))
    config = serve.configuration(build_parser().parse_args(["serve", "--config", str(path)]))
    assert HUB_NAME.fullmatch(config.model), "a name that `baton serve` downloads, not one of the catalogue"
    workers = sum(group.workers for group in found.best.groups)
    assert (config.hosts.expected, config.hosts.port) == (workers, 8001)
    assert config.topology.prefill + config.topology.decode + config.topology.mixed == 0


def test_the_server_has_the_prices_of_the_plan_and_not_those_of_its_own_cpu(
    found: Recommendation, tmp_path: Path
) -> None:
    """It has no GPU, its hosts have: by its own prices an answer of 70B parameters would take seconds a token."""
    path = tmp_path / "serve.toml"
    path.write_text(serve_toml(found))
    config = serve.configuration(build_parser().parse_args(["serve", "--config", str(path)]))
    (decode,) = (group for group in found.best.groups if group.role == "decode")
    (expected_s,) = decode.option.cost.decode_run_s(requests=8, context_tokens=8000, steps=1)
    (step_s,) = load_cost(config.cost, folder=tmp_path).cost.decode_run_s(requests=8, context_tokens=8000, steps=1)
    assert step_s == pytest.approx(expected_s)
    assert step_s < config.slo.tpot_s


def test_a_gpu_of_ones_own_is_described_in_every_file(tmp_path: Path) -> None:
    """A simulator and a server that do not have it in their catalogue price a step as the plan does."""
    found = planned(hardware=[{"name": "H100-NVL", "like": "h100", "memory_bytes": 94e9, "gpus": 8}])
    (decode,) = (group for group in found.best.groups if group.role == "decode")
    asked = {"requests": 8, "context_tokens": 8000, "steps": 1}
    (expected_s,) = decode.option.cost.decode_run_s(**asked)
    spec = load_spec(cluster_yaml(found), form="yaml")
    path = tmp_path / "serve.toml"
    path.write_text(serve_toml(found))
    config = serve.configuration(build_parser().parse_args(["serve", "--config", str(path)]))
    for cost in (spec.cost_model().on(kind_name(decode)), load_cost(config.cost, folder=tmp_path).cost):
        assert cost.decode_run_s(**asked) == [expected_s]
    assert spec.kv_of_kind(kind_name(decode)).blocks == decode.option.facts.kv_tokens_max // 16
    assert any("of H100-80G-SXM" in note for note in make_report(found).notes), "what is borrowed is said"


def test_the_hosts_of_a_group_are_as_the_plan_has_them(found: Recommendation) -> None:
    groups = values(found)["groups"]
    assert [group["replicas"] for group in groups.values()] == [group.workers for group in found.best.groups]
    for told, group in zip(groups.values(), found.best.groups, strict=True):
        args = build_parser().parse_args(["host", "--join", "http://server", *told["args"]])
        assert told["role"] == group.role
        parallel = group.option.cost.parallel
        assert (args.device, args.tp, args.pp) == ("cuda", parallel.tp, parallel.pp)
        assert args.kv_blocks == group.option.facts.kv_tokens_max // 16
        assert told["resources"]["limits"] == {"nvidia.com/gpu": args.tp * args.pp}
        assert told["nodeSelector"] == {"baton.dev/gpu": "H100-80G-SXM"}


def test_a_single_worker_is_the_servers_own(tmp_path: Path) -> None:
    found, path = (
        planned(llm="llama3.1-8b", tp=[2], shape="mixed", hardware=[{"name": "H100", "gpus": 2}]),
        tmp_path / "serve.toml",
    )
    path.write_text(serve_toml(found))
    config = serve.configuration(build_parser().parse_args(["serve", "--config", str(path)]))
    assert (config.topology.mixed, config.parallel.tensor, config.hosts.expected) == (1, 2, 0)
    assert config.kv.blocks == found.best.groups[0].option.facts.kv_tokens_max // 16
    told = values(found)
    assert told["groups"] == {"prefill": None, "decode": None}
    assert told["server"]["workers"] == {"mixed": 1}
    assert told["server"]["resources"]["limits"] == {"memory": None, "nvidia.com/gpu": 2}


def test_what_batons_own_engine_lacks_is_said_in_the_file_and_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.toml"
    flags = ["--llm", "llama3.1-8b", "--hardware", "H100=1", "--tp", "1", "--weights", "fp8", "--ttft-slo-s", "1",
             "--tpot-slo-s", "0.05", "--input-tokens", "500", "--output-tokens", "100", "--objective",
             "goodput-per-gpu", "--finalists", "0", "--serve-config", str(path)]  # fmt: skip
    assert main(["plan", *flags]) == 0
    assert "Baton's own engine has no weights in fp8" in capsys.readouterr().out
    assert "# not as planned: mixed on H100-80G-SXM tp1 fp8" in path.read_text()
    assert "\nblocks" not in path.read_text(), "so many would not fit beside weights in bfloat16"


def test_a_model_of_a_folder_is_expected_on_the_volume(tmp_path: Path) -> None:
    folder = tmp_path / "Org_Model-7B"
    folder.mkdir()
    shape = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256, "model_type": "llama"}  # fmt: skip
    (folder / "config.json").write_bytes(msgspec.json.encode(shape))
    found = planned(llm=str(folder / "config.json"))
    assert served_model(found.question.spec.llm) == str(folder)
    assert values(found)["model"] == {"name": "/models/Org_Model-7B"}
    assert "set model.claim" in helm_values(found)


def test_hub_names_are_of_models_of_the_catalogue() -> None:
    assert hub_names().keys() < models().keys()
    assert all(HUB_NAME.fullmatch(name) for name in hub_names().values())
    nameless = planned(llm="opt-175b", tp=[8], weights=["int8"], shape="best")
    assert "no hub name of this model is known" in serve_toml(nameless)
