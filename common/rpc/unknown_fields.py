"""Refuses messages with unknown fields: nothing that a client asks for is ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.unknown_fields import UnknownFieldSet

from slipstream.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message


def reject_unknown_fields(message: Message) -> None:
    """Raises an InvalidArgumentError that names the path and number of an unknown field, also in nested messages."""
    _reject(message, "")


def _reject(message: Message, path: str) -> None:
    unknown_fields: Any = UnknownFieldSet(message)
    for unknown in unknown_fields:
        number = unknown.field_number
        name = f"{path}.{number}" if path else str(number)
        accepted = f"fields of {message.DESCRIPTOR.full_name} that this server knows"
        raise InvalidArgumentError(name, f"unknown field number {number}", accepted)
    for field, value in message.ListFields():
        if field.message_type is not None:
            name = f"{path}.{field.name}" if path else field.name
            for key, child in _messages(field, value):
                _reject(child, name + key)


def _messages(field: FieldDescriptor, value: Any) -> Iterator[tuple[str, Message]]:
    """Yields the messages in a field's value, each with the index or key that its path has after the field's name."""
    kind: Any = field.message_type
    if kind.GetOptions().map_entry:
        if kind.fields_by_name["value"].message_type is not None:
            yield from ((f"[{key}]", child) for key, child in value.items())
    elif field.is_repeated:
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    else:
        yield "", value
