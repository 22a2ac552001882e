"""Stores: put and get of KV blocks, beside fio on the same disk and beside other people's pools of KV.

python benchmarks/stores.py --folder /var/tmp/kv [--sizes 65536 1048576 67108864] [--total-bytes 1e9] [--repeats 3]
                            [--only file ...] [--install FOLDER | --peers FOLDER] [--name stores]

`--install FOLDER` makes the peers' environments there where they are missing, then measures with them. `--folder` must
be on the disk that is meant. Each figure is a median, in GB/s of blocks: `one` is a call per block, as the other pools
are used; `batch` gives 64 MiB a call, as our tiers do. Puts go to empty slots (`new`) and to used ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import random
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import record

from baton.core.types import BlockHash
from baton.move.store.port import Store
from baton.move.store.segments import slot_bytes
from baton.move.store.store_url import open_store
from tests.mooncake_servers import PACKAGE, mooncake

try:
    import redis
except ImportError:
    redis = None

HERE = Path(__file__).resolve().parent
BATCH_BYTES = 64 << 20
LMCACHE = (
    *("numba", "prometheus_client", "py-cpuinfo", "psutil", "cachetools", "pyyaml", "sortedcontainers"),
    *("aiofile", "msgspec", "pyzmq"),
)
"""What LMCache imports on a CPU. All that it asks for has CUDA's toolkit in it; it is put on our torch instead."""
PEERS = ("mooncake store", "lmcache local", "lmcache server", "redis directly")
Blocks = list[tuple[BlockHash, memoryview]]
PackageMissing = pytest.skip.Exception


@dataclass(frozen=True, slots=True)
class Size:
    """One row of the table: so many blocks of so many bytes, moved so many times."""

    block_bytes: int
    blocks: int
    repeats: int

    @property
    def batch(self) -> int:
        return max(1, min(self.blocks, BATCH_BYTES // self.block_bytes))


def filled_blocks(size: Size) -> Blocks:
    """Random bytes in memory that is aligned and faulted in, as an arena's is."""
    memory = memoryview(mmap.mmap(-1, size.block_bytes * size.blocks, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    np.frombuffer(memory, np.uint8)[:] = np.frombuffer(np.random.default_rng(0).bytes(memory.nbytes), np.uint8)
    names = [BlockHash(hashlib.blake2b(str(n).encode(), digest_size=16).digest()) for n in range(size.blocks)]
    return [(name, memory[n * size.block_bytes : (n + 1) * size.block_bytes]) for n, name in enumerate(names)]


def timed(call: Callable[[Blocks], list[bool]], blocks: Blocks, batch: int) -> dict[str, float]:
    """Move all blocks, so many a call. Returns GB/s and CPU seconds of this process per GB."""
    began_s, cpu_s, kept = time.perf_counter(), time.process_time(), 0
    for start in range(0, len(blocks), batch):
        kept += sum(call(blocks[start : start + batch]))
    elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    assert kept == len(blocks), f"{len(blocks) - kept} of {len(blocks)} blocks did not go through"
    gigabytes = sum(memory.nbytes for _, memory in blocks) / 1e9
    return {"gb_per_s": gigabytes / elapsed_s, "cpu_s_per_gb": cpu_s / gigabytes}


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}


def measure(store: Store, size: Size) -> dict[str, Any]:
    """Put and get, one block a call and 64 MiB a call, in order and shuffled. What comes back is compared."""
    blocks = filled_blocks(size)
    shuffled = random.Random(1).sample(blocks, len(blocks))
    names = [name for name, _ in blocks]
    figures: dict[str, list[dict[str, float]]] = {"put_new_batch": [timed(store.put, blocks, size.batch)]}
    before = hashlib.blake2b(blocks[-1][1]).digest()
    for _ in range(size.repeats):
        for kind, batch in (("one", 1), ("batch", size.batch)):
            store.drop(names)
            figures.setdefault(f"put_{kind}", []).append(timed(store.put, blocks, batch))
            figures.setdefault(f"get_{kind}", []).append(timed(store.get, blocks, batch))
            figures.setdefault(f"get_{kind}_shuffled", []).append(timed(store.get, shuffled, batch))
    assert hashlib.blake2b(blocks[-1][1]).digest() == before
    return {name: medians(runs) for name, runs in figures.items()}


def fio_reads(path: Path, size: Size, limit_bytes: int) -> dict[str, Any]:
    """What fio reads from the very file that the store wrote, at the same moment. Empty where there is no fio."""
    if shutil.which("fio") is None:
        return {"missing": "apt install fio"}
    jobs = {
        "sequential_4m_4_deep": ("read", 4 << 20, 4, "io_uring"),
        "sequential_1m": ("read", 1 << 20, 1, "psync"),
        "shuffled_block_16_deep": ("randread", min(size.block_bytes, 4 << 20), 16, "io_uring"),
    }
    found = {}
    for name, (rw, bs, depth, engine) in jobs.items():
        runs = []
        for _ in range(size.repeats):
            command = ["fio", "--name=x", f"--filename={path}", "--direct=1", "--readonly", "--output-format=json"]
            command += [f"--rw={rw}", f"--bs={bs}", f"--iodepth={depth}", f"--ioengine={engine}"]
            done = subprocess.run([*command, f"--size={limit_bytes}"], capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"] / 1e9)
        found[name] = {"gb_per_s": round(statistics.median(runs), 4)}
    return found


def file_rows(folder: Path, size: Size, *, options: str = "") -> dict[str, Any]:
    """The file store, its share of what fio reads, and how long an opening takes after a crash."""
    path = folder / "baton-benchmark"
    shutil.rmtree(path, ignore_errors=True)
    capacity_bytes = size.blocks * slot_bytes(size.block_bytes + 64)
    url = f"file://{path}?bytes={capacity_bytes}{options}"
    try:
        store = open_store(url, layout_fingerprint="benchmark", block_bytes=size.block_bytes)
        figures = measure(store, size)
        fio = fio_reads(path / "segment-0000.kv", size, (path / "segment-0000.kv").stat().st_size)
        store.close()
        (path / "index").unlink()
        began_s = time.perf_counter()
        store = open_store(url, layout_fingerprint="benchmark", block_bytes=size.block_bytes)
        figures["opening_by_scan_s"] = round(time.perf_counter() - began_s, 4)
        assert len(store.held()) == size.blocks
        store.close()
    finally:
        shutil.rmtree(path, ignore_errors=True)
    if "sequential_4m_4_deep" in fio:
        best = max(fio["sequential_4m_4_deep"]["gb_per_s"], fio["sequential_1m"]["gb_per_s"])
        figures["get_batch_share_of_fio_ratio"] = round(figures["get_batch"]["gb_per_s"] / best, 3)
        same = fio["shuffled_block_16_deep"]["gb_per_s"]
        figures["get_shuffled_share_of_fio_ratio"] = round(figures["get_batch_shuffled"]["gb_per_s"] / same, 3)
    return {**figures, "fio": fio}


@contextmanager
def running_redis() -> Iterator[int]:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise FileNotFoundError("apt install redis-server")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [program, "--port", str(port), "--save", "", "--maxmemory", "8gb"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        while "eady to accept" not in server.stdout.readline():
            pass
        try:
            yield port
        finally:
            server.kill()


def redis_rows(folder: Path, size: Size) -> dict[str, Any]:
    with running_redis() as port:
        store = open_store(f"redis://127.0.0.1:{port}/0", layout_fingerprint="a", block_bytes=size.block_bytes)
        figures = measure(store, size)
        store.close()
    return figures


def redis_direct_rows(folder: Path, size: Size) -> dict[str, Any]:
    """What redis-py does with one value a block, and nothing is checked."""
    if redis is None:
        return {"missing": "pip install 'baton[redis]'"}
    blocks = filled_blocks(size)
    figures: dict[str, list[dict[str, float]]] = {}
    with running_redis() as port, redis.Redis(port=port) as client:

        def put(part: Blocks) -> list[bool]:
            return [bool(client.set(name, memory)) for name, memory in part]

        def get(part: Blocks) -> list[bool]:
            for name, memory in part:
                memory[:] = client.get(name)
            return [True] * len(part)

        for _ in range(size.repeats + 1):
            figures.setdefault("put_one", []).append(timed(put, blocks, 1))
            figures.setdefault("get_one", []).append(timed(get, blocks, 1))
    return {name: medians(runs[1:]) for name, runs in figures.items()}


def pool_rows(folder: Path, size: Size, *, options: str = "") -> dict[str, Any]:
    """A pool node in a process of its own: by its memory, which it lends, or over loopback."""
    bytes_ = size.blocks * size.block_bytes
    command = [sys.executable, "-m", "baton.cli.main", "pool", "--bytes", str(bytes_), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        try:
            url = node.stdout.readline().split()[-1]
            store = open_store(url + options, layout_fingerprint="a", block_bytes=size.block_bytes)
            figures = measure(store, size)
            store.close()
        finally:
            node.kill()
    return figures


def mooncake_rows(folder: Path, size: Size) -> dict[str, Any]:
    """Mooncake Store as a tier: its master, the holder of its memory and its client are processes of this machine."""
    memory_mb = 3 * size.blocks * size.block_bytes // 1_000_000 + 256
    try:
        with mooncake(memory=f"{memory_mb}MB") as cluster:
            store = open_store(cluster.url, layout_fingerprint="a", block_bytes=size.block_bytes)
            figures = measure(store, size)
            store.close()
    except PackageMissing as missing:
        return {"missing": str(missing)}
    return figures


def mooncake_direct_rows(folder: Path, size: Size) -> dict[str, Any]:
    """Mooncake's own client, without checksums, from and into registered memory."""
    try:
        with mooncake(memory="16MB"):  # for the environment that its package needs
            return peer_rows(Path(sys.executable), ["mooncake_store.py"], size)
    except PackageMissing as missing:
        return {"missing": str(missing)}


def memory_rows(folder: Path, size: Size) -> dict[str, Any]:
    capacity_bytes = size.blocks * size.block_bytes
    url = f"memory://?bytes={capacity_bytes}"
    return measure(open_store(url, layout_fingerprint="a", block_bytes=size.block_bytes), size)


def encrypted_rows(folder: Path, size: Size) -> dict[str, Any]:
    key = folder / "baton-benchmark-key"
    key.touch(mode=0o600)
    try:
        key.write_bytes(bytes(32))
        return file_rows(folder, size, options=f"&key_file={key}")
    finally:
        key.unlink()


def peer_rows(python: Path, script: Sequence[str], size: Size) -> dict[str, Any]:
    """Run another pool's own client in its own environment."""
    if not python.exists():
        return {"missing": "python benchmarks/stores.py --install FOLDER"}
    numbers = map(str, (size.block_bytes, size.blocks, size.repeats))
    quiet = ["env", "LMCACHE_TRACK_USAGE=false"]  # it reports to its makers else
    command = [*quiet, str(python), str(HERE / "peers" / script[0]), *script[1:], *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.splitlines()[-1])


def install(folder: Path) -> None:
    """Make an environment for LMCache if there is none yet."""
    if not python_of(folder, "lmcache").exists():
        venv.create(folder / "lmcache", with_pip=True)
        python = python_of(folder, "lmcache")
        show = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        theirs = Path(subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip())
        (theirs / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch for CPUs, as we have it
        _pip(python, "--no-deps", "lmcache")
        _pip(python, *LMCACHE)


def python_of(folder: Path, peer: str) -> Path:
    return folder / peer / "bin" / "python"


def _pip(python: Path, *words: str) -> None:
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *words], check=True)


def compared(rows: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast as the best peer a pool node is, with blocks of one size."""
    found: dict[str, Any] = {}
    for verb in ("put", "get"):
        peers = {
            f"{kind}, {name}": figure["gb_per_s"]
            for kind in PEERS
            for name, figure in rows.get(kind, {}).items()
            if name in (f"{verb}_one", f"{verb}_batch")
        }
        if not peers or "pool" not in rows:
            continue
        best = max(peers, key=lambda name: peers[name])
        for kind in ("pool", "pool over tcp"):
            for way in ("one", "batch"):
                if kind in rows:
                    ratio = rows[kind][f"{verb}_{way}"]["gb_per_s"] / peers[best]
                    found[f"{kind}, {verb}_{way}"] = {"times_best_peer": round(ratio, 2), "best_peer": best}
    return found


def shown(rows: dict[str, Any]) -> str:
    """GB/s of each store with blocks of one size, as a table of the documents."""
    heads = ["put_one", "get_one", "put_batch", "get_batch"]
    lines = [
        [kind, *(f"{row[name]['gb_per_s']:.2f}" if name in row else "-" for name in heads)]
        for kind, row in rows.items()
    ]
    return record.table(["GB/s", *heads], lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=lambda text: Path(text).resolve(), default=Path.cwd())
    parser.add_argument("--sizes", type=int, nargs="+", default=[64 << 10, 1 << 20, 64 << 20])
    parser.add_argument("--total-bytes", type=float, default=1e9)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--install", type=Path)
    parser.add_argument("--name", default="stores", help="of the result file")
    parser.add_argument("--peers", type=Path, default=Path("peers"))
    arguments = parser.parse_args()
    if arguments.install:
        install(arguments.install)
        arguments.peers = arguments.install
    lmcache = python_of(arguments.peers, "lmcache")
    kinds: dict[str, Callable[[Path, Size], dict[str, Any]]] = {
        "file": file_rows,
        "encrypted file": encrypted_rows,
        "memory": memory_rows,
        "pool": pool_rows,
        "pool over tcp": lambda folder, size: pool_rows(folder, size, options="?via=tcp"),
        "redis": redis_rows,
        "redis directly": redis_direct_rows,
        "mooncake": mooncake_rows,
        "mooncake store": mooncake_direct_rows,
        "lmcache local": lambda folder, size: peer_rows(lmcache, ["lmcache_store.py", "local"], size),
        "lmcache server": lambda folder, size: peer_rows(lmcache, ["lmcache_store.py", "server"], size),
    }
    rows: dict[str, Any] = {}
    for block_bytes in arguments.sizes:
        size = Size(block_bytes, max(2, int(arguments.total_bytes) // block_bytes), arguments.repeats)
        for kind in arguments.only or kinds:
            found = rows.setdefault(str(block_bytes), {})[kind] = kinds[kind](arguments.folder, size)
            print(f"{kind}, {block_bytes} bytes: {json.dumps(found)}", file=sys.stderr, flush=True)
    for block_bytes, found in rows.items():
        print(f"blocks of {block_bytes} bytes:\n{shown(found)}", file=sys.stderr)
    ratios = {block_bytes: compared(found) for block_bytes, found in rows.items()}
    figures = {"total_bytes": arguments.total_bytes, "repeats": arguments.repeats, "mooncake": PACKAGE}
    record.write(arguments.name, {**figures, "pool_beside_peers": ratios, "stores": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
