"""Masks that kernels apply: the logits and the faults that the CPU's masks give."""

from __future__ import annotations

import pytest
import torch

from slipstream.common.wire.events import EventLog
from slipstream.common.wire.layout import UNMASKED, UNMATCHED, BufferName, GrammarShape
from slipstream.common.wire.step import StepCommand
from slipstream.services.worker.fused_future_map import FusedMasks
from slipstream.services.worker.masks import GrammarMasks
from slipstream.services.worker.slots import Staging

STEP = 9
STAMPS = (0, STEP, -STEP, STEP - 1, STEP, STEP)
"""By slot: the second's masks are there, the third's matcher has failed, the fourth's are of an earlier step."""
CONSTRAINED = (1, 2, 3, 4)
K = 3


def made(kind: type[GrammarMasks], vocab_size: int, device: torch.device) -> GrammarMasks:
    """The memory of a grammar worker full of random masks."""
    shape = GrammarShape(num_slots=len(STAMPS), num_draft_tokens=K, vocab_size=vocab_size)
    buffers = {
        BufferName(spec.name): torch.zeros(spec.shape, dtype=spec.dtype)
        for spec in (*shape.own_specs(), *shape.given_specs())
    }
    words = buffers[BufferName.MASKS]
    generator = torch.Generator().manual_seed(1)
    words.copy_(torch.randint(-(2**31), 2**31, words.shape, generator=generator))
    buffers[BufferName.MASK_STAMPS].copy_(torch.tensor(STAMPS))
    where = torch.device("cpu") if kind is GrammarMasks else device
    moved = {name: buffer.to(where) for name, buffer in buffers.items()}
    return kind(shape, moved, number=3, log=EventLog())


@pytest.mark.parametrize("vocab_size", [31, 64, 5000])
@pytest.mark.parametrize("width", [1, K + 1])
@pytest.mark.parametrize("rows", [(4, 5, 1, 0, 0), (2, 1, 4, 3, 5), (5,)])
def test_logits_and_faults_are_those_of_a_cpu(
    vocab_size: int, width: int, rows: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> None:
    """Slots without a constraint and padding beside those with one."""
    command = StepCommand(epoch=1, step=STEP, slots=rows, constrained=CONSTRAINED, grammar=3)
    logits = torch.randn((len(rows), width, vocab_size), generator=torch.Generator().manual_seed(2)).to(dtype)
    logits[0, 0, :9] = float("nan")
    expected, expected_faults = logits, [0] * len(rows)
    here = made(GrammarMasks, vocab_size, device).of_step(command, Staging()).take(torch.tensor(rows), width)
    if here is not None:
        expected, expected_faults = here.apply(logits), here.faults_of(len(rows)).tolist()
    there = made(FusedMasks, vocab_size, device)
    staging = Staging()
    staging.put_integers = lambda values: torch.tensor(values, device=device)  # type: ignore[method-assign]
    allowed = there.of_step(command, staging).take(torch.tensor(rows, device=device), width)
    assert allowed is not None
    given = logits.to(device)
    kept = allowed.apply(given, keeps=True).cpu()
    torch.testing.assert_close(kept, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(given.cpu(), logits, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(allowed.apply(given).cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert allowed.faults_of(len(rows)).tolist() == expected_faults
    assert expected_faults == [{2: UNMATCHED, 3: UNMASKED}.get(slot, 0) for slot in rows]
