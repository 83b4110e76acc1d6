"""Layouts of the arena: those that are made hold, and those that come from elsewhere are refused or hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.errors import ManifestError
from slipstream.common.wire.manifest import (
    ALIGNMENT_BYTES,
    DTYPES,
    FENCE_BYTES,
    BufferSpec,
    FenceWord,
    Manifest,
    Placed,
    lay_out,
)
from slipstream.common.wire.step import FenceName

SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)
SPECS = st.lists(
    st.builds(
        BufferSpec, st.text("abc", min_size=1, max_size=3), SHAPES, st.sampled_from(list(DTYPES.values())), st.just("x")
    ),
    max_size=6,
    unique_by=lambda spec: spec.name,
)
FENCES = st.lists(st.sampled_from(FenceName), min_size=1, unique=True)


@given(SPECS, FENCES)
def test_every_layout_passes_its_own_check(specs: list[BufferSpec], fences: list[FenceName]) -> None:
    buffers, words, size = lay_out(specs, fences, "host")
    Manifest("file", "path", size, buffers, words).check()
    assert [placed.spec for placed in buffers] == specs
    assert [word.fence for word in words] == fences
    assert_apart(buffers, words, size)


def _manifest(*buffers: Placed, words: tuple[FenceWord, ...] = (), size: int = 4096) -> Manifest:
    return Manifest("file", "path", size, buffers, words)


def _placed(name: str = "a", *, offset: int = 0, shape: tuple[int, ...] = (4,)) -> Placed:
    return Placed(BufferSpec(name, shape, torch.int64, "verify"), offset)


def _word(offset: int, fence: FenceName = FenceName.DRAFT_PROPOSED) -> FenceWord:
    return FenceWord(fence, "host", offset)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (_manifest(_placed(offset=4096)), "not an aligned part"),
        (_manifest(_placed(offset=-ALIGNMENT_BYTES)), "not an aligned part"),
        (_manifest(_placed(offset=8)), "not an aligned part"),
        (_manifest(_placed(offset=FENCE_BYTES)), "not an aligned part"),
        (_manifest(_placed(shape=(513,))), "not an aligned part"),
        (_manifest(_placed(shape=(2**32, 2**32))), "not an aligned part"),
        (_manifest(_placed(shape=())), "sizes above 0"),
        (_manifest(_placed(shape=(4, 0))), "sizes above 0"),
        (_manifest(_placed(shape=(-1, -4))), "sizes above 0"),
        (_manifest(_placed(shape=(1,) * 9)), "sizes above 0"),
        (_manifest(_placed("a"), _placed("b")), "overlap"),
        (_manifest(_placed("a", shape=(100,)), _placed("b", offset=256)), "overlap"),
        (_manifest(_placed("a", offset=256), _placed("a")), "twice"),
        (_manifest(words=(_word(4090),)), "not an aligned part"),
        (_manifest(words=(_word(4096),)), "not an aligned part"),
        (_manifest(words=(_word(0), _word(0, FenceName.VERIFY_STASH))), "overlap"),
        (_manifest(words=(_word(0), _word(64))), "twice"),
        (_manifest(_placed(), words=(_word(0),)), "overlap"),
        (_manifest(size=0), "0 bytes"),
        (replace(_manifest(), handle=bytes(63)), "a memory handle of 63 bytes instead of 64"),
        (_manifest(words=(replace(_word(0), events=(bytes(64), bytes(65))),)), "an event handle of 65 bytes"),
        (_manifest(words=(replace(_word(0), events=(bytes(64),) * 257),)), "257 events, at most 256"),
    ],
)
def test_an_invalid_manifest_is_refused(manifest: Manifest, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        manifest.check()


@given(
    st.lists(
        st.builds(
            Placed,
            st.builds(BufferSpec, st.sampled_from("abc"), SHAPES, st.sampled_from(list(DTYPES.values())), st.just("x")),
            st.integers(-2, 20).map(lambda number: number * 128),
        ),
        max_size=3,
    ),
    st.lists(
        st.builds(FenceWord, st.sampled_from(FenceName), st.just("host"), st.integers(-1, 40).map(lambda n: n * 32)),
        max_size=3,
    ),
    st.integers(-1, 4096),
)
def test_whatever_passes_lies_within_the_arena_and_apart(
    buffers: list[Placed], words: list[FenceWord], size: int
) -> None:
    manifest = Manifest("file", "path", size, tuple(buffers), tuple(words))
    try:
        manifest.check()
    except ManifestError:
        return
    assert_apart(buffers, words, size)


def assert_apart(buffers: Iterable[Placed], words: Iterable[FenceWord], size: int) -> None:
    """Every part lies between 0 and `size`, and no two share a byte."""
    parts = [(one.offset, one.offset + math.prod(one.spec.shape) * one.spec.dtype.itemsize) for one in buffers]
    parts += [(word.offset, word.offset + FENCE_BYTES) for word in words]
    assert all(0 <= start < end <= size for start, end in parts)
    assert all(left[1] <= right[0] or right[1] <= left[0] for left, right in combinations(parts, 2))
