"""Play one cell in its own process: `python -m baton.lab.sim.one_cell` reads a job on stdin and writes its records."""

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
