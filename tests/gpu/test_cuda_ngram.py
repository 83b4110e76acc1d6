"""Prompt lookup in a CUDA graph guesses what it guesses on a CPU; and its time for 64 slots of 8k tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from slipstream.services.draft.ngram import NgramDrafter
from slipstream.services.worker.epoch import EpochState
from slipstream.services.worker.future_map import NextStepState, Region
from slipstream.services.worker.graphs import CudaCapture
from slipstream.services.worker.slots import SamplingMode, SlotTable
from tests.harness.workers import SHAPE, SharedArenas, attachment_to

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from slipstream.common.device.cuda.device import CudaDevice

SLOTS, CONTEXT, PAGE_TOKENS, NUM_DRAFT_TOKENS = 64, 8192, 16, 4
MOST_US = 300
NUM_REPLAYS = 50


def lookup_on(where: torch.device) -> tuple[Callable[[], torch.Tensor], Callable[[int], None]]:
    """Prompt lookup for all slots, whose pages lie anywhere; and what gives them tokens and lengths, by a seed."""
    slot_pages = CONTEXT // PAGE_TOKENS + 1
    arenas = SharedArenas(replace(SHAPE, num_slots=SLOTS + 1))
    attachment = attachment_to(
        arenas,
        page_tokens=PAGE_TOKENS,
        slot_pages=slot_pages,
        num_pages=SLOTS * slot_pages + 1,
        context_tokens=CONTEXT,
    )
    arenas.close()
    slots, drafter = SlotTable(attachment, 64, where), NgramDrafter(1, 5, where)
    drafter.open(EpochState(attachment, cast("Region", None), Region, slots))
    pages = torch.randperm(SLOTS * slot_pages, generator=torch.Generator().manual_seed(1)) + 1
    slots.page_table[1:] = pages.view(SLOTS, slot_pages).to(where)
    slots.limits.fill_(CONTEXT)
    rows, ends = torch.arange(1, SLOTS + 1, device=where), torch.zeros(SLOTS, dtype=torch.int64, device=where)
    last = torch.zeros((SLOTS, NUM_DRAFT_TOKENS + 1), dtype=torch.int64, device=where)
    stash = NextStepState(
        seq_lens=ends, bonus_tokens=last[:, 0], num_new=torch.ones_like(ends), last_tokens=last, hidden_states=None
    )

    def fill(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        drafter._pages.copy_(torch.randint(0, 20, tuple(drafter._pages.shape), generator=generator))
        ends.copy_(torch.randint(0, CONTEXT, (SLOTS,), generator=generator))
        last.copy_(torch.randint(0, 20, tuple(last.shape), generator=generator))

    return lambda: drafter.propose(rows, stash, NUM_DRAFT_TOKENS, SamplingMode.NOISE), fill


def test_a_replay_guesses_what_a_cpu_guesses(device: CudaDevice, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        (here, fill_here), (there, fill_there) = (lookup_on(torch.device(name)) for name in ("cpu", "cuda"))
        found = torch.zeros((SLOTS, NUM_DRAFT_TOKENS), dtype=torch.int64, device="cuda")

        def work() -> None:
            found.copy_(there())

        fill_there(0)
        replay = CudaCapture().capture(work)
        for seed in range(1, 4):
            for fill in (fill_here, fill_there):
                fill(seed)
            replay()
            assert found.tolist() == here().tolist()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(NUM_REPLAYS):
            replay()
        end.record()
        end.synchronize()
    taken_us = 1000 * begin.elapsed_time(end) / NUM_REPLAYS
    with capsys.disabled():
        print(f"\nprompt lookup, {SLOTS} slots of {CONTEXT} tokens: {taken_us:.0f} us")
    assert taken_us < MOST_US
