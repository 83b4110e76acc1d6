"""The arena of a GPU between two processes: the same memory, never mapped beyond its bounds, freed in time."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from slipstream.common.errors import ManifestError, OutOfMemoryError
from slipstream.common.wire.manifest import EVENT, HOST, TIMELINE, BufferSpec
from slipstream.common.wire.step import FenceName
from tests.gpu.conftest import SPECS

if TYPE_CHECKING:
    from slipstream.common.device.cuda.arena import CudaArena
    from slipstream.common.device.cuda.device import CudaDevice
    from slipstream.common.wire.manifest import FenceWord
    from tests.harness.other_process import GpuUser


def with_fences(arena: CudaArena, **changes: Any) -> tuple[FenceWord, ...]:
    """The fences of an arena, changed."""
    return tuple(replace(word, **changes) for word in arena.manifest.fences)


def test_starts_as_zeros_and_is_the_same_memory_everywhere(arena: CudaArena, other: GpuUser) -> None:
    assert other.open(arena.manifest) == "opened"
    for number, spec in enumerate(SPECS, start=1):
        tensor = arena.tensor(spec.name)
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (spec.shape, spec.dtype, "cuda")
        assert not tensor.any()
        other.do(f"fill {spec.name} {number}")
    assert other.ask("sync 10") == "done"
    for number, spec in enumerate(SPECS, start=1):
        assert (arena.tensor(spec.name) == number).all()
        arena.tensor(spec.name).fill_(-number)
    torch.cuda.synchronize()
    for number, spec in enumerate(SPECS, start=1):
        assert set(other.read(spec.name)) == {-number}
    assert [arena.fence(name).poll() for name in FenceName] == [0] * len(FenceName)


def test_what_is_not_there_is_named(arena: CudaArena) -> None:
    with pytest.raises(ManifestError, match="no buffer seq_lens"):
        arena.tensor("seq_lens")


def test_views_keep_the_memory_mapped(arena: CudaArena, other: GpuUser) -> None:
    assert other.open(arena.manifest) == "opened"
    arena.tensor("tokens").fill_(7)
    torch.cuda.synchronize()
    other.do("keep tokens")
    assert other.ask("close") == "mapped"
    assert other.read("kept") == [7, 7, 7, 7]


def test_a_handle_that_means_nothing_is_refused(arena: CudaArena, other: GpuUser) -> None:
    for handle in (bytes(64), bytes(range(64)), b"\xff" * 64, arena.manifest.handle[::-1]):
        assert "the memory handle cannot be opened" in other.open(replace(arena.manifest, handle=handle))
    assert other.open(arena.manifest) == "opened"


@pytest.mark.parametrize("length", [1, 63, 65, 4096])
def test_a_handle_of_another_length_is_refused(arena: CudaArena, other: GpuUser, length: int) -> None:
    assert f"a memory handle of {length} bytes" in other.open(replace(arena.manifest, handle=bytes(length)))


def test_a_range_beyond_the_allocation_is_refused(arena: CudaArena, other: GpuUser) -> None:
    answer = other.open(replace(arena.manifest, size=1 << 30))
    assert answer.startswith("ManifestError: the memory handle is of 2097152 bytes, and the arena of 1073741824")
    answer = other.open(replace(arena.manifest, size=arena.manifest.size - 256))
    assert "aligned part" in answer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "other"}, "arena kind 'other'"),
        ({"handle": b""}, "no memory handle"),
        ({"size": 2**63}, "and the arena of"),
    ],
)
def test_another_kind_is_refused(arena: CudaArena, other: GpuUser, changes: dict[str, Any], message: str) -> None:
    assert message in other.open(replace(arena.manifest, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": HOST}, "of kind 'host'"),
        ({"kind": "other"}, "of kind 'other'"),
        ({"kind": TIMELINE, "events": (bytes(64),) * 3}, "with 3 events"),
        ({"kind": EVENT, "events": ()}, "with 0 events"),
        ({"kind": EVENT, "events": (bytes(64),)}, "with 1 events"),
        ({"kind": EVENT, "events": (bytes(63),) * 3}, "an event handle of 63 bytes"),
        ({"kind": EVENT, "events": (bytes(64),) * 300}, "300 events"),
        ({"kind": EVENT, "events": (bytes(64),) * 3}, "cannot be opened"),
        ({"kind": EVENT, "events": (b"\xff" * 64,) * 3}, "cannot be opened"),
    ],
)
def test_fences_that_contradict_themselves_are_refused(
    arena: CudaArena, other: GpuUser, changes: dict[str, Any], message: str
) -> None:
    answer = other.open(replace(arena.manifest, fences=with_fences(arena, **changes)))
    assert answer.startswith("ManifestError")
    assert message in answer


def test_a_manifest_whose_memory_is_gone_is_refused(device: CudaDevice, other: GpuUser) -> None:
    stale = device.create_arena(SPECS, list(FenceName))
    manifest = stale.manifest
    stale.close()
    device.create_arena(SPECS, list(FenceName)).seal()
    gc.collect()
    assert "the memory handle cannot be opened" in other.open(manifest)


def test_memory_is_kept_until_everybody_has_attached_to_the_next(device: CudaDevice, other: GpuUser) -> None:
    """A worker may still be draining the last epoch when its arena is closed.

    Asked of the handle, which opens for as long as the owner has the memory: how much of the card is free says nothing
    about this memory while others use the card.
    """
    first = device.create_arena(SPECS, list(FenceName))
    manifest = first.manifest
    assert other.open(manifest) == "opened"
    first.close()
    gc.collect()
    other.do("fill tokens 3")
    assert other.ask("sync 10") == "done"
    assert other.ask("close") == "unmapped"
    assert other.open(manifest) == "opened"
    assert other.read("tokens") == [3, 3, 3, 3]
    assert other.ask("close") == "unmapped"
    second = device.create_arena(SPECS, list(FenceName))
    second.seal()
    gc.collect()
    assert "the memory handle cannot be opened" in other.open(manifest)
    second.close()


def test_the_owner_itself_can_open_it(device: CudaDevice, arena: CudaArena) -> None:
    again = device.open_arena(arena.manifest)
    again.tensor("tokens").fill_(5)
    assert (arena.tensor("tokens") == 5).all()
    again.close()


def test_too_little_memory_is_one_clear_line(device: CudaDevice) -> None:
    spec = BufferSpec("huge", (1 << 50,), torch.int32, "verify")
    with pytest.raises(OutOfMemoryError, match=r"4294967298 MiB of shared buffers; \d+ of \d+ MiB of the GPU are free"):
        device.create_arena([spec], list(FenceName))
