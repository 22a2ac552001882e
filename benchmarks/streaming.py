"""What is left of a KV transfer when the prompt is computed: sent whole then, by chunk before, or by layer.

python benchmarks/streaming.py [--tokens 512 1024 2048 4096] [--rounds 3] [--no-links]    # SmolLM2 between two hosts
python benchmarks/streaming.py --simulate                                                 # Llama-3.1-8B on H100s

Live: a prefill host and a decode host, processes of this machine with a thread each, over loopback (TCP) and over links
of 25 and 1 Gb/s, which need root and iproute2. A prompt of random tokens is asked for alone. Its exposed seconds are
`timings.handoff_s` (first token out to standing in decode's batch: messages and scheduling are in it), its transfer
seconds those of the same prompt sent whole. Simulated: virtual time, so the same figures on every machine; exposed is
the gap before the second token beyond that of one host, where no byte moves. Both play the same deciding code.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from baton.core.types import Request, RequestId, Sampling  # noqa: E402  the path comes first
from baton.decide.kv.hashing import block_hashes  # noqa: E402
from baton.decide.policy.policy_sets import policy_set  # noqa: E402
from baton.decide.policy.streaming import StreamingPolicy, WhenDone, WhileComputing  # noqa: E402
from baton.lab.sim.build import build_cluster  # noqa: E402
from baton.lab.sim.engines import LengthEngine  # noqa: E402
from baton.lab.sim.journal import Journal  # noqa: E402
from baton.lab.sim.policies import configured_policies  # noqa: E402
from baton.lab.sim.spec import load_spec  # noqa: E402
from tests.hosting import cluster  # noqa: E402
from tests.process.test_namespaces import MISSING, Net, cluster_in  # noqa: E402
from tests.serving import RunningServer  # noqa: E402

MODES = ("whole", "chunk", "layer")
TOKEN_BYTES = 2 * 30 * 3 * 64 * 2
"""KV of a token of SmolLM2-135M in bfloat16."""
LINKS_GBPS = {"loopback": 100.0, "25 Gb/s": 25.0, "1 Gb/s": 1.0}
"""What the cost model is told of each. Loopback has no such limit."""
SIMULATED_GBPS = (400, 100, 25, 10)
SIMULATED_TOKENS = (512, 2048, 7500, 32000)
LLAMA_LAYERS, LLAMA_TOKEN_BYTES = 32, 2 * 32 * 8 * 128 * 2

# ---- live


def config_of(mode: str, gbps: float) -> str:
    """A server's configuration: when KV is sent, and what the way costs."""
    use = "WhenDone" if mode == "whole" else "WhileComputing"
    options = "options = {layer_groups_max = 1}\n" if mode == "chunk" else ""
    return (
        f"[policy.streaming]\nuse = 'baton.decide.policy.streaming:{use}'\n{options}"
        f"[cost]\nmodel = 'linear'\nhandoff_token_s = {TOKEN_BYTES * 8 / (gbps * 1e9):.3e}\n"
        "[hosts]\ntransports = ['tcp']\n"
    )


@contextmanager
def served(mode: str, link: str) -> Iterator[RunningServer]:
    """Two hosts with that link between them."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "baton.toml"
        path.write_text(config_of(mode, LINKS_GBPS[link]))
        given = ("smollm2-135m", "--dtype", "bfloat16", "--config", str(path))
        if link == "loopback":
            hosts = {"a": ("--prefill", "1", "--threads", "1"), "b": ("--decode", "1", "--threads", "1")}
            server, _ = stack.enter_context(cluster(given[0], hosts, *given[1:]))
        else:
            net = Net()
            stack.callback(net.close)
            net.add("a", 2)
            net.add("b", 3)
            net.shape("a", f"{LINKS_GBPS[link]:g}gbit", burst=f"{LINKS_GBPS[link] * 125:g}kb")  # a millisecond's
            server, _ = stack.enter_context(cluster_in(net, given[0], *given[1:]))
        yield server


def ask(server: RunningServer, tokens: int, seed: int) -> dict[str, Any]:
    """Ask for two tokens after a prompt that nobody has seen. Returns the timings."""
    draw = random.Random(seed)
    prompt = [draw.randrange(1000, 40000) for _ in range(tokens)]
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    with server.client(timeout_s=300) as client:
        answer = client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return answer.json()["timings"]


def measure(sizes: list[int], rounds: int, links: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for link in links:
        whole_s: dict[int, float] = {}
        for mode in MODES:
            with served(mode, link) as server:
                ask(server, 300, 0)
                for tokens in sizes:
                    timings = [ask(server, tokens, 1 + tokens * 100 + index) for index in range(rounds)]
                    exposed_s = statistics.median(timing["handoff_s"] for timing in timings)
                    prefill_s = statistics.median(timing["prefill_s"] for timing in timings)
                    whole_s.setdefault(tokens, exposed_s)  # the first mode
                    row = _row(link, mode, tokens, exposed_s, whole_s[tokens], prefill_s)
                    rows.append({**row, "runs_s": [timing["handoff_s"] for timing in timings]})
    return rows


def _row(link: str, mode: str, tokens: int, exposed_s: float, transfer_s: float, prefill_s: float) -> dict[str, Any]:
    return {
        "link": link,
        "mode": mode,
        "tokens": tokens,
        "prefill_s": prefill_s,
        "exposed_s": exposed_s,
        "transfer_s": transfer_s,
        "exposed_ratio": exposed_s / transfer_s,
    }


# ---- simulated


def simulate() -> list[dict[str, Any]]:
    """Every link, prompt and mode on two H100s, one that prefills and one that decodes."""
    policies: dict[str, StreamingPolicy] = {
        "whole": WhenDone(),
        "chunk": WhileComputing(layer_groups_max=1),
        "layer": WhileComputing(layer_groups_max=LLAMA_LAYERS),
    }
    rows: list[dict[str, Any]] = []
    for gbps in SIMULATED_GBPS:
        for tokens in SIMULATED_TOKENS:
            near_s, prefill_s = _gap_s(gbps, tokens, WhenDone(), hosts=("a", "a"))
            transfer_s = 0.0
            for mode, policy in policies.items():
                far_s, _ = _gap_s(gbps, tokens, policy, hosts=("a", "b"))
                exposed_s = far_s - near_s
                transfer_s = transfer_s or exposed_s  # the first mode
                rows.append(_row(f"{gbps} Gb/s", mode, tokens, exposed_s, transfer_s, prefill_s))
    return rows


def _gap_s(gbps: int, tokens: int, policy: StreamingPolicy, hosts: tuple[str, str]) -> tuple[float, float]:
    """Play one request. Returns the seconds between its first two tokens, and those of its prefill."""
    spec = load_spec(
        f"layers = {LLAMA_LAYERS}\n"
        f"workers = [{{role = 'prefill', host = '{hosts[0]}', kind = 'h100'}},"
        f" {{role = 'decode', host = '{hosts[1]}', kind = 'h100'}}]\n"
        "[batch]\nstep_tokens_max = 2048\n[kv]\nblock_tokens = 16\n"
        "[kinds.h100.cost]\nmodel = 'roofline'\nllm = 'llama3.1-8b'\nhardware = 'H100-80G-SXM'\n"
        f"[kinds.h100.cost.wire]\nbytes_per_s = {gbps / 8 * 1e9}\nlatency_s = 0.0005\nblock_tokens = 16\n"
    )
    ours = configured_policies(policy_set("baton"), spec)
    played = build_cluster(
        spec,
        replace(ours, cluster=replace(ours.cluster, streaming=policy)),
        lambda host: LengthEngine({RequestId("r"): 4}, layers=spec.layers),
        seed=0,
        journal=Journal(keep_log=False),
        closed=lambda life: None,
    )
    prompt = range(tokens)
    request = Request(
        id=RequestId("r"),
        prompt_tokens=tokens,
        block_hashes=block_hashes(prompt, block_tokens=16, cache_salt=""),
        output_tokens_max=8,
        arrived_at_s=1.0,
        sampling=Sampling(stop_token_ids=(0,)),
    )
    played.loop.at(1.0, lambda: played.server.submit(request, prompt))
    played.loop.run(until_s=math.inf, events_max=10**6, after_each=lambda: None)
    life = played.server.journal.lives[request.id]
    assert life.started_at_s is not None, "the request never ran"
    first_s, second_s = life.token_times_s[:2]
    return second_s - first_s, first_s - life.started_at_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-links", action="store_true", help="loopback only")
    options = parser.parse_args()
    if options.simulate:
        setting = {"llm": "llama3.1-8b", "layers": LLAMA_LAYERS, "token_bytes": LLAMA_TOKEN_BYTES, "step_tokens": 2048}
        record.write("streaming-simulated", {**setting, "rows": simulate()})
        return 0
    links = ["loopback"] if options.no_links or MISSING else list(LINKS_GBPS)
    left_out = f"shaped links need {MISSING}" if MISSING else ""
    rows = measure(options.tokens, options.rounds, links)
    record.write("streaming", {"token_bytes": TOKEN_BYTES, "left_out": left_out, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
