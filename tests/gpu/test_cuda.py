"""What only a GPU can show: Triton's kernels in bfloat16, replayed graphs, device memory between processes, a server.

`make gpu` runs these; anywhere else they skip. The same code runs on CPU tensors in tests/unit/compute. The models
have random weights, and no package beyond those of tools/gpu_pack.txt is needed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from baton.compute.models.card import ModelCard
from baton.compute.models.resolve import resolve_model
from baton.compute.torch.engine import TorchEngine
from baton.compute.torch.kernels import e4m3
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.reference import ReferenceBackend
from baton.compute.torch.load_torch import TorchComputation, load_torch_engine
from baton.core.step import Step
from baton.decide.kv.layout import KVDtype, KVLayout
from baton.move.arena.cuda import create_cuda_arena
from baton.move.arena.cuda_driver import CudaDriver
from tests.attention_cases import DECODE_LAYERS
from tests.dummies import small
from tests.sampler_cases import compare_draws
from tests.serving import serving
from tests.unit.compute.steps import all_logprobs, part_of, run

pytestmark = pytest.mark.gpu
BLOCK_TOKENS = 16
VOCAB = 300
TOKENS = [(7 * index * index + 13 * index) % VOCAB for index in range(64)]
MODELS = {
    "grouped": ("llama-3.1-8b", {}),
    "window": (
        "llama-3.1-8b",
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 24},
    ),
    "experts": ("qwen3-30b-a3b", {}),
    "latent": ("deepseek-v2-lite", {}),
}
TOLERANCE = 2e-3
"""The largest difference of a log probability, in float32 with other kernels and without TF32."""
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


@pytest.mark.usefixtures("gpu")
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
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8"])
@pytest.mark.parametrize("form", ["triton", "persistent", "fused"])
def test_grouped_kernels_equal_the_formula(device: str, heads: tuple[int, int, int], dtype: KVDtype, form: str) -> None:
    _compare(device, heads, dtype, form, rope_dim=0)


@pytest.mark.parametrize("heads", [(16, 1, 576), (128, 1, 576)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("form", ["triton", "persistent"])
def test_latent_kernels_equal_the_formula(device: str, heads: tuple[int, int, int], dtype: KVDtype, form: str) -> None:
    """With DeepSeek's sizes."""
    _compare(device, heads, dtype, form, rope_dim=64)


def _compare(device: str, heads: tuple[int, int, int], dtype: KVDtype, form: str, *, rope_dim: int) -> None:
    """Compare two runs of one plan, so that a launch is seen to leave its counters at zero. fused: with chunks."""
    from baton.compute.triton.fused import FusedBackend, ticket_pools  # needs triton
    from baton.compute.triton.launch import TritonBackend, TritonDecodeKernel
    from baton.compute.triton.persistent import PersistentDecodeKernel

    torch.manual_seed(0)
    count, kv_heads, head_dim = heads
    layout = KVLayout(
        layers=DECODE_LAYERS,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=BLOCK_TOKENS,
        dtype=dtype,
        planes=1 if rope_dim else 2,
    )
    number = torch.float32 if dtype == "float32" else torch.bfloat16
    products = torch.float32 if device == "cpu" else number  # Triton's interpreter has no bfloat16 products
    lengths = [1, 17, 513] if device == "cpu" else [1, 17, 512, 513, 2049]
    sizes = [-(-length // BLOCK_TOKENS) for length in lengths]
    kv = PagedKV(torch.zeros(layout.block_bytes * sum(sizes), dtype=torch.uint8, device=device), layout)
    random_numbers = torch.randn(*kv.data.shape[:-1], head_dim)
    kv.data.copy_(e4m3.encode(random_numbers) if dtype == "fp8" else random_numbers)
    tables = torch.randperm(sum(sizes)).split(sizes)
    new = [1, 9, 1, 300, 1][: len(lengths)] if form == "fused" else [1] * len(lengths)
    rows = [
        Row(first=sum(new[:index]), count=new[index], start=length - new[index], blocks=blocks)
        for index, (length, blocks) in enumerate(zip(lengths, tables, strict=True))
    ]
    queries = torch.randn(sum(new), count, head_dim, device=device).to(number)
    kernel = (PersistentDecodeKernel if form == "persistent" else TritonDecodeKernel)(products, rope_dim)
    pools = 1 if device == "cpu" else ticket_pools()
    backend = FusedBackend(kernel, programs=264, pools=pools) if form == "fused" else TritonBackend(kernel)
    plan = backend.plan(rows, kv)
    expected = ReferenceBackend().plan(rows, kv).run(1, queries, None)
    shown = slice(0, head_dim - rope_dim)
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    for _ in range(2):
        mine = plan.run(1, queries, None).view_as(queries)[..., shown]
        torch.testing.assert_close(mine, expected.view_as(queries)[..., shown], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("nucleus_tokens", [1024, 5])
def test_the_sampler_draws_the_tokens_of_the_host(device: str, nucleus_tokens: int) -> None:
    """Every option, masks of grammars included. The device's exponentials may move one draw of 500 over an edge."""
    counts = [compare_draws(seed, nucleus_tokens, device) for seed in range(40)]
    assert sum(differing for _, differing in counts) <= 1


LOST = """
import sys, torch
from baton.core.errors import DeviceError
from baton.core.step import Step
from tests.gpu.test_cuda import TOKENS, card_of, engine_on, part_of
engine = engine_on("cuda:0", card_of("grouped", sys.argv[1]))
step = Step((part_of(TOKENS[:20], range(8), end=9, sample=False),))
engine.execute(step)
torch.zeros(4, device="cuda:0")[torch.tensor([9], device="cuda:0")]
for attempt in range(2):
    try:
        engine.execute(step)
    except DeviceError as error:
        print(f"lost: {error}")
"""
SMALL_MEMORY = """
import sys, torch
from baton.core.errors import StepMemoryError
from baton.core.step import Step
from tests.gpu.test_cuda import TOKENS, card_of, engine_on, part_of
engine = engine_on("cuda:0", card_of("grouped", sys.argv[1]))
torch.cuda.empty_cache()
torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
many = Step(tuple(part_of(TOKENS * 40, range(200), end=2500, sample=False) for _ in range(64)))
try:
    engine.execute(many)
except StepMemoryError as error:
    print(f"refused: {error}")
torch.cuda.set_per_process_memory_fraction(1.0)
print(engine.execute(Step((part_of(TOKENS[:20], range(8)),))).slices[0].token is not None)
"""


def card_of(name: str, folder: str | Path) -> ModelCard:
    """Return a model with a short context, because an engine captures graphs for each context length."""
    shape, changes = MODELS[name]
    return structs.replace(resolve_model(small(shape, Path(folder), **changes), "dummy"), context_tokens=4096)


def engine_on(device: str, card: ModelCard) -> TorchEngine:
    """Load an engine over an arena of NaN."""
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype="float32")
    arena = torch.full((layout.block_bytes * 256,), 0xFF, dtype=torch.uint8, device=device)
    return load_torch_engine(card, layout, arena, TorchComputation(dtype="float32", threads=2, device=device))


@pytest.mark.parametrize("name", MODELS)
def test_decoding_on_a_gpu_gives_the_results_of_the_host(name: str, device: str, tmp_path: Path) -> None:
    """Batches of two sizes, so that a graph is captured after another was used."""
    card = card_of(name, tmp_path)
    ours, host = engine_on(device, card), engine_on("cpu", card)
    ours.warm_up()
    assert _decode(ours) == _decode(host)
    table = range(30, 40)
    difference = all_logprobs(ours, TOKENS, table, VOCAB) - all_logprobs(host, TOKENS, table, VOCAB)
    assert np.abs(difference).max() < TOLERANCE


def test_a_step_without_a_sample_returns_with_its_kv_written(gpu: str, tmp_path: Path) -> None:
    """The kernels wait for a busy device; the driver copies the blocks past torch's stream."""
    card = card_of("grouped", tmp_path)
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype="float32")
    arena = torch.full((layout.block_bytes * 4,), 0xFF, dtype=torch.uint8, device=gpu)
    engine = load_torch_engine(card, layout, arena, TorchComputation(dtype="float32", threads=2, device=gpu))
    step = Step((part_of(TOKENS[:20], range(4), end=BLOCK_TOKENS, sample=False),))
    engine.execute(step)
    expected = arena[: layout.block_bytes].clone()
    arena.fill_(0xFF)
    torch.cuda._sleep(2_000_000_000)  # about a second
    engine.execute(step)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        assert torch.equal(arena[: layout.block_bytes], expected)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (LOST, ["lost: cuda:0 can no longer compute", "lost: cuda:0 can no longer compute"]),
        (SMALL_MEMORY, ["refused: a step of 160000 tokens in 64 requests does not fit", "True"]),
    ],
    ids=["device_assert", "out_of_memory"],
)
def test_a_lost_device_and_missing_memory_have_their_own_errors(program: str, words: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == len(words), done.stderr[-3000:]
    for line, start in zip(lines, words, strict=True):
        assert line.startswith(start)


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


def test_a_server_on_a_gpu_hands_off_within_device_memory(device: str, tmp_path: Path) -> None:
    """A prefill and a decode worker share an arena on the device: the text of a CPU server, without copies."""
    model = (small("llama-3.1-8b", tmp_path), "--load-format", "dummy", "--dtype", "float32", "--context-tokens", "512")
    bodies = [{"prompt": f"The number {index} comes after", "max_tokens": 12, "temperature": 0} for index in range(6)]
    answers = []
    for place in (device, "cpu"):
        with serving(*model, "--device", place, "--prefill", "1", "--decode", "1") as server:
            with server.client() as client:
                found = [client.post("/v1/completions", json=body).raise_for_status().json() for body in bodies]
            assert server.metric("baton_handoff_bytes_total") == 0
        answers.append([answer["choices"][0]["text"] for answer in found])
    assert answers[0] == answers[1]
    assert any(answers[0])
