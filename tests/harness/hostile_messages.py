"""Protobuf messages that a peer may send who means no good: any values, unknown fields, and bytes that are none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st

Values = Mapping[str, st.SearchStrategy[Any]]

MANY = 5_000
"""Elements of a long list."""

_BOUNDS = (0, 1, 2, 3, 63, 64, 255, 256, 65_535, 65_536)
_SIGNED = (-1, -2, -(2**31))
_FLOATS = (0.0, -0.0, 1.0, 0.5, 100.0, 1e-30, 1e30, -1.0, math.nan, math.inf, -math.inf)
_TEXTS = ("", "a", "cpu", "float32", "draft", "verify", "\0", "../..", "/dev/zero", "\ud7ff", "👩‍👩‍👧", "x" * MANY)

NUMBERS_32 = st.sampled_from((*_BOUNDS, 2**31 - 1, 2**31, 2**32 - 1)) | st.integers(0, 70)
NUMBERS_64 = NUMBERS_32 | st.sampled_from((2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1))

_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from((*_BOUNDS, *_SIGNED, 2**31 - 1)) | st.integers(-70, 70),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from((*_BOUNDS, *_SIGNED, -(2**63), 2**63 - 1)),
    FieldDescriptor.CPPTYPE_UINT32: NUMBERS_32,
    FieldDescriptor.CPPTYPE_UINT64: NUMBERS_64,
    FieldDescriptor.CPPTYPE_FLOAT: st.sampled_from(_FLOATS) | st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.sampled_from(_FLOATS) | st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-1, 9) | st.sampled_from((2**31 - 1, -(2**31))),
}


def scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Values for one element of a field that holds no messages."""
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.sampled_from(_TEXTS) | st.text(max_size=20)
    return _SCALARS[field.cpp_type]


def unknown_fields() -> st.SearchStrategy[bytes]:
    """A field, well formed, that no message here has."""
    numbers = st.integers(1000, 2**29 - 1)
    return st.one_of(
        st.builds(lambda number, value: _tag(number, 0) + _varint(value), numbers, NUMBERS_64),
        st.builds(lambda number, value: _tag(number, 1) + value, numbers, st.binary(min_size=8, max_size=8)),
        st.builds(lambda number, value: _tag(number, 2) + _varint(len(value)) + value, numbers, st.binary(max_size=9)),
        st.builds(lambda number, value: _tag(number, 5) + value, numbers, st.binary(min_size=4, max_size=4)),
    )


@st.composite
def messages(draw: st.DrawFn, kind: type[Message], values: Values | None = None) -> Message:
    """Messages of a kind; `values` gives better ones for some fields, by their full name."""
    message = kind()
    _fill(draw, message, values or {})
    return message


@st.composite
def wire(draw: st.DrawFn, kind: type[Message], values: Values | None = None) -> bytes:
    """Draws bytes to send: mostly messages of the kind, else nearly so."""
    return mangled(draw, draw(messages(kind, values)).SerializeToString())


def mangled(draw: st.DrawFn, data: bytes) -> bytes:
    """A message's bytes as they are, more often than not."""
    match draw(st.integers(0, 15)):
        case 0:
            return data[: draw(st.integers(0, len(data)))]
        case 1:
            return data + draw(unknown_fields())
        case 2:
            position = draw(st.integers(0, len(data)))
            return data[:position] + draw(st.binary(min_size=1, max_size=3)) + data[position + 1 :]
        case 3:
            # Invalid UTF-8, or whatever else the field's type makes of it.
            return data + _tag(draw(st.integers(1, 20)), 2) + b"\x02\xc3\x28"
        case 4:
            # A group within a group within ...
            return data + _tag(1000, 3) * draw(st.integers(1, 300))
        case 5:
            return draw(st.binary(max_size=64))
        case _:
            return data


def decodes(kind: type[Message], data: bytes) -> bool:
    """True if the bytes are a message of the kind; what gRPC cannot decode never reaches a handler."""
    try:
        kind.FromString(data)
    except DecodeError:
        return False
    return True


def methods(service: ServiceDescriptor) -> Iterator[tuple[str, type[Message], bool]]:
    """Name, kind of request, and whether the answer is a stream."""
    for method in service.methods:
        kind = message_factory.GetMessageClass(method.input_type)
        yield method.name, kind, method.server_streaming


def leaves(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Every field that is set and holds no messages, here and in the messages within, with its owner."""
    for field, value in message.ListFields():
        if field.message_type is None:
            yield message, field
        elif field.is_repeated:
            for child in () if _is_map(field) else value:
                yield from leaves(child)
        else:
            yield from leaves(value)


def change(draw: st.DrawFn, message: Message) -> None:
    """Changes one thing that is set in a message, or in one within."""
    owner, field = draw(st.sampled_from(list(leaves(message))))
    if not field.is_repeated:
        setattr(owner, field.name, draw(scalars(field)))
        return
    values = getattr(owner, field.name)
    match draw(st.integers(0, 3)):
        case 0:
            del values[draw(st.integers(0, len(values) - 1)) :]
        case 1:
            values.extend(list(values))
        case 2:
            values.append(draw(scalars(field)))
        case _:
            values[draw(st.integers(0, len(values) - 1))] = draw(scalars(field))


def _fill(draw: st.DrawFn, message: Message, values: Values) -> None:
    descriptor: Any = message.DESCRIPTOR
    # The more fields there are, the fewer of them are set: else there is always one that is wrong.
    fields = list(descriptor.fields)
    for field in draw(st.lists(st.sampled_from(fields), max_size=6)) if fields else ():
        _set(draw, message, field, values)
    if draw(st.integers(0, 15)) == 0:
        message.MergeFromString(draw(unknown_fields()))


def _set(draw: st.DrawFn, message: Message, field: FieldDescriptor, values: Values) -> None:
    if field.message_type is not None:
        if _is_map(field):
            keys, elements = (scalars(field.message_type.fields_by_name[name]) for name in ("key", "value"))
            elements = values.get(field.full_name, elements)
            getattr(message, field.name).update(draw(st.dictionaries(keys, elements, max_size=3)))
            return
        if field.is_repeated:
            for _ in range(draw(st.integers(0, 3))):
                _fill(draw, getattr(message, field.name).add(), values)
            return
        child = getattr(message, field.name)
        child.SetInParent()
        _fill(draw, child, values)
        return
    elements = scalars(field)
    if field.full_name in values:
        elements = values[field.full_name] if draw(st.integers(0, 15)) else elements
    if not field.is_repeated:
        setattr(message, field.name, draw(elements))
        return
    few = draw(st.lists(elements, max_size=4))
    getattr(message, field.name).extend(few if draw(st.integers(0, 7)) else few[:1] * MANY)


def _is_map(field: FieldDescriptor) -> bool:
    kind: Any = field.message_type
    return bool(kind.GetOptions().map_entry)


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))
