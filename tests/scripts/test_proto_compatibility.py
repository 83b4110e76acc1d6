"""Tests that changes that break a release's contract are found, and that additions pass."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from slipstream.protos import generation_pb2, worker_pb2

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "proto_compatibility.py"


def load() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("proto_compatibility", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def current() -> FileDescriptorSet:
    """Returns the descriptors that the stubs were made from."""
    files = FileDescriptorSet()
    for stubs in (generation_pb2, worker_pb2):
        stubs.DESCRIPTOR.CopyToProto(files.file.add())
    return files


def message(files: FileDescriptorSet, name: str) -> DescriptorProto:
    """A message of the first file."""
    return next(found for found in files.file[0].message_type if found.name == name)


def field(files: FileDescriptorSet, of: str, name: str) -> FieldDescriptorProto:
    """One of its fields."""
    return next(found for found in message(files, of).field if found.name == name)


def _without(items: Any, name: str) -> None:
    del items[next(index for index, item in enumerate(items) if item.name == name)]


def _method(file: FileDescriptorProto, name: str) -> Any:
    return next(found for found in file.service[0].method if found.name == name)


BREAKS: dict[str, tuple[Callable[[FileDescriptorSet], object], str]] = {
    "method gone": (
        lambda files: _without(files.file[0].service[0].method, "GetJob"),
        "slipstream.v1.Generation.GetJob: the method is gone",
    ),
    "service gone": (lambda files: files.file[0].ClearField("service"), "Generation.CancelJob: the method is gone"),
    "method no stream": (
        lambda files: _method(files.file[0], "WatchJob").ClearField("server_streaming"),
        "Generation.WatchJob: was (.slipstream.v1.WatchJobRequest) -> stream",
    ),
    "message gone": (
        lambda files: _without(files.file[0].message_type, "Usage"),
        "slipstream.v1.Usage: the message is gone",
    ),
    "field gone": (
        lambda files: _without(message(files, "Usage").field, "seed"),
        "slipstream.v1.Usage.seed: the field is gone",
    ),
    "field renumbered": (
        lambda files: setattr(field(files, "Usage", "seed"), "number", 99),
        "slipstream.v1.Usage.seed: was single uint64 = 7, is single uint64 = 99",
    ),
    "field renamed": (
        lambda files: setattr(field(files, "Usage", "seed"), "name", "key"),
        "slipstream.v1.Usage.seed: the field is gone",
    ),
    "field retyped": (
        lambda files: setattr(field(files, "Usage", "seed"), "type", FieldDescriptorProto.TYPE_STRING),
        "slipstream.v1.Usage.seed: was single uint64 = 7, is single string = 7",
    ),
    "field of another message": (
        lambda files: setattr(field(files, "Job", "usage"), "type_name", ".slipstream.v1.TokenIds"),
        "slipstream.v1.Job.usage: was single .slipstream.v1.Usage = 7",
    ),
    "field repeated": (
        lambda files: setattr(field(files, "Usage", "seed"), "label", FieldDescriptorProto.LABEL_REPEATED),
        "is repeated uint64 = 7",
    ),
    "field not optional": (
        lambda files: field(files, "SamplingParams", "seed").ClearField("proto3_optional"),
        "slipstream.v1.SamplingParams.seed: was optional uint64 = 6",
    ),
    "field out of its oneof": (
        lambda files: field(files, "GenerateRequest", "text").ClearField("oneof_index"),
        "GenerateRequest.text: was oneof prompt string = 2, is single string = 2",
    ),
    "enum gone": (lambda files: _without(files.file[0].enum_type, "JobState"), "JobState: the enum is gone"),
    "value gone": (lambda files: files.file[0].enum_type[0].value.pop(), "the value is gone"),
    "value renumbered": (
        lambda files: setattr(files.file[0].enum_type[0].value[1], "number", 50),
        "was 1, is 50",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_named(name: str) -> None:
    change, line = BREAKS[name]
    changed = current()
    change(changed)
    lines = load().breaks(current(), changed)
    assert any(line in found for found in lines), lines


def test_additions_pass() -> None:
    changed = current()
    file = changed.file[0]
    message(changed, "Usage").field.add(name="more", number=50, type=FieldDescriptorProto.TYPE_BOOL)
    file.message_type.add(name="More").field.add(name="a", number=1, type=FieldDescriptorProto.TYPE_BOOL)
    file.enum_type[0].value.add(name="FINISH_REASON_MORE", number=50)
    file.service[0].method.add(name="More", input_type=".slipstream.v1.More", output_type=".slipstream.v1.More")
    file.service.add(name="Other")
    assert load().breaks(current(), changed) == []
    # And what was added is missed from then on.
    assert len(load().breaks(changed, current())) == 4


def test_messages_within_messages_count() -> None:
    old, new = current(), current()
    for files, number in ((old, 1), (new, 2)):
        nested = message(files, "Usage").nested_type.add(name="Inner")
        nested.field.add(name="a", number=number, type=FieldDescriptorProto.TYPE_BOOL)
    assert load().breaks(old, new) == ["slipstream.v1.Usage.Inner.a: was single bool = 1, is single bool = 2"]


def test_the_protos_keep_the_promises_of_the_last_release() -> None:
    released = FileDescriptorSet.FromString((ROOT / "protos" / "released" / "slipstream.v1.binpb").read_bytes())
    assert len(released.file) == 2
    assert load().breaks(released, current()) == []


def test_the_exit_status_says_so(tmp_path: Path) -> None:
    changed = current()
    _without(message(changed, "Usage").field, "seed")
    for name, files in (("old", current()), ("new", changed)):
        (tmp_path / name).write_bytes(files.SerializeToString())

    def run(released: str, other: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), str(tmp_path / released), str(tmp_path / other)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert run("new", "old").returncode == 0
    broken = run("old", "new")
    assert (broken.returncode, broken.stderr) == (1, "slipstream.v1.Usage.seed: the field is gone\n")
