"""Cells: past what one server decides, a fleet is several small ones, each with a server and hosts of its own.

What one cell plays depends on no other: they may be played one after the other or in processes of their own, and what
comes of it is the same. A job and its records are bytes, so that a process can be given the one and return the other.
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
from baton.core.messages import Outcome, RejectReason
from baton.core.types import Slo
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.faults import TimedFault
from baton.lab.sim.spec import ClusterSpec
from baton.lab.workload.request import Trace, TraceRequest


class CellJob(Struct, frozen=True, kw_only=True):
    """All that the play of one cell needs to know."""

    spec: ClusterSpec
    """Of the cell alone."""
    trace: Trace
    policy: PolicyConfig
    seed: int
    slo: Slo | None
    faults: tuple[TimedFault, ...] = ()
    """What strikes it. They may name its workers and hosts, which other cells have as well."""


class _Told(Struct, frozen=True, array_like=True):
    """A `RequestRecord` on its way between two processes."""

    arrival_s: float
    end_s: float
    outcome: Outcome
    reject: RejectReason | None
    failure: str
    input_tokens: int
    token_times: bytes
    cached_tokens: int | None
    cut_tokens: int
    slo: Slo | None
    tenant: str


def split_trace(trace: Trace, cells: int) -> list[Trace]:
    """Give every request of a trace to a cell, in the trace's order within each.

    Turns of one session go to one cell, by a hash of its name, since that is where their prefix is; all others in turn.
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
    """Say what each cell of a cluster plays. Every cell draws from a seed of its own. `faults` strike each of them."""
    alone = replace(spec, cells=1)
    return [
        CellJob(spec=alone, trace=part, policy=policy, seed=seed + number, slo=slo, faults=faults)
        for number, part in enumerate(split_trace(trace, spec.cells))
    ]


def merge_records(played: Iterable[Sequence[RequestRecord]]) -> list[RequestRecord]:
    """Put the records of all cells, given in the order of the cells, into the order in which requests closed."""
    return sorted(chain.from_iterable(played), key=lambda record: record.end_s)


def encode_records(records: Sequence[RequestRecord]) -> bytes:
    """Write records for another process of this machine."""
    told = [
        _Told(
            arrival_s=record.arrival_s,
            end_s=record.end_s,
            outcome=record.outcome,
            reject=record.reject,
            failure=record.failure,
            input_tokens=record.input_tokens,
            token_times=array("d", record.token_times_s).tobytes(),
            cached_tokens=record.cached_tokens,
            cut_tokens=record.cut_tokens,
            slo=record.slo,
            tenant=record.tenant,
        )
        for record in records
    ]
    return msgspec.msgpack.encode(told)


def decode_records(data: bytes) -> list[RequestRecord]:
    """Read what `encode_records` wrote. Raises msgspec.DecodeError where it is cut."""
    return [
        RequestRecord(
            arrival_s=told.arrival_s,
            end_s=told.end_s,
            outcome=told.outcome,
            reject=told.reject,
            failure=told.failure,
            input_tokens=told.input_tokens,
            token_times_s=array("d", told.token_times),
            cached_tokens=told.cached_tokens,
            cut_tokens=told.cut_tokens,
            slo=told.slo,
            tenant=told.tenant,
        )
        for told in msgspec.msgpack.decode(data, type=list[_Told])
    ]
