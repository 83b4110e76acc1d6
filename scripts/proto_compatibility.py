"""Lists what breaks a client of the last release: `proto_compatibility.py RELEASED CURRENT`, two descriptor sets.

Additions pass. What is gone, has another number or another type is named, and the exit status is 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from google.protobuf.descriptor_pb2 import (
        DescriptorProto,
        EnumDescriptorProto,
        MethodDescriptorProto,
    )

_OURS = "slipstream."


class Contract:
    """Everything that a descriptor set of ours promises, by full names."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self.messages: dict[str, DescriptorProto] = {}
        self.enums: dict[str, EnumDescriptorProto] = {}
        self.services: dict[str, dict[str, MethodDescriptorProto]] = {}
        for file in files.file:
            if f"{file.package}.".startswith(_OURS):
                self._add(file.package, file.message_type, file.enum_type)
                for service in file.service:
                    methods = {method.name: method for method in service.method}
                    self.services[f"{file.package}.{service.name}"] = methods

    def _add(self, scope: str, messages: Iterable[DescriptorProto], enums: Iterable[EnumDescriptorProto]) -> None:
        self.enums |= {f"{scope}.{enum.name}": enum for enum in enums}
        for message in messages:
            name = f"{scope}.{message.name}"
            self.messages[name] = message
            self._add(name, message.nested_type, message.enum_type)


def breaks(released: FileDescriptorSet, current: FileDescriptorSet) -> list[str]:
    """Lists what the current contract changes or drops of the released one, a line each; empty if compatible."""
    old, new = Contract(released), Contract(current)
    return [*_service_breaks(old, new), *_message_breaks(old, new), *_enum_breaks(old, new)]


def _service_breaks(old: Contract, new: Contract) -> Iterator[str]:
    for service, methods in old.services.items():
        for name, method in methods.items():
            other = new.services.get(service, {}).get(name)
            if other is None:
                yield f"{service}.{name}: the method is gone"
            elif _signature(method) != _signature(other):
                yield f"{service}.{name}: was {_signature(method)}, is {_signature(other)}"


def _message_breaks(old: Contract, new: Contract) -> Iterator[str]:
    for name, message in old.messages.items():
        other = new.messages.get(name)
        if other is None:
            yield f"{name}: the message is gone"
            continue
        fields = {field.name: _shape(other, field) for field in other.field}
        for field in message.field:
            shape = _shape(message, field)
            if field.name not in fields:
                yield f"{name}.{field.name}: the field is gone"
            elif fields[field.name] != shape:
                yield f"{name}.{field.name}: was {shape}, is {fields[field.name]}"


def _enum_breaks(old: Contract, new: Contract) -> Iterator[str]:
    for name, enum in old.enums.items():
        other = new.enums.get(name)
        if other is None:
            yield f"{name}: the enum is gone"
            continue
        numbers = {value.name: value.number for value in other.value}
        for value in enum.value:
            if value.name not in numbers:
                yield f"{name}.{value.name}: the value is gone"
            elif numbers[value.name] != value.number:
                yield f"{name}.{value.name}: was {value.number}, is {numbers[value.name]}"


def _signature(method: MethodDescriptorProto) -> str:
    request = "stream " * method.client_streaming + method.input_type
    return f"({request}) -> {'stream ' * method.server_streaming}{method.output_type}"


def _shape(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    label = "repeated" if field.label == FieldDescriptorProto.LABEL_REPEATED else "single"
    if field.proto3_optional:
        label = "optional"
    elif field.HasField("oneof_index"):
        label = f"oneof {message.oneof_decl[field.oneof_index].name}"
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"{label} {field.type_name or kind} = {field.number}"


def main(released: str, current: str) -> int:
    """Prints what breaks; gives the exit status."""
    sets = (FileDescriptorSet.FromString(Path(name).read_bytes()) for name in (released, current))
    lines = breaks(*sets)
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
