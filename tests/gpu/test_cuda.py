"""What only a GPU can show: Triton's kernels in bfloat16, replayed graphs, device memory between processes, a server.

`make gpu` runs these; anywhere else they skip. The same code runs on CPU tensors in tests/unit/compute.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.compute.models.resolve import resolve_model
from baton.compute.torch.engine import TorchEngine
from baton.compute.torch.kernels.attention_backend import ReferenceBackend
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.load_torch import load_torch_engine
from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import create_cuda_arena
from baton.move.arena.cuda_driver import CudaDriver
from tests.numerics.test_architectures import CONFIGS, TOKENS
from tests.serving import serving
from tests.unit.compute.models import engine_of, part_of, run, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} finds no CUDA device"),
]
BLOCK_TOKENS = 16
READER = """
import sys, torch
from baton.move.arena.cuda import open_cuda_arena
from baton.move.arena.cuda_driver import CudaDriver
arena = open_cuda_arena([(CudaDriver(0), int(sys.argv[2]))], int(sys.argv[1]))
data = torch.as_tensor(arena.memory, device="cuda:0")
print(int(data.sum()))
data.fill_(3)
torch.cuda.synchronize()
"""


def test_device_memory_is_shared_between_processes() -> None:
    """Torch uses the memory without a copy in both processes."""
    size = 4 << 20
    arena = create_cuda_arena([(CudaDriver(0), size)])
    data = torch.as_tensor(arena.memory, device="cuda:0")
    data.fill_(1)
    torch.cuda.synchronize()
    command = [sys.executable, "-c", READER, str(arena.fd), str(size)]
    done = subprocess.run(command, pass_fds=[arena.fd], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(size)), done.stderr
    assert int(data.sum()) == 3 * size
    del data
    arena.close()


@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (4, 2, 80)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_grouped_kernels_equal_the_formula(heads: tuple[int, int, int], dtype: str) -> None:
    _compare(heads, dtype, rope_dim=0)


@pytest.mark.parametrize("heads", [(16, 1, 576), (128, 1, 576)], ids=str)
def test_latent_kernels_equal_the_formula(heads: tuple[int, int, int]) -> None:
    """With DeepSeek's sizes."""
    _compare(heads, "bfloat16", rope_dim=64)


def _compare(heads: tuple[int, int, int], dtype: str, *, rope_dim: int) -> None:
    from baton.compute.triton.launch import TritonBackend, TritonDecodeKernel  # needs triton

    torch.manual_seed(0)
    count, kv_heads, head_dim = heads
    layout = KVLayout(
        layers=2,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=BLOCK_TOKENS,
        dtype=dtype,
        planes=1 if rope_dim else 2,
    )
    number = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    lengths = [1, 17, 512, 513, 2049]
    sizes = [-(-length // BLOCK_TOKENS) for length in lengths]
    kv = PagedKV(torch.zeros(layout.block_bytes * sum(sizes), dtype=torch.uint8, device="cuda"), layout)
    kv.data.copy_(torch.randn(kv.data.shape))
    tables = torch.randperm(sum(sizes)).split(sizes)
    rows = [
        Row(first=index, count=1, start=length - 1, blocks=blocks)
        for index, (length, blocks) in enumerate(zip(lengths, tables, strict=True))
    ]
    queries = torch.randn(len(rows), count, head_dim, device="cuda").to(number)
    mine = TritonBackend(TritonDecodeKernel(products=number, rope_dim=rope_dim)).plan(rows, kv).run(1, queries, None)
    expected = ReferenceBackend().plan(rows, kv).run(1, queries, None)
    shown = slice(0, head_dim - rope_dim)
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-4
    torch.testing.assert_close(
        mine.view_as(queries)[..., shown], expected.view_as(queries)[..., shown], atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("name", ["llama_tied", "mistral_window", "qwen2moe", "deepseek3"])
def test_decoding_on_a_gpu_gives_the_results_of_the_host(name: str, tmp_path: Path) -> None:
    """Batches of two sizes, so that a graph is captured after another was used."""
    tiny_model(CONFIGS[name]).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype="float32")
    arena = torch.zeros(layout.block_bytes * 32, dtype=torch.uint8, device="cuda")
    ours = load_torch_engine(card, layout, arena, dtype="float32", threads=1, device="cuda:0")
    host = engine_of(card, blocks=32, block_tokens=BLOCK_TOKENS, kind="torch")[0]
    assert _decode(ours) == _decode(host)


def _decode(engine: TorchEngine) -> list[list[int]]:
    texts = [list(TOKENS[:20]), list(TOKENS[5:40]), list(TOKENS[9:14])]
    tables = [range(8), range(8, 16), range(16, 24)]
    for text, table in zip(texts, tables, strict=True):
        text.append(run(engine, part_of(text, table))[0].token)
    for turn in range(12):
        live = [0, 1, 2] if turn % 3 else [0, 2]
        parts = [part_of(texts[index], tables[index], start=len(texts[index]) - 1) for index in live]
        for index, result in zip(live, run(engine, *parts), strict=True):
            texts[index].append(result.token)
    return texts


def test_a_server_on_a_gpu_hands_off_within_device_memory() -> None:
    """A prefill and a decode worker share an arena on the device: the text of a CPU server, without copies."""
    bodies = [{"prompt": f"The number {index} comes after", "max_tokens": 12, "temperature": 0} for index in range(6)]
    answers = []
    for device in ("cuda", "cpu"):
        with serving("--device", device, "--dtype", "float32", "--prefill", "1", "--decode", "1") as server:
            with server.client() as client:
                found = [client.post("/v1/completions", json=body).raise_for_status().json() for body in bodies]
            assert server.metric("baton_handoff_bytes_total") == 0
        answers.append([answer["choices"][0]["text"] for answer in found])
    assert answers[0] == answers[1]
