"""The Triton kernels equal the reference in Triton's interpreter on CPU tensors, and compile for a GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.compute.torch.kernels.paged_decode import decode_tables
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.reference import ReferenceBackend
from baton.decide.kv.layout import KVLayout
from tests.seeds import Seeds
from tests.unit.compute.reference_kernels import TorchDecodeKernel

ROOT = Path(__file__).resolve().parents[3]
TOLERANCE = 3e-5
"""The tolerance of float32 sums of up to 150 products of numbers around 1."""
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason='triton is not installed: pip install -e ".[triton]"'
)


def _lines(tmp_path: Path, module: str, *arguments: str, **environment: str) -> dict[str, str]:
    """Run a module of cases in a separate process, which selects the interpreter before it imports triton."""
    command = [sys.executable, "-m", f"tests.unit.compute.{module}", *arguments]
    settings = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", **environment}
    # With AVX2, OpenBLAS rounds the last rows of a product in another way, and the interpreter multiplies by it.
    settings["OPENBLAS_CORETYPE"] = "Sandybridge"
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.rsplit(": ", 1) for line in done.stdout.splitlines())


@needs_triton
def test_the_kernels_equal_the_formula_in_the_interpreter(tmp_path: Path, seeds: Seeds) -> None:
    """Ragged requests, groups, windows, stored types, latents, a mixed step; the same bits alone and in a batch.

    Decode in one launch and in two gives the same bits, and so do chunks with decode.

    Then random batches: heads of 64 to 256 and latents of 512 + 64, blocks of 8 to 128 tokens, windows, empty
    requests, far offsets.
    """
    examples = 60 if seeds.deep else 4
    lines = _lines(tmp_path, "triton_cases", str(examples), TRITON_INTERPRET="1")
    assert int(lines.pop("equal")) > examples // 2
    found = {name: float(worst) for name, worst in lines.items()}
    assert len(found) == 58
    same = [found.pop(name) for name in list(found) if name.startswith("same bits")]
    assert same == [0, 0, 0, 0, 0, 0, 0, 0]
    assert {name: worst for name, worst in found.items() if not worst < TOLERANCE} == {}


@needs_triton
@pytest.mark.parametrize(
    ("numbers", "shapes", "capability", "binaries"),
    [
        pytest.param("bf16", "group3_dim64", "90", 13, id="h200"),
        *(
            pytest.param(numbers, "all", capability, count, id=f"{numbers}-sm_{capability}", marks=pytest.mark.deep)
            for numbers, count in (("bf16", 52), ("fp32", 51))
            for capability in ("80", "90", "100")
        ),
    ],
)
def test_the_launched_kernels_compile_without_spills(
    numbers: str, shapes: str, capability: str, binaries: int, tmp_path: Path
) -> None:
    """With the options of a launch, for grouped and latent attention and for experts. They are not run.

    Latent attention, other sizes of heads, and chunks over fp8 are compiled in a deep run, which takes about a minute
    of CPU for each type of numbers and device.
    """
    found = _lines(tmp_path, "triton_compile", numbers, shapes, capability)
    assert len(found) == binaries
    assert {name: figures for name, figures in found.items() if int(figures.split()[1])} == {}
    shared = {name: int(figures.split()[2]) for name, figures in found.items()}
    programs = [path for kernel in ("split", "chunk", "fused") for path in tmp_path.rglob(f"{kernel}_kernel.ptx")]
    assert programs
    # A pass copies the keys and values of the next one meanwhile, and waits for its own only.
    assert [path for path in programs if not re.search(r"cp\.async\.wait_group\s+[1-9]", path.read_text())] == []
    limit = {"80": 166_912, "90": 232_448, "100": 232_448}[capability]
    assert {name: size for name, size in shared.items() if size > limit} == {}


@needs_triton
def test_a_layer_of_a_decode_step_is_at_most_11_launches(tmp_path: Path) -> None:
    """A launch takes a GPU several microseconds, however little it computes. A mixed step adds chunks, unless fused."""
    launched = _lines(tmp_path, "triton_launches", "llama-3.1-8b")
    counts = {name.split()[1]: int(words.split()[0]) for name, words in launched.items()}
    assert counts["decode"] <= 11, launched
    assert counts["fused"] <= 10 < counts["triton"], launched


@pytest.mark.parametrize("window", [None, 1, 40])
def test_the_torch_decode_kernel_equals_the_formula(window: int | None) -> None:
    """Lengths at the edges of blocks and splits. Entries after a request's last block are not read."""
    torch.manual_seed(2)
    layout = KVLayout(layers=2, kv_heads=2, head_dim=8, block_tokens=16, dtype="float32")
    lengths = [1, 16, 17, 512, 513, 700]
    counts = [-(-length // 16) for length in lengths]
    kv = PagedKV(torch.full((layout.block_bytes * sum(counts),), 255, dtype=torch.uint8), layout)
    tables = torch.randperm(sum(counts)).split(counts)
    rows = [
        Row(first=index, count=1, start=length - 1, blocks=blocks)
        for index, (length, blocks) in enumerate(zip(lengths, tables, strict=True))
    ]
    everything = [Row(first=0, count=row.total, start=0, blocks=row.blocks) for row in rows]
    shape = (sum(lengths), 2, 8)
    kv.write(1, kv.slots(everything), torch.randn(shape), torch.randn(shape))
    queries = torch.randn(len(rows), 6, 8)
    mine = TorchDecodeKernel().plan(decode_tables(rows, queries.device), kv).run(1, queries, window)
    torch.testing.assert_close(mine, ReferenceBackend().plan(rows, kv).run(1, queries, window), atol=1e-5, rtol=1e-5)
