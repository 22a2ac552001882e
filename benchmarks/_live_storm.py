"""Scene of benchmarks/live_control.py in which seeded faults strike processes, disks and connections of a fleet."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

from _live_load import MODEL

from baton.move.clock import now_s
from tests.process import storm as storms
from tests.serving import alive

FAULT_S = 5.0
SEED = 3
OUTPUT_TOKENS_MAX = 48
"""Longest answer: workers that share a core compute few tokens between two faults."""
THREADS = ("--threads", "1")
SILENT_S = 5.0
"""A step of a worker that shares its core with two others and the clients may take more than a second."""


def storm(duration_s: float) -> dict[str, Any]:
    """Strike a server and its host every few seconds, and compare each answer with the one of the calm server."""
    with (
        tempfile.TemporaryDirectory() as folder,
        storms.staged(MODEL, Path(folder), *THREADS, silent_s=SILENT_S) as stage,
    ):
        return _play(stage, duration_s)


def _play(stage: storms.Stage, duration_s: float) -> dict[str, Any]:
    server, wire = stage.cluster.server, stage.wire
    asked = storms.bodies(SEED, output_tokens_max=OUTPUT_TOKENS_MAX)
    load = storms.Load(server.url, storms.known_texts(server, asked), asked, random.Random(f"load {SEED}"))
    faults = storms.Faults(stage.cluster, wire, stage.preloaded, random.Random(f"faults {SEED}"))
    wire.repeats_each_kind = True
    workers, pid, began_s = server.worker_pids(), server.process.pid, now_s()
    before = _held(pid)
    count, until_s = round(duration_s / FAULT_S), began_s + duration_s
    asyncio.run(storms.storm(load, faults, count, FAULT_S, until_s=until_s))
    ended_s = now_s()
    stage.preloaded.delay_disk(0.0)
    stage.cluster.mend()
    after, present = _held(pid), server.worker_pids()
    return {
        "minutes": round((ended_s - began_s) / 60, 1),
        "faults": faults.seen.total(),
        "faults_by_kind": dict(sorted(faults.seen.items())),
        "message_kinds": {"seen": len(wire.seen)} | {what: len(kinds) for what, kinds in wire.kinds.items()},
        "answers": dict(sorted(load.answered.items())),
        "wrong": load.wrong[:3],
        "failovers": round(server.metric("baton_failovers_total")),
        "before": before,
        "after": after,
        "used_blocks_after": round(server.metric("baton_kv_blocks", 'state="used"')),
        "old_workers_alive": sum(alive(each) for each in set(workers) - set(present)),
        "workers": [len(workers), len(present)],
    }


def _held(pid: int) -> dict[str, int]:
    """Return what the server process holds."""
    return {"memory_mb": round(storms.memory_bytes(pid) / 1e6), "descriptors": storms.descriptors(pid)}
