"""Finds what a test leaves behind: threads, file descriptors, files in /dev/shm, and mappings of them."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream.common.device.cpu.shared_file import DIRECTORY, PREFIX

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Held:
    """The resources that this process holds at a moment."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[str, str]]
    """Number and target."""
    files: frozenset[str]
    """This process's arenas that have a name."""
    mappings: int
    """Arenas that are mapped, sealed ones too."""

    @classmethod
    def now(cls) -> Held:
        """After everything that only a cycle of references keeps is gone."""
        gc.collect()
        return cls(
            threads=frozenset(threading.enumerate()),
            descriptors=frozenset(_descriptors()),
            files=frozenset(path.name for path in DIRECTORY.glob(f"{PREFIX}{os.getpid()}-*")),
            mappings=Path("/proc/self/maps").read_text(encoding="utf-8").count(str(DIRECTORY / PREFIX)),
        )

    def beyond(self, before: Held, *, with_descriptors: bool) -> dict[str, object]:
        """What there is more of than before, by its kind."""
        more: dict[str, object] = {
            "threads": self.threads - before.threads,
            "files in /dev/shm": self.files - before.files,
            "file descriptors": with_descriptors and self.descriptors - before.descriptors,
            "mappings of arenas": max(0, self.mappings - before.mappings),
        }
        return {kind: what for kind, what in more.items() if what}


@contextmanager
def nothing_left(*, with_descriptors: bool = True) -> Iterator[None]:
    """Fails if the block leaves something behind; gRPC keeps descriptors of its own, once it has been used.

    A thread that was told to end may end a moment later.
    """
    before = Held.now()
    # Whatever is there now stays: the collector need only look at what the block makes.
    gc.freeze()
    yield
    give_up_at = time.monotonic() + _TIMEOUT_S
    while left := Held.now().beyond(before, with_descriptors=with_descriptors):
        assert time.monotonic() < give_up_at, left
        time.sleep(0.02)


def held_by(process: psutil.Process) -> dict[str, int]:
    """How many threads and descriptors another process holds at a moment."""
    return {"threads": process.num_threads(), "descriptors": process.num_fds()}


def check_it_holds_no_more_than(before: dict[str, int], process: psutil.Process) -> None:
    """Fails if it holds more of something, and keeps it: its end of a connection is closed a moment after ours."""
    give_up_at = time.monotonic() + _TIMEOUT_S
    while grown := {name: number for name, number in held_by(process).items() if number > before[name]}:
        assert time.monotonic() < give_up_at, f"it holds {grown}, before it held {before}"
        time.sleep(0.02)


def _descriptors() -> Iterator[tuple[str, str]]:
    for path in Path("/proc/self/fd").iterdir():
        try:
            yield path.name, str(path.readlink())
        except FileNotFoundError:
            continue  # the one that the directory was read with
