"""What a block takes along to another machine: the header of a slot, without a slot."""

from __future__ import annotations

from baton.core.types import BlockHash
from baton.move.store.checksum import checksum
from baton.move.store.slot_header import HEADER_BYTES, SlotHeader, read_header


def seal(name: BlockHash, memory: memoryview, *, layout: bytes) -> bytes:
    """Make the header that says whose bytes these are."""
    header = SlotHeader(
        layout=layout, slot=0, sequence=0, size_bytes=memory.nbytes, name=name, payload_checksum=checksum(memory)
    )
    packed = memoryview(bytearray(HEADER_BYTES))
    header.pack_into(packed)
    return bytes(packed)


def opens(packed: bytes | memoryview, name: BlockHash, memory: memoryview, *, layout: bytes) -> bool:
    """Tell whether the bytes that came are those that were sealed under this name."""
    header = read_header(memoryview(packed), layout=layout, slot=0)
    return (
        header is not None
        and header.name == name
        and header.size_bytes == memory.nbytes
        and header.payload_checksum == checksum(memory)
    )


def read_name(text: str) -> BlockHash | None:
    """Read a block's name as stores on servers write it, in hexadecimal. None: somebody else has put that there."""
    try:
        name = BlockHash(bytes.fromhex(text))
    except ValueError:
        return None
    return name if name.hex() == text else None
