"""The arena of the CPU: shared by name until it is sealed, mapped within its bounds, read-only where it must be."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.common.device.cpu.device import HostArena, HostDevice
from slipstream.common.device.cpu.shared_file import DIRECTORY, PREFIX
from slipstream.common.errors import DeviceError, FailedPreconditionError, ManifestError, OutOfMemoryError
from slipstream.common.wire.manifest import BufferSpec, Manifest
from slipstream.common.wire.step import FenceName
from slipstream.protos import worker_pb2 as pb
from tests.common.device.conftest import SPECS, MakeStream
from tests.harness.other_process import ArenaReader
from tests.harness.sampling import examples

INTERESTING = st.sampled_from([0, 1, 2, 63, 64, 255, 256, 512, 4096, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
NUMBERS = st.one_of(INTERESTING, st.integers(0, 4096), st.integers(0, 2**64 - 1))


def test_starts_as_zeros_and_is_the_same_memory_everywhere(arena: HostArena) -> None:
    other = HostArena.open(arena.manifest)
    for spec in SPECS:
        tensor = arena.tensor(spec.name)
        assert (tensor.shape, tensor.dtype) == (spec.shape, spec.dtype)
        assert not tensor.any()
        other.tensor(spec.name).fill_(3)
        assert (tensor == 3).all()
    other.fence(FenceName.VERIFY_STASH).release(5)
    assert [arena.fence(name).poll() for name in FenceName] == [0, 0, 5, 0, 0, 0]
    other.close()


def test_no_room_is_an_error_that_says_how_much_is_needed_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(DIRECTORY.iterdir())
    huge = BufferSpec("huge", (2**50,), torch.int64, "verify")
    with pytest.raises(OutOfMemoryError, match=r"^/dev/shm has no room for 8589934593 MiB .*: \d+ of \d+ MiB are free"):
        HostArena.create([huge], [FenceName.DRAFT_PROPOSED])

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(DeviceError, match=r"^shared memory cannot be made in /dev/shm: broken$"):
        _make_one()
    assert set(DIRECTORY.iterdir()) <= before


def test_buffers_do_not_touch_each_other(arena: HostArena) -> None:
    for number, spec in enumerate(SPECS, start=1):
        arena.tensor(spec.name).fill_(number)
    assert [set(arena.tensor(spec.name).flatten().tolist()) for spec in SPECS] == [{1}, {2}, {3}]
    assert [arena.fence(name).poll() for name in FenceName] == [0] * len(FenceName)


def test_what_is_not_there_is_named(arena: HostArena) -> None:
    with pytest.raises(ManifestError, match="no buffer seq_lens"):
        arena.tensor("seq_lens")
    few = HostArena.create(SPECS, [FenceName.DRAFT_PROPOSED])
    with pytest.raises(ManifestError, match="no fence VERIFY_STASH"):
        few.fence(FenceName.VERIFY_STASH)
    few.close()


def test_a_sealed_arena_cannot_be_opened_and_stays_open_where_it_is(arena: HostArena) -> None:
    early = HostArena.open(arena.manifest)
    arena.seal()
    arena.seal()
    assert not Path(arena.manifest.path).exists()
    with pytest.raises(ManifestError, match="No such file"):
        HostArena.open(arena.manifest)
    arena.tensor("tokens").fill_(9)
    assert (early.tensor("tokens") == 9).all()
    early.close()


def test_only_the_owner_takes_the_name_away(arena: HostArena) -> None:
    HostArena.open(arena.manifest).close()
    HostArena.open(arena.manifest).close()


def test_the_file_is_for_this_user_alone(arena: HostArena) -> None:
    assert os.stat(arena.manifest.path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dev/zero", "is not /dev/shm/slipstream-"),
        ("/dev/shm/other", "is not"),
        ("/dev/shm/slipstream-x/../../zero", "is not"),
        ("/dev/shm/../shm/slipstream-x", "is not"),
        ("", "is not"),
        ("/dev/shm/slipstream-none", "No such file"),
        ("/dev/shm/slipstream-\0", "null"),
        ("/dev/shm/slipstream-" + "x" * 300, "too long"),
    ],
)
def test_only_paths_of_arenas_are_opened(arena: HostArena, path: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        HostArena.open(replace(arena.manifest, path=path))


def _link(path: Path, target: str) -> None:
    path.symlink_to(target)


def _directory(path: Path, target: str) -> None:
    path.mkdir()


def _pipe(path: Path, target: str) -> None:
    os.mkfifo(path)


def _short(path: Path, target: str) -> None:
    path.write_bytes(bytes(64))


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("make", [_link, _directory, _pipe, _short])
def test_another_file_is_refused(
    arena: HostArena,
    make: Callable[[Path, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    read_only: bool,
) -> None:
    # In /dev/shm any process that makes an arena would take it for a leftover.
    monkeypatch.setattr("slipstream.common.device.cpu.shared_file.DIRECTORY", tmp_path)
    path = tmp_path / f"{PREFIX}{make.__name__}"
    make(path, arena.manifest.path)
    with pytest.raises(ManifestError):
        HostArena.open(replace(arena.manifest, path=str(path)), read_only=read_only)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"kind": "cuda_ipc"}, "arena kind 'cuda_ipc'"), ({"size": 2**20}, "bytes"), ({"size": 512}, "aligned part")],
)
def test_another_kind_or_size_is_refused(arena: HostArena, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        HostArena.open(replace(arena.manifest, **changes))


def test_a_fence_of_another_kind_is_refused(arena: HostArena) -> None:
    words = tuple(replace(word, kind="event") for word in arena.manifest.fences)
    with pytest.raises(ManifestError, match="fence DRAFT_PROPOSED of kind 'event'"):
        HostArena.open(replace(arena.manifest, fences=words))


@st.composite
def hostile(draw: st.DrawFn) -> Callable[[pb.Manifest], None]:
    """Changes a few things of a manifest."""
    count = draw(st.integers(1, 3))
    changes = [draw(_change()) for _ in range(count)]

    def apply(message: pb.Manifest) -> None:
        for change in changes:
            change(message)

    return apply


@st.composite
def _change(draw: st.DrawFn) -> Callable[[pb.Manifest], None]:
    number = draw(NUMBERS)
    buffer, word = draw(st.integers(0, len(SPECS) - 1)), draw(st.integers(0, len(FenceName) - 1))
    text = draw(st.one_of(st.sampled_from(["", "lengths", "tokens", "float32", "int64", "host"]), st.text(max_size=8)))

    def set_shape(message: pb.Manifest) -> None:
        del message.buffers[buffer].shape[:]
        message.buffers[buffer].shape.extend(shape)

    shape = draw(st.lists(NUMBERS, max_size=10))
    changes: list[Callable[[pb.Manifest], None]] = [
        lambda message: setattr(message, "size", number),
        lambda message: setattr(message, "kind", text),
        lambda message: setattr(message, "path", f"{DIRECTORY}/{PREFIX}{text}"),
        lambda message: setattr(message.buffers[buffer], "offset", number),
        lambda message: setattr(message.buffers[buffer], "name", text),
        lambda message: setattr(message.buffers[buffer], "dtype", text),
        lambda message: setattr(message.fences[word], "offset", number),
        lambda message: setattr(message.fences[word], "kind", text),
        lambda message: setattr(message.fences[word], "fence", number % 2**31),
        lambda message: message.buffers.add().CopyFrom(message.buffers[buffer]),
        lambda message: message.fences.add().CopyFrom(message.fences[word]),
        set_shape,
    ]
    return draw(st.sampled_from(changes))


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=hostile())
def test_any_manifest_is_refused_or_stays_within_bounds(
    arena: HostArena, change: Callable[[pb.Manifest], None]
) -> None:
    message = arena.manifest.to_pb()
    change(message)
    try:
        opened = HostArena.open(Manifest.from_pb(message))
    except ManifestError:
        return
    size = os.stat(arena.manifest.path).st_size
    for placed in opened.manifest.buffers:
        assert 0 <= placed.offset <= placed.end <= size
        opened.tensor(placed.spec.name).zero_()  # every byte: outside it would be a fault
    for word in opened.manifest.fences:
        opened.fence(word.fence).poll()
    opened.close()


def test_the_file_of_a_killed_owner_is_removed_by_the_next(arena: HostArena) -> None:
    script = (
        "import torch, os, signal\n"
        "from slipstream.common.device.cpu.device import HostArena\n"
        "from slipstream.common.wire.manifest import BufferSpec\n"
        "arena = HostArena.create([BufferSpec('a', (4,), torch.int64, 'x')], [])\n"
        "print(arena.manifest.path, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None, "a pipe was asked for"
        left = Path(owner.stdout.readline().strip())
        _make_one().close()
        assert left.exists(), "its owner lives"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    # Unless a neighbour of this process has made one meanwhile.
    _make_one().close()
    assert not left.exists()
    assert Path(arena.manifest.path).exists(), "another arena of a living owner"


def _make_one() -> HostArena:
    return HostArena.create([BufferSpec("a", (4,), torch.int64, "verify")], list(FenceName))


STASH = FenceName.VERIFY_STASH
PROMPT_S = 30.0
"""Longer than any thread here waits for the processor, and shorter than a wait that is not ended."""


def test_another_process_reads_and_a_write_ends_it(arena: HostArena) -> None:
    name = "tokens"
    arena.tensor(name).fill_(3)
    with ArenaReader.of(arena.manifest) as reader:
        assert reader.ask(f"read {name}") == "3 3 3 3"
        arena.tensor(name).fill_(4)
        assert reader.ask(f"read {name}") == "4 4 4 4"
        reader.tell(f"write {name}")
        assert reader.ended() == -signal.SIGSEGV
    assert (arena.tensor(name) == 4).all()


def test_another_process_waits_and_can_signal_nothing(arena: HostArena) -> None:
    fence = arena.fence(STASH)
    with ArenaReader.of(arena.manifest) as reader:
        assert reader.ask(f"wait {STASH.name} 1 0.01") == "False"
        reader.tell(f"wait {STASH.name} 1 60")
        fence.store(1)
        assert reader.answer() == "True"
        assert "maps only for reading" in reader.ask(f"store {STASH.name} 2")
        assert reader.ask(f"poll {STASH.name}") == "1"
    assert fence.poll() == 1


def test_a_release_ends_the_waits_of_its_own_process_alone(arena: HostArena) -> None:
    fence = arena.fence(STASH)
    with ArenaReader.of(arena.manifest) as reader:
        assert reader.ask(f"release-later {STASH.name} 5 0.2") == "ok"
        assert reader.ask(f"wait {STASH.name} 5 60") == "True"
        assert reader.ask(f"poll {STASH.name}") == "5"
        assert reader.ask(f"release {STASH.name} 4") == "ok"
        assert reader.ask(f"poll {STASH.name}") == "5", "a release lowers nothing"
        assert fence.poll() == 0
        fence.store(7)
        assert reader.ask(f"wait {STASH.name} 7 60") == "True"


def test_a_stream_that_waits_is_released_and_goes_on(arena: HostArena, make_stream: MakeStream) -> None:
    opened, stream = HostDevice().open_arena(arena.manifest, read_only=True), make_stream()
    fence = opened.fence(STASH)
    with pytest.raises(FailedPreconditionError, match="only for reading"):
        fence.signal(stream, 1)
    fence.wait(stream, 3)
    fence.wait(stream, 4)
    started = time.monotonic()
    fence.release(4)
    stream.synchronize(PROMPT_S)
    assert time.monotonic() - started < PROMPT_S
    fence.wait(stream, 9)
    arena.fence(STASH).store(9)
    stream.synchronize(PROMPT_S)
    opened.close()


def test_a_view_outlives_the_arena(arena: HostArena) -> None:
    opened = HostArena.open(arena.manifest, read_only=True)
    view = opened.tensor("lengths")
    opened.close()
    del opened
    arena.tensor("lengths").fill_(6)
    assert (view == 6).all()
