"""Put and get of Mooncake Store over TCP: master, holder of the memory, and client, each a process of this machine.

python mooncake_store.py BLOCK_BYTES BLOCKS REPEATS      in an environment that has the package; prints JSON
"""

from __future__ import annotations

import json
import mmap
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import mooncake
import numpy as np
from mooncake.store import MooncakeDistributedStore

BATCH_BYTES = 64 << 20
TRIES = 200
HOLDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("ready", code, flush=True)
sys.stdin.read()
"""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_for(port: int) -> None:
    """Ask until the master takes connections; each ask is a connection attempt with a timeout."""
    for _ in range(TRIES):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=0.05).close()
        except OSError:
            subprocess.run([sys.executable, "-c", ""], check=True)
        else:
            return
    raise TimeoutError("the master did not come up")


def measure(
    store: MooncakeDistributedStore, block_bytes: int, blocks: int, repeats: int
) -> dict[str, dict[str, float]]:
    memory = mmap.mmap(-1, block_bytes * blocks)
    view = np.frombuffer(memory, np.uint8)
    view[:] = np.frombuffer(np.random.default_rng(0).bytes(len(memory)), np.uint8)
    first = view.ctypes.data
    if store.register_buffer(first, len(memory)) != 0:
        raise RuntimeError("the memory was not registered")
    places = [first + number * block_bytes for number in range(blocks)]
    batch = max(1, min(blocks, BATCH_BYTES // block_bytes))
    found: dict[str, list[float]] = {}

    def note(name: str, began_s: float, codes: list[int], good: int) -> None:
        found.setdefault(name, []).append(len(memory) / (time.perf_counter() - began_s) / 1e9)
        if any(code != good for code in codes):
            raise RuntimeError(f"{name}: code {next(code for code in codes if code != good)}")

    for turn in range(repeats + 1):  # the first one faults the holder's memory in, and is left out
        for kind, count in (("one", 1), ("batch", batch)):
            keys = [f"{kind}-{turn}-{number}" for number in range(blocks)]
            began_s, codes = time.perf_counter(), []
            for start in range(0, blocks, count):
                part, where = keys[start : start + count], places[start : start + count]
                codes += (
                    [store.put_from(part[0], where[0], block_bytes)]
                    if kind == "one"
                    else store.batch_put_from(part, where, [block_bytes] * len(part))
                )
            note(f"put_{kind}", began_s, codes, 0)
            began_s, codes = time.perf_counter(), []
            for start in range(0, blocks, count):
                part, where = keys[start : start + count], places[start : start + count]
                codes += (
                    [store.get_into(part[0], where[0], block_bytes)]
                    if kind == "one"
                    else store.batch_get_into(part, where, [block_bytes] * len(part))
                )
            note(f"get_{kind}", began_s, codes, block_bytes)
            store.remove_all(force=True)
    return {name: {"gb_per_s": round(statistics.median(values[1:]), 4)} for name, values in found.items()}


def main() -> None:
    block_bytes, blocks, repeats = map(int, sys.argv[1:4])
    port, metrics_port = free_port(), free_port()
    program = str(Path(mooncake.__file__).with_name("mooncake_master"))
    addresses = ["--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"]
    command = [program, *addresses, f"--metrics_port={metrics_port}", "--default_kv_lease_ttl=5000"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as master:
        wait_for(port)
        segment_bytes = str(3 * block_bytes * blocks + (256 << 20))
        held = [sys.executable, "-c", HOLDER, f"127.0.0.1:{port}", segment_bytes]
        with subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=quiet, text=True) as holder:
            assert holder.stdout is not None
            while not (line := holder.stdout.readline()).startswith("ready"):
                if not line:
                    raise RuntimeError("the holder ended")
            store = MooncakeDistributedStore()
            try:
                code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 256 << 20, "tcp", "", f"127.0.0.1:{port}")
                if code != 0:
                    raise RuntimeError(f"the client got code {code}")
                print("\n" + json.dumps(measure(store, block_bytes, blocks, repeats)), flush=True)
            finally:
                holder.kill()
                master.kill()


if __name__ == "__main__":
    main()
