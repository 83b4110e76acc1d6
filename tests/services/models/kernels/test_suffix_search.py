"""The search of remembered outputs against the one for CPUs."""

from __future__ import annotations

import pytest
import torch

from slipstream.services.draft import suffix_cache
from slipstream.services.models.kernels.suffix_search import search


@pytest.mark.parametrize("size", [1, 13, 1024, 3000])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 5), (3, 8)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0, 2.7])
def test_it_finds_what_the_other_finds(
    size: int, shortest: int, longest: int, share: float, device: torch.device
) -> None:
    """`share`: of the ring, how much was ever written."""
    generator = torch.Generator().manual_seed(size + longest)
    count = torch.tensor([int(size * share)])
    before = torch.randint(3, (longest, size + 1), generator=generator, dtype=torch.int32)
    before[:, min(int(count), size) :] = -1
    suffixes = torch.randint(3, (9, longest), generator=generator, dtype=torch.int32)
    suffixes[1] = 7
    suffixes[2, longest // 2 :] = -2
    before[:, size] = suffixes[3]  # what is not to be written
    expected = suffix_cache.search(before, suffixes, count, shortest)
    found = search(before.to(device), suffixes.to(device), count.to(device), shortest)
    assert found.tolist() == expected.tolist()
    assert found.dtype == expected.dtype
    if share >= 1 and size >= 1024:
        assert (expected > 0).sum() > 5
