"""Every program of benchmarks/ runs to its end and writes its result, in its smallest settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("examples", "src", "tests")
CONVERSATION = "../shared/traces/azure2023/conv.first80.csv.gz"
SETTINGS = {
    "batching": "--rate 20 --requests 2 --repeats 1",
    "conversion": "--tokens 128 --repeats 2 --only int8",
    "decode_balance": "",
    "edge_overhead": "--quick",
    "engine_profile": "--rounds 1",
    "engine_steps": "--threads 1 --dtype float32 --repeats 1",
    "engines": "--only baton --weights int8 --rounds 1 --threads 1 --work work",
    "eviction": "--requests 200 --trace conversation --pool-blocks 1000",
    "gpu_decode": "--rehearse",
    "gpu_fused": "--rehearse",
    "gpu_handoff": "--rehearse",
    "gpu_model": "--rehearse",
    "gpu_staging": "--rehearse",
    "grammars": "--repeats 1",
    "idle_cores": "--rounds 1 --requests 1",
    "lent_workers": "--rounds 1",
    "live_control": "deaths",
    "model_parts": "--repeats 1",
    "moves": "--tokens 60 --rounds 1",
    "native_beside": "--prompt 32 --batch 1 --contexts 64 --rounds 1",
    "native_grid": "--threads 1 --weights int8 --batch 1 --contexts 64 --mixed 32 --rounds 1 --record",
    "native_parts": "--threads 1 --batch 1 --rounds 1",
    "native_steps": "--threads 1 --dtype float32 --repeats 1",
    "patterns": "--requests 8 --prompts 512",
    "patterns live": "--live --rounds 1",
    "planner": "",
    "policy_found": "--case opt13b-2p1d --again",
    "policy_matrix": "--row own-4-mixed --policy baton --seeds 1 --again",
    "precision": "--tokens 96 --steps 2",
    "predictions": "--case yi-34b-mixed",
    "preemption": "--requests 8",
    "pull": "--row own-4-mixed --requests 20 --seeds 1",
    "ranks": "--shapes 1x1 2x1 --threads 1 --layers 2 --repeats 1",
    "roles": "--cluster cpu4 --load chat --turns 1",
    "sampling": "--rows 2 --repeats 1",
    "serving": "--quick",
    "serving against": "--quick --against src --rounds 1",
    "sim_bytecodes": f"--trace {CONVERSATION}",
    "sim_instructions": f"--trace {CONVERSATION}",
    "sim_speed": f"--trace {CONVERSATION} --limit 200 --runs 1",
    "speculation": "--repeats 1 --requests 2",
    "start": "--runs 1",
    "stores": "--folder . --sizes 65536 --total-bytes 1e6 --repeats 1",
    "streaming": "--tokens 512 --rounds 1 --no-links",
    "streaming simulated": "--simulate",
    "tiers": "--requests 50 --trace conversation",
    "transfers": "--tokens 512 --repeats 1 --ways reference shm tcp --no-links --cut-tokens 512",
    "validation": "--topology mixed --requests 5 --calibration 20 --load 0.5",
    "validation_vllm": "--setup rtx4090-llama-8b",
    "published/distserve_example": "",
    "published/distserve_optimum": "--requests 20",
    "published/dynamo_crossover": "--requests 10",
    "published/early_rejection": "--limit 40",
    "published/mooncake_cache": "",
    "published/mooncake_capacity": "--limit 40",
    "published/mooncake_scheduling": "--limit 100",
    "published/sarathi": "--requests 20 --model mistral-7b",
    "published/shifting_load": "--requests 100",
    "published/splitwise_isopower": "--span-s 2 --cluster aa",
    "published/tetriinfer": "--requests 8 --mix mixed",
    "published/transfer": "",
    "published/vtc_bound": "",
    "published/vtc_curves": "--limit 40",
}
"""The settings of each run; a name may have a word after the program's."""
FOREIGN = {
    "gateway_picks": "the extra gateway",
    "serving_peers": "an installed vLLM",
    "vllm_goodput": "an installed vLLM",
    "vllm_overhead": "an installed vLLM",
}
"""Programs that run nothing without software that Baton's tests do not install."""
MODULES = ("record", "published/outcome", "published/systems")
NEEDED = {"sim_instructions": "valgrind", "stores": "fio"}
TRACES = ROOT.parent / "shared" / "traces"
OF_TRACES = (
    *(
        "eviction",
        "policy_found",
        "policy_matrix",
        "pull",
        "sim_bytecodes",
        "sim_instructions",
        "sim_speed",
        "tiers",
        "validation_vllm",
    ),
    *("published/early_rejection", "published/mooncake_cache", "published/mooncake_capacity"),
    "published/mooncake_scheduling",
    *("published/splitwise_isopower", "published/tetriinfer", "published/vtc_curves"),
)
"""Programs that read traces, which lie beside this repository."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the benchmarks, so that their results do not replace those of this repository."""
    root = tmp_path_factory.mktemp("copy") / "repository"
    shutil.copytree(ROOT / "benchmarks", root / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKED:
        (root / name).symlink_to(ROOT / name)
    if (ROOT.parent / "shared").exists():
        (root.parent / "shared").symlink_to(ROOT.parent / "shared")
    return root


def test_every_program_has_settings() -> None:
    folder = ROOT / "benchmarks"
    programs = [*folder.glob("[!_]*.py"), *(folder / "published").glob("*.py")]
    names = {program.relative_to(folder).with_suffix("").as_posix() for program in programs}
    assert names == {name.split()[0] for name in SETTINGS} | set(FOREIGN) | set(MODULES)


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_benchmark_runs_to_its_end(name: str, copy: Path) -> None:
    if (needed := NEEDED.get(name)) and shutil.which(needed) is None:
        pytest.skip(f"benchmarks/{name}.py needs {needed}")
    if name in OF_TRACES and not TRACES.exists():
        pytest.skip("the traces of the benchmarks are not beside the repository, in ../shared/traces")
    results = copy / "benchmarks" / "results"
    before = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    paths = (str(ROOT / "src"), str(ROOT), str(ROOT / "examples" / "policies"))
    command = [sys.executable, f"benchmarks/{name.split()[0]}.py", *SETTINGS[name].split()]
    done = subprocess.run(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": str(int(name.startswith("gpu_")))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} != before, "no result was written"
