"""Message classes of protocol buffers from a table of fields, for the packages that speak gRPC.

Tables take the place of generated code, which depends on the version of its generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

TEXT, BYTES, BOOL = "TYPE_STRING", "TYPE_BYTES", "TYPE_BOOL"
INT32, INT64, DOUBLE = "TYPE_INT32", "TYPE_INT64", "TYPE_DOUBLE"
STRUCT = ".google.protobuf.Struct"
"""Any JSON object."""
Fields = Mapping[str, tuple[int, str]]
"""Number and kind of each field of a message. A kind is a scalar type, another message of the table or STRUCT.

`*` before it: repeated. `@` before it: a map from texts. An enumeration is an INT32, which has the same bytes."""


class _Message(Protocol):
    """The description of a message, to which fields are added."""

    name: str
    field: Any
    nested_type: Any


def message_classes(package: str, messages: Mapping[str, Fields]) -> dict[str, Any]:
    """Return the class of each message by its name. Raises ImportError without the package protobuf."""
    descriptors, struct = import_module("google.protobuf.descriptor_pb2"), import_module("google.protobuf.struct_pb2")
    pools, factory = import_module("google.protobuf.descriptor_pool"), import_module("google.protobuf.message_factory")
    file = descriptors.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    file.dependency.append(struct.DESCRIPTOR.name)
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            if kind.startswith("@"):
                kind = f"*{_add_entry(package, message, field, kind[1:])}"
            _add_field(package, message, field, number, kind)
    pool = pools.DescriptorPool()
    inner = descriptors.FileDescriptorProto()
    struct.DESCRIPTOR.CopyToProto(inner)
    pool.Add(inner)
    pool.Add(file)
    return {name: factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


def _add_entry(package: str, message: _Message, field: str, kind: str) -> str:
    """Add the nested message of one entry of a map. Return its name."""
    name = f"{field.title().replace('_', '')}Entry"
    entry = message.nested_type.add(name=name)
    entry.options.map_entry = True
    _add_field(package, entry, "key", 1, TEXT)
    _add_field(package, entry, "value", 2, kind)
    return f"{message.name}.{name}"


def _add_field(package: str, message: _Message, name: str, number: int, kind: str) -> None:
    label = "LABEL_REPEATED" if kind.startswith("*") else "LABEL_OPTIONAL"
    added, kind = message.field.add(name=name, number=number), kind.removeprefix("*")
    added.label = added.Label.Value(label)
    added.type = added.Type.Value(kind if kind.startswith("TYPE_") else "TYPE_MESSAGE")
    if not kind.startswith("TYPE_"):
        added.type_name = kind if kind.startswith(".") else f".{package}.{kind}"


def nested(path: tuple[int, ...], payload: bytes) -> bytes:
    """Encode bytes, or a message, inside of fields with these numbers (up to 15), the outermost first."""
    head, size = b"", len(payload)
    for number in reversed(path):
        field = bytes((number << 3 | 2, size)) if size < 128 else _long(number << 3 | 2, size)
        head, size = field + head, size + len(field)
    return head + payload


def _long(tag: int, size: int) -> bytes:
    """Return the head of a field of more than 127 bytes."""
    field = bytearray((tag,))
    while size > 127:
        field.append(size & 127 | 128)
        size >>= 7
    field.append(size)
    return bytes(field)
