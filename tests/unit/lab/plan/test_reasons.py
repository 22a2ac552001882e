"""What binds a worker, in words that fit the shares of the peaks beside them."""

from __future__ import annotations

import pytest

from baton.lab.plan.candidates import list_candidates
from baton.lab.plan.cluster import cluster_spec
from baton.lab.plan.play import FleetResults, PlayLength
from baton.lab.plan.reasons import not_recommended, reasons
from baton.lab.plan.verify import VerifiedFleet
from baton.lab.report.summary import SloTargets, summarize
from tests.unit.lab.plan.questions import WORKED, search


@pytest.mark.parametrize(
    ("llm", "tp", "bound"),
    [
        ("smollm2-135m", 1, "is bound by overhead:"),
        ("qwen3-0.6b", 2, "is bound by overhead and exchange between GPUs:"),
        ("llama3.1-8b", 1, "is bound by memory bandwidth:"),
    ],
)
def test_a_step_that_uses_little_of_either_peak_is_bound_by_neither(llm: str, tp: int, bound: str) -> None:
    found = search(
        {
            "llm": llm, "tp": [tp], "objective": "goodput-per-gpu", "hardware": [{"name": "H100", "gpus": 2 * tp}],
            "slo": {"ttft_s": 1.0, "tpot_s": 0.03}, "workload": {"input_tokens": 20, "output_tokens": 20},
        }
    )  # fmt: skip
    fleet = found.fleet("disaggregated")
    assert fleet is not None
    decode = next(line for line in reasons(fleet, found.demand) if line.startswith("decode"))
    assert bound in decode


TWO_LINKS = {
    "llm": "llama3.1-8b", "tp": [1], "shape": "disaggregated", "objective": "goodput-per-gpu",
    "hardware": [
        {"name": "H100", "gpus": 2, "usd_per_hour": 2.0, "link_bytes_per_s": 50e9},
        {"name": "H100", "gpus": 2, "usd_per_hour": 5.0, "link_bytes_per_s": 1e8},
    ],
    "slo": {"ttft_s": 1.0, "tpot_s": 0.05}, "workload": {"input_tokens": 2000, "output_tokens": 200, "rate_rps": 40.0},
}  # fmt: skip


def test_one_gpu_on_two_networks_is_two_kinds_of_worker() -> None:
    """Both had one name, and the simulated cluster had the slow network's wire for all."""
    fleet = search(TWO_LINKS).fleet("disaggregated")
    assert fleet is not None
    wires = {
        name: kind.cost["wire"]["bytes_per_s"]
        for name, kind in cluster_spec(fleet, same_host=False).kinds.items()
        if kind.cost is not None
    }
    assert set(wires.values()) == {50e9, 1e8}
    assert all(name.endswith("-at-50-gb-s-tp1" if rate > 1e9 else "-at-0.1-gb-s-tp1") for name, rate in wires.items())


def test_a_network_that_carries_less_than_both_sides_is_what_is_scarce() -> None:
    hardware = [{"name": "H100", "gpus": 2, "link_bytes_per_s": 1e8}]
    found = search({**TWO_LINKS, "hardware": hardware, "reach": "network"})
    fleet = found.fleet("disaggregated")
    assert fleet is not None
    assert any(line.startswith("the network is scarcer than both sides") for line in reasons(fleet, found.demand))


@pytest.mark.parametrize(("is_played", "verdict"), [(True, "missed the SLO"), (False, "dearer")])
def test_a_fleet_that_is_behind_is_listed_with_the_result_of_its_simulation(is_played: bool, verdict: str) -> None:
    """Where neither shape holds, the one that is behind on paper has been played, too."""
    found = search(WORKED, tp=[1])
    best, behind = found.fleet("disaggregated"), found.fleet("mixed")
    assert best is not None
    assert behind is not None
    played = FleetResults(
        length=PlayLength(0, 1, 1), results=summarize([], slo=SloTargets(), wall_s=0.0), ratios=(0.5,)
    )
    other = VerifiedFleet(fleet=behind, derate=1.0, played=played if is_played else None, holds=False)
    listed = list_candidates(found, best, {"mixed": other})
    assert next(each.verdict for each, _ in listed if each.fleet == behind.name) == verdict
    line = next(line for line in not_recommended(found, listed) if line.startswith(behind.name))
    assert "x worse" in line
    assert ("this shape missed the SLO in simulation" in line) == is_played
