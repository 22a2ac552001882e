"""Cells: a fleet that is too large for one server is split into cells, each with its own server and hosts.

Cells are independent: playing them one after the other or in separate processes gives the same records. Jobs and
records are encoded as bytes, because they cross a process boundary.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from zlib import crc32

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from baton.core.config import PolicyConfig
from baton.core.types import Slo
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.faults import TimedFault
from baton.lab.sim.spec import ClusterSpec
from baton.lab.workload.request import Trace, TraceRequest


class CellJob(Struct, frozen=True, kw_only=True):
    """The inputs of one simulated cell."""

    spec: ClusterSpec
    """Describes this cell only, so its `cells` is 1."""
    trace: Trace
    policy: PolicyConfig
    seed: int
    slo: Slo | None
    faults: tuple[TimedFault, ...] = ()
    """Faults of this cell. Worker and host names refer to this cell, although other cells use the same names."""


def split_trace(trace: Trace, cells: int) -> list[Trace]:
    """Return one trace per cell. Requests keep their order.

    All turns of a session go to the same cell, chosen by a hash of the session's name, because that cell holds their
    prefix. Requests without a session are dealt round-robin.
    """
    dealt: list[list[TraceRequest]] = [[] for _ in range(cells)]
    turn = 0
    for request in trace.requests:
        if request.session:
            dealt[crc32(request.session.encode()) % cells].append(request)
        else:
            dealt[turn % cells].append(request)
            turn += 1
    return [replace(trace, requests=tuple(requests)) for requests in dealt]


def cell_jobs(
    spec: ClusterSpec,
    trace: Trace,
    policy: PolicyConfig,
    *,
    seed: int,
    slo: Slo | None,
    faults: tuple[TimedFault, ...] = (),
) -> list[CellJob]:
    """Return one job per cell. Each cell has its own seed, and all cells have the same `faults`."""
    alone = replace(spec, cells=1)
    return [
        CellJob(spec=alone, trace=part, policy=policy, seed=seed + number, slo=slo, faults=faults)
        for number, part in enumerate(split_trace(trace, spec.cells))
    ]


def merge_records(played: Iterable[Sequence[RequestRecord]]) -> list[RequestRecord]:
    """Return the records of all cells in the order in which the requests closed. Ties keep the order of the cells."""
    return sorted(chain.from_iterable(played), key=lambda record: record.end_s)


def encode_records(records: Sequence[RequestRecord]) -> bytes:
    """Return the records as msgpack bytes, for another process on the same machine. Times take 8 bytes a token."""
    times = [array("d", record.token_times_s).tobytes() for record in records]
    return msgspec.msgpack.encode(([replace(record, token_times_s=()) for record in records], times))


def decode_records(data: bytes) -> list[RequestRecord]:
    """Return the records that `encode_records` encoded. Raises msgspec.DecodeError for truncated data."""
    records, times = msgspec.msgpack.decode(data, type=tuple[list[RequestRecord], list[bytes]])
    return [replace(record, token_times_s=array("d", own)) for record, own in zip(records, times, strict=True)]
