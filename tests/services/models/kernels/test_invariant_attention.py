"""Attention that gives a query the same bits whatever stands beside it: what `--deterministic` builds on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.services.models.kernels.attention_case import AttentionCase, some_config

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 5


def attend(case: AttentionCase, qkv: torch.Tensor) -> torch.Tensor:
    """[B, W, q_size]."""
    output = replace(case, qkv=qkv).attend(is_invariant=True)
    return output.view(*case.batch.tokens.shape, -1)


def alone(case: AttentionCase, column: int, *, at: int) -> torch.Tensor:
    """The query of a column where it is the only one of its row, in column `at`: [B, q_size]."""
    num_rows = len(case.batch.tokens)
    is_valid = torch.zeros_like(case.batch.is_valid)
    is_valid[:, at] = True
    positions = case.batch.positions[:, column : column + 1].expand(-1, WIDTH).contiguous()
    qkv = case.qkv.view(num_rows, WIDTH, -1)[:, column : column + 1].expand(-1, WIDTH, -1)
    later = case.change(positions=positions, is_valid=is_valid)
    return attend(later, qkv.reshape(num_rows * WIDTH, -1))[:, at]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("lengths", [(45,), (94, 13), (190,), (125, 126, 127, 128)])
def test_a_query_does_not_depend_on_its_row(
    lengths: Sequence[int], window: int | None, device: torch.device, dtype: torch.dtype
) -> None:
    """Lengths near which keys would be split elsewhere, or a window would begin elsewhere.

    On a GPU a draft's token comes back in the first column, as the bonus token of a step; the products of Triton's
    interpreter give another column other bits.
    """
    config = some_config(sliding_windows=() if window is None else (window,))
    case = AttentionCase.random(config, lengths, WIDTH, device=device, dtype=dtype, seed=4, page_size=16)
    together = attend(case, case.qkv)
    case.assert_close(together.flatten(0, 1), case.expected())
    for column in range(WIDTH):
        for at in {column, 0} if device.type == "cuda" else {column}:
            assert torch.equal(alone(case, column, at=at), together[:, column]), f"column {column}, then {at}"


@pytest.mark.sampled(1)
def test_a_chunk_does_not_depend_on_those_beside_it(device: torch.device, dtype: torch.dtype) -> None:
    """Short ones beside a long one, which a tile of another size would suit."""
    lengths, widths = (45, 0, 94), (3, 70, 11)
    case = AttentionCase.random(some_config(), lengths, 70, device=device, dtype=dtype, seed=6, page_size=16)
    beside = case.ragged(widths)
    together = beside.attend(is_invariant=True).split(widths)
    qkv, batch = case.qkv.view(3, 70, -1), case.batch
    for row, width in enumerate(widths):
        own = {name: getattr(batch, name)[row : row + 1] for name in ("tokens", "positions", "is_valid", "limits")}
        alone = replace(case.change(**own, page_table=batch.page_table[row : row + 1]), qkv=qkv[row])
        assert torch.equal(alone.ragged((width,)).attend(is_invariant=True), together[row])


@pytest.mark.sampled(1)
def test_a_query_does_not_depend_on_the_table(device: torch.device, dtype: torch.dtype) -> None:
    """A page table is longer where more tokens are drafted ahead."""
    cases = [
        AttentionCase.random(some_config(), (90,), WIDTH, device=device, dtype=dtype, seed=5, page_size=16)
        for _ in range(2)
    ]
    longer = torch.cat((cases[1].batch.page_table, cases[1].batch.page_table.new_zeros(1, 40)), dim=1)
    assert torch.equal(attend(cases[0], cases[0].qkv), attend(cases[1].change(page_table=longer), cases[1].qkv))
