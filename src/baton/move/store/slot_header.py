"""What stands before a block in its slot: whose bytes these are, and their checksum.

A header is bound to its slot and its block: one that was copied to another place, or that describes bytes which are not
behind it any more (the write was torn), does not fit and makes the slot empty.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from baton.core.types import BlockHash
from baton.move.store.checksum import CHECKSUM_BYTES, checksum

ALIGNMENT_BYTES = 4096
"""Of offsets, sizes and addresses in direct I/O; and what a header takes, so that the block behind it is aligned."""
HASH_BYTES_MAX = 64
_MAGIC = b"BATONKV1"
_FIELDS = struct.Struct(f"<8s16sQQQB{HASH_BYTES_MAX}s{CHECKSUM_BYTES}s")
HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """The name, age and checksum of the block in a slot."""

    layout: bytes
    """`fingerprint_digest` of the layout that the block is of."""
    slot: int
    sequence: int
    """Counts puts: the higher of two is the younger."""
    size_bytes: int
    name: BlockHash
    payload_checksum: bytes

    def pack_into(self, memory: memoryview) -> None:
        """Write it at the beginning of a header's memory."""
        fields = (self.slot, self.sequence, self.size_bytes, len(self.name), self.name, self.payload_checksum)
        packed = _FIELDS.pack(_MAGIC, self.layout, *fields)
        memory[:HEADER_BYTES] = packed + checksum(packed)


def is_empty(memory: memoryview) -> bool:
    """Tell a slot that was never written from one that is damaged."""
    return not any(memory[:HEADER_BYTES])


def read_header(memory: memoryview, *, layout: bytes, slot: int) -> SlotHeader | None:
    """Read the header of this slot. None: damaged, of another place, or of another layout."""
    packed = bytes(memory[: _FIELDS.size])
    if len(memory) < HEADER_BYTES or checksum(packed) != memory[_FIELDS.size : HEADER_BYTES]:
        return None
    magic, found_layout, found_slot, sequence, size_bytes, name_bytes, name, payload = _FIELDS.unpack(packed)
    if (magic, found_layout, found_slot) != (_MAGIC, layout, slot):
        return None
    return SlotHeader(
        layout=layout,
        slot=slot,
        sequence=sequence,
        size_bytes=size_bytes,
        name=BlockHash(name[:name_bytes]),
        payload_checksum=payload,
    )
