"""The header of a stored block: its hash, layout and checksum, in a slot of a file or detached in front of its bytes.

A header contains its slot number and the checksum of its block. If it was copied to another slot, or if the write of
its block was interrupted, it does not match, and the slot counts as empty.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from baton.core.types import BlockHash
from baton.move.store.checksum import CHECKSUM_BYTES, checksum

ALIGNMENT_BYTES = 4096
"""Alignment of offsets, sizes and addresses for direct I/O. A header fills one unit, so that its block is aligned."""
HASH_BYTES_MAX = 64
_MAGIC = b"BATONKV1"
_FIELDS = struct.Struct(f"<8s16sQQQB{HASH_BYTES_MAX}s{CHECKSUM_BYTES}s")
HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """The hash, age and checksum of the block in a slot."""

    layout: bytes
    """`fingerprint_digest` of the block's layout."""
    slot: int
    sequence: int
    """Number of the put: of two headers, the one with the higher number is younger."""
    size_bytes: int
    block_hash: BlockHash
    payload_checksum: bytes

    def pack_into(self, memory: memoryview) -> None:
        """Write the header into memory."""
        fields = (
            self.slot,
            self.sequence,
            self.size_bytes,
            len(self.block_hash),
            self.block_hash,
            self.payload_checksum,
        )
        packed = _FIELDS.pack(_MAGIC, self.layout, *fields)
        memory[:HEADER_BYTES] = packed + checksum(packed)


def is_empty(memory: memoryview) -> bool:
    """Return whether a slot was never written, as opposed to damaged."""
    return not any(memory[:HEADER_BYTES])


def read_header(memory: memoryview, *, layout: bytes, slot: int) -> SlotHeader | None:
    """Return the header of a slot, or None if it is damaged, or belongs to another slot or layout."""
    packed = bytes(memory[: _FIELDS.size])
    if len(memory) < HEADER_BYTES or checksum(packed) != memory[_FIELDS.size : HEADER_BYTES]:
        return None
    magic, found_layout, found_slot, sequence, size_bytes, hash_bytes, block_hash, payload = _FIELDS.unpack(packed)
    if (magic, found_layout, found_slot) != (_MAGIC, layout, slot):
        return None
    return SlotHeader(
        layout=layout,
        slot=slot,
        sequence=sequence,
        size_bytes=size_bytes,
        block_hash=BlockHash(block_hash[:hash_bytes]),
        payload_checksum=payload,
    )


def detached_header(block_hash: BlockHash, memory: memoryview, *, layout: bytes) -> bytes:
    """Return the header of a block for a store without slots."""
    header = SlotHeader(
        layout=layout,
        slot=0,
        sequence=0,
        size_bytes=memory.nbytes,
        block_hash=block_hash,
        payload_checksum=checksum(memory),
    )
    packed = memoryview(bytearray(HEADER_BYTES))
    header.pack_into(packed)
    return bytes(packed)


def matches_header(packed: bytes | memoryview, block_hash: BlockHash, memory: memoryview, *, layout: bytes) -> bool:
    """Return whether received bytes are those of the block with hash `block_hash`, by their detached header."""
    header = read_header(memoryview(packed), layout=layout, slot=0)
    return (
        header is not None
        and header.block_hash == block_hash
        and header.size_bytes == memory.nbytes
        and header.payload_checksum == checksum(memory)
    )


def parse_block_hash(text: str) -> BlockHash | None:
    """Parse a block's hash from the hexadecimal key on a server. Return None for a key of another program."""
    try:
        block_hash = BlockHash(bytes.fromhex(text))
    except ValueError:
        return None
    return block_hash if block_hash.hex() == text else None
