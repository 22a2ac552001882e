"""Play one cell in a process of its own, `python -m baton.lab.sim.one_cell`: a job on stdin, its records on stdout."""

from __future__ import annotations

import sys

import msgspec

from baton.lab.sim.cells import CellJob, encode_records
from baton.lab.sim.replay_trace import play_cell


def main() -> int:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CellJob)
    sys.stdout.buffer.write(encode_records(play_cell(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
