"""Routing of tokens to experts: scores, the choice of the greatest, and the choices in the order of their experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.services.models.experts import LEAST_SUM
from slipstream.services.models.families import Scoring
from slipstream.services.models.kernels.block_ops import rms_norm
from slipstream.services.models.kernels.launching import overlapping, power_of_two, wait_for_previous

if TYPE_CHECKING:
    from slipstream.services.models.decoder import RMSNorm
    from slipstream.services.models.experts import Experts


@triton.jit(do_not_specialize=["num_rows"])
def score_kernel(
    x: tl.tensor,  # [num_rows, SIZE]
    norm_weight: tl.tensor,  # [SIZE], read if HAS_NORM
    weight: tl.tensor,  # [NUM_EXPERTS, SIZE] float32
    bias: tl.tensor,  # [NUM_EXPERTS] float32, read if HAS_BIAS
    normed: tl.tensor,  # [num_rows, SIZE], written if HAS_NORM: the rows' norm
    scores: tl.tensor,  # [num_rows, NUM_EXPERTS] float32, written
    num_rows: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Scores rows for BLOCK_E experts, whose weights stay in registers; norms each row first if HAS_NORM.

    Sums are float32. Grid: (cdiv(NUM_EXPERTS, BLOCK_E), programs that share the rows).
    """
    i = tl.arange(0, BLOCK)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    is_expert = e < NUM_EXPERTS
    w_at = weight + e.to(tl.int64)[:, None] * SIZE + i[None, :]
    w = tl.load(w_at, mask=is_expert[:, None] & (i < SIZE)[None, :], other=0.0)
    added = tl.load(bias + e, mask=is_expert, other=0.0) if HAS_BIAS else tl.zeros((BLOCK_E,), tl.float32)
    if HAS_NORM:
        factor = tl.load(norm_weight + i, mask=i < SIZE, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    for number in range(tl.program_id(1), num_rows, tl.num_programs(1)):
        row = number * SIZE
        value = tl.load(x + row + i, mask=i < SIZE, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
            rounded = (value * scale * factor).to(normed.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(normed + row + i, rounded, mask=i < SIZE)
            value = rounded.to(tl.float32)
        score = tl.sum(w * value[None, :], axis=1) + added
        tl.store(scores + number * NUM_EXPERTS + e, score, mask=is_expert)


@triton.jit
def choose_kernel(
    scores: tl.tensor,  # [N, NUM_EXPERTS] float32
    choice_bias: tl.tensor,  # [NUM_EXPERTS] float32, read if HAS_CHOICE_BIAS
    chosen: tl.tensor,  # [N, NUM_CHOSEN] int64, written
    shares: tl.tensor,  # [N, NUM_CHOSEN] float32, written
    scaling: tl.tensor,  # of the shares
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
    IS_SOFTMAX: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_CHOICE_BIAS: tl.constexpr,
    IS_NORMALISED: tl.constexpr,  # read if the scores are softmax or sigmoid; else shares are softmax of those chosen
    LEAST: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Chooses the experts of one row, of equal ones the lower. Grid: (N,). See `Experts.route`."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    is_expert = e < NUM_EXPERTS
    score = tl.load(scores + row * NUM_EXPERTS + e, mask=is_expert, other=-float("inf"))
    if IS_SOFTMAX:
        score = tl.exp(score - tl.max(score, axis=0))
        score = score / tl.sum(score, axis=0)
    if IS_SIGMOID:
        decay = tl.exp(-tl.abs(score))
        score = tl.where(score >= 0.0, 1.0, decay) / (1.0 + decay)
    mark = score
    if HAS_CHOICE_BIAS:
        mark += tl.load(choice_bias + e, mask=is_expert, other=0.0)
    mark = tl.where(is_expert, mark, -float("inf"))
    c = tl.arange(0, BLOCK_C)
    experts = tl.zeros((BLOCK_C,), tl.int32)
    share = tl.full((BLOCK_C,), -float("inf"), tl.float32)
    for number in tl.static_range(NUM_CHOSEN):
        greatest = tl.max(mark, axis=0)
        # Where nothing is greatest, as of NaN, the last one is taken, whose share is NaN as well.
        expert = tl.minimum(tl.min(tl.where(mark == greatest, e, NUM_EXPERTS), axis=0), NUM_EXPERTS - 1)
        experts = tl.where(c == number, expert, experts)
        share = tl.where(c == number, tl.sum(tl.where(e == expert, score, 0.0), axis=0), share)
        mark = tl.where(e == expert, -float("inf"), mark)
    is_choice = c < NUM_CHOSEN
    if IS_SOFTMAX or IS_SIGMOID:
        if IS_NORMALISED:
            share = share / (tl.sum(tl.where(is_choice, share, 0.0), axis=0) + LEAST)
    else:
        share = tl.exp(share - tl.max(share, axis=0))
        share = share / tl.sum(share, axis=0)
    tl.store(chosen + row * NUM_CHOSEN + c, experts.to(tl.int64), mask=is_choice)
    tl.store(shares + row * NUM_CHOSEN + c, share * scaling, mask=is_choice)


@triton.jit(do_not_specialize=["num_choices"])
def order_kernel(
    chosen: tl.tensor,  # [num_choices] int64
    order: tl.tensor,  # [num_choices] int64, written
    ends: tl.tensor,  # [NUM_EXPERTS] int32, written
    num_choices: tl.tensor, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Finds the places of BLOCK choices in the order of their experts, and the ends of as many experts.

    Each is counted by all choices. Grid: (cdiv(max(num_choices, NUM_EXPERTS), BLOCK),).
    """
    wait_for_previous(OVERLAPS)
    j = tl.arange(0, BLOCK)
    own = tl.program_id(0) * BLOCK + j
    expert = tl.load(chosen + own, mask=own < num_choices, other=0).to(tl.int32)
    place = tl.zeros((BLOCK,), tl.int32)
    end = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_choices, BLOCK):
        of_other = tl.load(chosen + first + j, mask=first + j < num_choices, other=NUM_EXPERTS).to(tl.int32)[None, :]
        is_before = (of_other < expert[:, None]) | ((of_other == expert[:, None]) & (first + j[None, :] < own[:, None]))
        place += tl.sum(is_before.to(tl.int32), axis=1)
        end += tl.sum((of_other <= own[:, None]).to(tl.int32), axis=1)
    tl.store(order + place, own.to(tl.int64), mask=own < num_choices)
    tl.store(ends + own, end, mask=own < NUM_EXPERTS)


_MOST_SCORED = 512
"""Rows that a kernel scores; for each it reads the weights anew from the cache, so that more are left to cuBLAS."""
_MOST_COUNTED = 4096
"""Choices that are counted, which is work that grows with their square; more are sorted."""
_EXPERTS_AT_ONCE, _SHARERS, _SCORE_WARPS = 4, 64, 8
"""Experts whose weights a program keeps, programs that share the rows at most, and warps of a program."""
_CHOICES_AT_ONCE = 64
"""Choices of which a program finds the places."""


class Routed(NamedTuple):
    """The experts of N tokens."""

    x: torch.Tensor
    """[N, hidden_size]: what experts read."""
    chosen: torch.Tensor
    """[N, num_chosen] int64."""
    shares: torch.Tensor
    """[N, num_chosen] float32: the weights of their outputs."""


def route(experts: Experts, x: torch.Tensor, norm: RMSNorm | None = None) -> Routed:
    """Chooses the experts of each row of [N, hidden_size], after its norm where one is given. See `Experts.route`."""
    x = x.contiguous()
    if experts.config.num_groups > 1:
        normed = x if norm is None else rms_norm(x, norm.weight, norm.eps)
        return Routed(normed, *experts.route(normed))
    config, scoring, device = experts.config, experts.config.mixture.scoring, x.device
    normed, scores = _scores(experts, x, norm)
    chosen = torch.empty(len(x), config.num_chosen, dtype=torch.int64, device=device)
    shares = torch.empty(chosen.shape, dtype=torch.float32, device=device)
    choose_kernel[(len(x),)](
        scores, scores if experts.choice_bias is None else experts.choice_bias, chosen, shares, config.scaling,
        NUM_EXPERTS=config.num_experts, NUM_CHOSEN=config.num_chosen, BLOCK_E=power_of_two(config.num_experts),
        BLOCK_C=power_of_two(config.num_chosen), IS_SOFTMAX=scoring is Scoring.SOFTMAX,
        IS_SIGMOID=scoring is Scoring.SIGMOID, HAS_CHOICE_BIAS=experts.choice_bias is not None,
        IS_NORMALISED=config.is_normalised, LEAST=LEAST_SUM, num_warps=1, **overlapping(device),
    )  # fmt: skip
    return Routed(normed, chosen, shares)


def _scores(experts: Experts, x: torch.Tensor, norm: RMSNorm | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows' norm, and the router's scores: [N, num_experts] float32."""
    router, (num_rows, size) = experts.router, x.shape
    if num_rows > _MOST_SCORED:
        normed = x if norm is None else rms_norm(x, norm.weight, norm.eps)
        return normed, router(normed.to(torch.float32))
    assert router.weight is not None, "a router is never packed"
    num_experts, normed = len(router.weight), x if norm is None else torch.empty_like(x)
    scores = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x.device)
    score_kernel[-(-num_experts // _EXPERTS_AT_ONCE), min(num_rows, _SHARERS)](
        x, x if norm is None else norm.weight, router.weight, x if router.bias is None else router.bias, normed, scores,
        num_rows, 0.0 if norm is None else norm.eps, SIZE=size, NUM_EXPERTS=num_experts, BLOCK_E=_EXPERTS_AT_ONCE,
        BLOCK=power_of_two(size), HAS_NORM=norm is not None, HAS_BIAS=router.bias is not None,
        num_warps=_SCORE_WARPS, **overlapping(x.device),
    )  # fmt: skip
    return normed, scores


def by_expert(chosen: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the choices in the order of their experts, [choices] int64, and where each expert's end: int32."""
    choices = chosen.flatten().contiguous()
    if len(choices) > _MOST_COUNTED:
        sorted_choices, order = choices.sort(stable=True)
        numbers = torch.arange(num_experts, device=chosen.device)
        return order, torch.searchsorted(sorted_choices, numbers, right=True, out_int32=True)
    order, ends = torch.empty_like(choices), torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    order_kernel[(-(-max(len(choices), num_experts) // _CHOICES_AT_ONCE),)](
        choices, order, ends, len(choices), NUM_EXPERTS=num_experts, BLOCK=_CHOICES_AT_ONCE, num_warps=4,
        **overlapping(chosen.device),
    )  # fmt: skip
    return order, ends
