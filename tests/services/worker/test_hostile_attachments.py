"""Whatever memory a scheduler offers: a worker refuses it or stays within it, and lives on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.device.cpu.shared_file import DIRECTORY, PREFIX
from slipstream.common.errors import ManifestError, MismatchError, OutOfMemoryError
from slipstream.common.wire.manifest import DTYPES, Manifest
from slipstream.common.wire.worker import command_to_pb
from tests.harness.guarded_arena import GuardedArena
from tests.harness.hosted import (
    FUZZ,
    TIMEOUT_S,
    GuardedMemory,
    Hosted,
    decode,
    error_of,
    no_arena_left,
)
from tests.harness.hostile_messages import change

pytestmark = pytest.mark.timeout(120)


def test_attachments_are_refused_or_stay_within_what_they_say(hosted: Hosted) -> None:
    @FUZZ
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        hosted.worker.engine.last_epoch = 0
        with hosted.memory() as memory:
            request = hosted.attach_request(memory)
            for _ in range(data.draw(st.integers(1, 3))):
                change(data.draw, request)
            if 2**20 < request.num_pages * request.page_tokens < 2**36:
                request.num_pages = 2**31  # what fits into the memory of some machines, and takes long to fill
            if error_of(lambda: hosted.worker.stub.Attach(request, timeout=TIMEOUT_S)) is None:
                memory.main.relay(Manifest.from_pb(request.manifest))
                command = replace(decode(1, hosted.is_draft, 1), epoch=request.epoch)
                if not hosted.is_draft:
                    command = replace(command, num_draft_tokens=())
                memory.allow_step(command)
                error_of(lambda: list(hosted.worker.stub.Execute(iter([command_to_pb(command)]), timeout=TIMEOUT_S)))
            hosted.worker.until_free()
            assert hosted.worker.failures == []

    with no_arena_left():
        fuzz()
        hosted.worker.engine.last_epoch = 0
        hosted.check_it_works()


def test_regions_are_refused_or_stay_within_what_they_say(hosted: Hosted) -> None:
    if hosted.is_draft:
        request = hosted.region_request(GuardedMemory(hosted.shape(), seed=0, is_draft=True), 1)
        assert "role" in str(error_of(lambda: hosted.worker.stub.AttachDraft(request, timeout=TIMEOUT_S)))
        return

    @FUZZ
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        hosted.worker.engine.last_epoch = 0
        with hosted.memory() as memory:
            request = hosted.attach_request(memory)
            hosted.worker.stub.Attach(request, timeout=TIMEOUT_S)
            region = hosted.region_request(memory, request.epoch)
            for _ in range(data.draw(st.integers(1, 3))):
                change(data.draw, region)
            attachment = 0
            if error_of(lambda: hosted.worker.stub.AttachDraft(region, timeout=TIMEOUT_S)) is None:
                memory.given.relay(Manifest.from_pb(region.given))
                memory.own.relay(Manifest.from_pb(region.own))
                attachment = region.attachment
            command = replace(decode(1, False, 1), epoch=request.epoch, attachment=attachment)
            memory.allow_step(command)
            error_of(lambda: list(hosted.worker.stub.Execute(iter([command_to_pb(command)]), timeout=TIMEOUT_S)))
            hosted.worker.until_free()
            assert hosted.worker.failures == []

    with no_arena_left():
        fuzz()
        hosted.worker.engine.last_epoch = 0
        hosted.check_it_works()


FILES: dict[str, Callable[[Path, GuardedArena], object]] = {
    "a-link": lambda path, arena: path.symlink_to(arena.path),
    "a-pipe": lambda path, _: os.mkfifo(path),
    "a-directory": lambda path, _: path.mkdir(),
    "a-device": lambda path, _: path.symlink_to("/dev/zero"),
    "one-byte-short": lambda path, arena: path.write_bytes(bytes(arena.manifest.size - 1)),
    "one-byte-long": lambda path, arena: path.write_bytes(bytes(arena.manifest.size + 1)),
    "nothing": lambda *_: None,
}
"""What is there in place of an arena, by name."""


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_the_arena_s_is_refused(hosted: Hosted, name: str) -> None:
    with hosted.memory() as memory:
        path = DIRECTORY / f"{PREFIX}{os.getpid()}-{name}"
        request = hosted.attach_request(memory)
        request.manifest.path = str(path)
        FILES[name](path, memory.main)
        try:
            error = error_of(lambda: hosted.worker.stub.Attach(request, timeout=TIMEOUT_S))
            assert isinstance(error, ManifestError)
        finally:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/etc/passwd", "file"),
        ("/dev/shm/slipstream-x/../../../etc/passwd", "file"),
        ("slipstream-x", "file"),
        ("", "file"),
        ("\0", "file"),
        ("/dev/shm/slipstream-" + "x" * 5000, "file"),
        (None, "cuda_ipc"),
        (None, ""),
    ],
)
def test_paths_and_kinds_that_no_arena_has(hosted: Hosted, path: str | None, kind: str) -> None:
    with hosted.memory() as memory:
        request = hosted.attach_request(memory)
        request.manifest.kind = kind
        if path is not None:
            request.manifest.path = path
        assert isinstance(error_of(lambda: hosted.worker.stub.Attach(request, timeout=TIMEOUT_S)), ManifestError)


def test_hidden_states_that_are_not_the_model_s(hosted: Hosted) -> None:
    """Hidden states of another width or dtype, or none although the draft reads them."""
    own = hosted.shape()
    misfits = [replace(own, hidden_width=own.hidden_width + 1)]
    if own.hidden_width:
        misfits += [replace(own, hidden_dtype=DTYPES[name]) for name in ("bfloat16", "float16", "int64")]
        misfits.append(replace(own, hidden_width=own.hidden_width - 1))
    if own.hidden_width and hosted.is_draft:
        misfits.append(replace(own, hidden_width=0))
    for shape in misfits:
        with hosted.memory(shape=shape) as memory:
            error = error_of(partial(hosted.attach, memory, hosted.attach_request(memory)))
            assert isinstance(error, MismatchError)
            assert "hidden states" in str(error)
        hosted.worker.on_device_thread(hosted.worker.engine.close)


def test_more_pages_than_there_is_memory(hosted: Hosted) -> None:
    with hosted.memory() as memory:
        request = hosted.attach_request(memory)
        request.num_pages, request.page_tokens = 2**31, 2**16
        error = error_of(lambda: hosted.worker.stub.Attach(request, timeout=TIMEOUT_S))
        assert isinstance(error, OutOfMemoryError)
        assert "pages" in str(error)
    hosted.check_it_works()
