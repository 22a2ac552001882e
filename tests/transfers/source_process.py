"""A source in its own process: `NAME SEED SIZE_BYTES LISTEN`. Prints its ticket, then does what it reads."""

from __future__ import annotations

import random
import sys

import msgspec

from baton.move.arena.memfd import create_arena
from baton.move.transport.offers import Source
from baton.move.transport.port import Extent
from tests.transfers.kits import register, transport_of


def main(name: str, seed: int, size_bytes: int, listen: str) -> None:
    arena = create_arena(size_bytes)
    source = Source()
    wire, *ways = name.split()
    transport = transport_of(wire, source, listen, encrypted="encrypted" in ways)
    region = register(transport, arena, "staged" in ways)
    arena.memory[:] = random.Random(seed).randbytes(size_bytes)
    ticket = transport.offer([Extent(0, size_bytes, region)], lease_s=600.0)
    print(msgspec.json.encode(ticket).decode(), flush=True)
    for line in sys.stdin:
        match line.strip():
            case "withdraw":
                transport.withdraw(ticket)
                arena.memory[:] = bytes(size_bytes)
            case _:
                raise SystemExit(f"{line!r} is nothing that can be done")
        print("done", flush=True)
    transport.close()
    source.close()
    arena.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
