"""The suffix cache for GPUs against the one for CPUs."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.services.draft.fused_suffix_cache import FusedSuffixCache
from slipstream.services.draft.ngram import look_up
from slipstream.services.draft.suffix_cache import NewTokens, SuffixCache

pytestmark = pytest.mark.sampled_module(2)

SLOTS = 9
WIDTH = 40


def random_step(rng: random.Random, ends: dict[int, int], num_tokens: int) -> tuple[NewTokens, torch.Tensor]:
    """New tokens of some slots, of which most go on where they were, and a row of padding."""
    slots = rng.sample(range(1, SLOTS), k=rng.randrange(1, SLOTS))
    num_new = [rng.randrange(1, num_tokens + 2) for _ in slots]
    for slot, count in zip(slots, num_new, strict=True):
        ends[slot] = ends.get(slot, rng.randrange(3)) + count
        if ends[slot] >= WIDTH or rng.random() < 0.1:
            ends[slot] = rng.randrange(WIDTH)
    size = (len(slots) + 1, WIDTH)
    history = torch.tensor(rng.choices(range(2), k=size[0] * WIDTH), dtype=torch.int32).view(size)
    new = NewTokens(
        rows=torch.tensor([*slots, 0]),
        ends=torch.tensor([*(ends[slot] for slot in slots), 0]),
        num_new=torch.tensor([*num_new, 1]),
        tokens=torch.tensor(rng.choices(range(2), k=size[0] * (num_tokens + 1))).view(size[0], -1),
        limits=torch.tensor([*(rng.choice((WIDTH, WIDTH, 20)) for _ in slots), 0]),
        are_shared=torch.tensor([*(rng.random() < 0.8 for _ in slots), True]),
    )
    return new, history


@pytest.mark.parametrize(
    ("size", "bounds", "num_tokens"), [(50, (1, 1), 1), (50, (3, 8), 4), (1024, (1, 5), 3), (2500, (2, 5), 4)]
)
def test_each_step_writes_and_guesses_the_same(
    size: int, bounds: tuple[int, int], num_tokens: int, device: torch.device
) -> None:
    rng, ends, num_improved = random.Random(f"{size} {bounds}"), dict[int, int](), 0
    plain = SuffixCache(size, SLOTS, bounds, torch.device("cpu"))
    fused = FusedSuffixCache(size, SLOTS, bounds, device)
    for cache in (plain, fused):
        cache._count.fill_(size - 20)  # soon round
    for _ in range(12):
        new, history = random_step(rng, ends, num_tokens)
        there = NewTokens(*(tensor.to(device) for tensor in new))
        interrupted = torch.tensor(rng.sample(range(1, SLOTS), k=rng.randrange(2)), dtype=torch.int64)
        plain.interrupt(interrupted)
        fused.interrupt(interrupted.to(device))
        plain.record(new, history)
        fused.record(there, history.to(device))
        own = look_up(history, new.ends, num_tokens, shortest=bounds[0], longest=bounds[1])
        own = own._replace(scores=own.scores.clamp(max=rng.randrange(5)))
        expected = plain.improve(own, new, history)
        found = fused.improve(
            own._replace(tokens=own.tokens.to(device), scores=own.scores.to(device)), there, history.to(device)
        )
        assert found.tolist() == expected.tolist()
        assert found.dtype == expected.dtype
        num_improved += int((expected != own.tokens).any(dim=1).sum())
    for name in ("_tokens", "_before", "_next"):
        assert getattr(fused, name)[..., :size].tolist() == getattr(plain, name)[..., :size].tolist()
    for name in ("_count", "_last", "_expected"):
        assert getattr(fused, name).tolist() == getattr(plain, name).tolist()
    assert int(plain._count) > size, "the oldest entries were overwritten"
    assert num_improved > 3
