"""Translates dataclasses to protobuf messages with fields of the same names, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Readers = Mapping[str, Callable[[Any], Any]]


def encode(kind: Callable[..., M], value: Any, /, **other: Any) -> M:
    """Builds a message from the fields that it has in common with the dataclass `value`, and from `other`.

    None leaves a field unset. A value with a method `to_pb` is encoded by it, other dataclasses by their fields.
    """
    plain, nested = _common_fields(kind, value.__class__)
    given = {name: getattr(value, name) for name in plain if name not in other}
    for name in nested:
        if name not in other:
            given[name] = _encoded(getattr(value, name))
    return kind(**given, **other)


def decode(kind: Callable[..., T], message: Any, readers: Readers = MappingProxyType({}), /, **other: Any) -> T:
    """Builds the dataclass `kind` from the message's fields of the same names, and from `other`.

    A function of `readers` makes a field, or each item of a repeated one, from what the message has. Optional fields
    that are not set are None, repeated ones are tuples.
    """
    given = dict(other)
    plain, repeated, optional = _kinds_of_fields(kind, message.__class__)
    for name in plain:
        if name not in other:
            value = getattr(message, name)
            given[name] = readers[name](value) if name in readers else value
    for name in repeated:
        if name not in other:
            values = getattr(message, name)
            given[name] = tuple(map(readers[name], values)) if name in readers else tuple(values)
    for name in optional:
        if name not in other:
            value = getattr(message, name) if message.HasField(name) else None
            given[name] = readers[name](value) if name in readers and value is not None else value
    return kind(**given)


def _encoded(value: Any) -> Any:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [_encoded(item) for item in value]
    if hasattr(value, "to_pb"):
        return value.to_pb()
    if is_dataclass(value) or isinstance(value, tuple):
        return {name: _encoded(getattr(value, name)) for name in _field_names(value.__class__)}
    return value


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(kind.__dataclass_fields__) if is_dataclass(kind) else kind._fields


@cache
def _common_fields(kind: Any, source: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the fields that need no translation, and of messages and enums."""
    fields = {name: field for name, field in kind.DESCRIPTOR.fields_by_name.items() if name in _field_names(source)}
    nested = tuple(name for name, field in fields.items() if field.message_type or field.enum_type)
    return tuple(name for name in fields if name not in nested), nested


@cache
def _kinds_of_fields(target: Any, kind: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the plain fields that both have, of the repeated and of the optional ones."""
    fields = {name: field for name, field in kind.DESCRIPTOR.fields_by_name.items() if name in _field_names(target)}
    repeated = tuple(name for name, field in fields.items() if field.is_repeated)
    optional = tuple(name for name, field in fields.items() if field.has_presence)
    return tuple(name for name in fields if name not in repeated + optional), repeated, optional


VARINT, LENGTH_DELIMITED = 0, 2
"""Wire types."""
_VARINTS_KEPT = 2**16
"""At about 110 bytes each; most token ids of a text are among them."""


def new_varint(number: int) -> bytes:
    """Encodes 0 or more as protobuf does: seven bits a byte, the lowest first, and a bit that says if more follow."""
    # The first two are quicker than the last, and most numbers are among them.
    if number < 2**14:
        return bytes((number & 127 | 128, number >> 7)) if number > 127 else bytes((number,))
    if number < 2**21:
        return bytes((number & 127 | 128, number >> 7 & 127 | 128, number >> 14))
    return bytes((number & 127 | 128,)) + new_varint(number >> 7)


class Varints(dict[int, bytes]):
    """Encoded numbers, the first of them for good. Looks up those that it has without interpreter work."""

    def __missing__(self, number: int) -> bytes:
        encoded = new_varint(number)
        if len(self) < _VARINTS_KEPT:
            self[number] = encoded
        return encoded


VARINTS = Varints()
varint = VARINTS.__getitem__
"""Cached varints, for values that repeat, such as token ids and lengths."""


def tag(number: int, wire_type: int) -> bytes:
    """Encodes the key that precedes the value of field `number`."""
    return varint(number << 3 | wire_type)
