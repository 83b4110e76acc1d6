"""The kernels of a step around its forwards against the same operations in PyTorch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from slipstream.common.wire.events import EventLog
from slipstream.common.wire.layout import NOT_FINITE, BufferName, DraftShape, EpochShape
from slipstream.common.wire.manifest import BufferSpec
from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.worker import DraftSizes
from slipstream.services.models import sampler
from slipstream.services.models.kernels import step_ops
from slipstream.services.models.kernels.step_ops import (
    accept,
    accept_kernel,
    copy_in_kernel,
    stash_kernel,
    take_sampling,
)
from slipstream.services.models.sampler import SamplingRows, SimulatedAcceptance
from slipstream.services.worker import fused_future_map
from slipstream.services.worker.fused_future_map import HIDDEN_BLOCK, FusedFutureMap, FusedRegion
from slipstream.services.worker.future_map import NO_REGION, CapturedStep, FutureMap, Region, StampPlace, VerifyResult
from tests.harness.kernel_launches import KernelLaunches

SLOTS = 6
RING = 3
VOCAB_SIZE = 50


def numbers(*shape: int, high: int, seed: int = 0, low: int = 0) -> torch.Tensor:
    """Random int64, the same each time."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 16])
def test_accepted_tokens_are_counted(num_draft_tokens: int, device: torch.device) -> None:
    num_rows, width = 40, num_draft_tokens + 1
    tokens, given = (numbers(num_rows, width, high=2, seed=seed) for seed in (1, 2))
    given[: num_rows // 2, 1:] = tokens[: num_rows // 2, :-1]  # all of a draft may be right
    rows, most = numbers(num_rows, high=SLOTS, seed=3), torch.tensor([num_draft_tokens, 0, 1, 99, 99, 99])
    seq_lens, seeds = numbers(num_rows, high=1000, seed=4), numbers(SLOTS, high=2**62, seed=5)
    scores = torch.zeros(num_rows, width)
    scores[::3, 2:], scores[1::3, 3:] = float("nan"), float("inf")  # a draft's second and third token are not accepted
    num_sound = torch.tensor([1, 2, 99]).repeat(num_rows)[:num_rows]
    expected = torch.minimum(sampler.accept(given[:, 1:], tokens), most[rows]).minimum(num_sound)
    arguments = [tensor.to(device) for tensor in (tokens, given, scores, rows, seq_lens, most, seeds)]
    lengths, accepted = accept(*arguments, None)
    assert accepted.tolist() == expected.tolist()
    assert lengths.tolist() == (seq_lens + expected + 1).tolist()


def test_tokens_are_accepted_by_the_same_chance(device: torch.device) -> None:
    num_rows, num_draft_tokens = 200, 4
    simulated = SimulatedAcceptance([0.95, 0.7, 0.9, 0.5])
    rows, most = numbers(num_rows, high=SLOTS, seed=3), torch.full((SLOTS,), num_draft_tokens)
    seq_lens, seeds = numbers(num_rows, high=1000, seed=4), numbers(SLOTS, low=-(2**62), high=2**62, seed=5)
    expected = simulated(seeds[rows], seq_lens)
    tokens = torch.zeros((num_rows, num_draft_tokens + 1), dtype=torch.int64)
    arguments = [tensor.to(device) for tensor in (tokens, tokens, tokens.float(), rows, seq_lens, most, seeds)]
    _, accepted = accept(*arguments, simulated.thresholds(device))
    assert accepted.tolist() == expected.tolist()
    assert len(set(expected.tolist())) == num_draft_tokens + 1


@pytest.mark.parametrize("kernel", [accept_kernel, copy_in_kernel, stash_kernel])
def test_steps_with_and_without_a_graph_share_a_kernel(kernel: Any) -> None:
    """Triton compiles a kernel again for tensors that begin elsewhere, unless it is told that this does not count."""
    options = getattr(kernel, "kwargs", None) or vars(kernel)
    elsewhere = {"rows"} if kernel is accept_kernel else {"rows", "region"}
    assert elsewhere <= set(options["do_not_specialize_on_alignment"])


def test_drafts_of_any_number_of_tokens_share_the_kernels_of_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while sequences run does not let them wait for a compiler."""
    accepting, publishing = KernelLaunches(), KernelLaunches()
    monkeypatch.setattr(step_ops, "accept_kernel", accepting)
    monkeypatch.setattr(fused_future_map, "publish_kernel", publishing)
    memory, rows = Memory(FusedFutureMap, FusedRegion, 0, torch.device("cpu")), torch.tensor([5, 1, 3])
    for num_tokens in (1, 2, 3, 4):
        outcome = _outcome(0, num_tokens, torch.device("cpu"))
        accept(outcome.tokens, outcome.tokens, outcome.tokens.float(), rows, outcome.seq_lens, rows, rows, None)
        memory.map.publish(captured(0, rows.device), rows, outcome)
    assert len(accepting.variants) == len(publishing.variants) == 1


@pytest.mark.parametrize("width", [1, 3])
def test_sampling_rows_are_taken_and_repeated(width: int, device: torch.device) -> None:
    params = [
        SamplingParams(temperature=0.5 * slot, top_k=slot, top_p=1 / (slot + 1), min_p=slot / 10, seed=2**64 - 1 - slot)
        for slot in range(SLOTS)
    ]
    table = SamplingRows.of(params, device=device)
    rows = torch.tensor([4, 0, 0, 5], device=device)
    taken, expected = take_sampling(table, rows, width), table.take(rows.repeat_interleave(width))
    for field in fields(SamplingRows):
        assert getattr(taken, field.name).tolist() == getattr(expected, field.name).tolist()


class Memory:
    """Verify's map and a draft's region over buffers full of numbers."""

    def __init__(self, map_kind: type[FutureMap], region_kind: type[Region], width: int, device: torch.device) -> None:
        """`width`: of hidden states."""
        sizes = {"num_slots": SLOTS, "run_ahead": 1, "num_draft_tokens": 3, "chunk_tokens": 8}
        epoch, draft = EpochShape(**sizes), DraftShape(**sizes, hidden_width=width)
        self.results = _filled(epoch.specs(), device)
        self.shared = _filled([*draft.given_specs(), *draft.own_specs()], device)
        drafter = DraftSizes(num_draft_tokens=3, hidden_width=width)
        self.region = region_kind(draft, drafter, self.shared, number=9, vocab_size=VOCAB_SIZE, log=EventLog())
        regions = {9: self.region}
        self.map = map_kind(epoch, self.results, vocab_size=VOCAB_SIZE, log=EventLog(), regions=regions)

    def state(self) -> list[dict[str, list[object]]]:
        """Returns all buffers as lists."""
        return [{name: buffer.tolist() for name, buffer in buffers.items()} for buffers in (self.results, self.shared)]


def _filled(specs: list[BufferSpec], device: torch.device) -> dict[BufferName, torch.Tensor]:
    return {
        BufferName(spec.name): numbers(*spec.shape, low=-5, high=2 * VOCAB_SIZE, seed=number).to(spec.dtype).to(device)
        for number, spec in enumerate(specs)
    }


def captured(ring_row: int, device: torch.device, region: Region | None = None) -> CapturedStep:
    """A step that is replayed for that row, with the draft of `region`."""
    words = NO_REGION if region is None else region.words
    return CapturedStep(torch.tensor([ring_row], device=device), torch.tensor(words, device=device))


def _outcome(width: int, num_tokens: int, device: torch.device) -> VerifyResult:
    hidden = numbers(3, num_tokens + 2, width, high=1000).float().to(device)[:, :num_tokens] if width else None
    return VerifyResult(
        seq_lens=torch.tensor([7, 8, 9], device=device),
        num_accepted=torch.tensor([0, 3, 1], device=device).clamp_max(num_tokens - 1),
        tokens=numbers(3, num_tokens, high=VOCAB_SIZE).to(device),
        hidden_states=hidden,
    )


def _fused() -> tuple[tuple[type[FutureMap], type[Region]], ...]:
    return (FutureMap, Region), (FusedFutureMap, FusedRegion)


@pytest.mark.parametrize("ring_row", [0, 2])
@pytest.mark.parametrize("width", [0, 12])
@pytest.mark.parametrize("num_guesses", [1, 3])
def test_rows_of_a_captured_step(ring_row: int, width: int, num_guesses: int, device: torch.device) -> None:
    rows = torch.tensor([5, 1, 3], device=device)
    limits = torch.tensor([0, 60, 0, 3, 0, 20], device=device)
    seen, left, accessed = [], [], []
    for kinds in _fused():
        memory = Memory(*kinds, width, device)
        step = captured(ring_row, device)
        stash = memory.region.gather(step, rows, limits)
        memory.map.publish(step, rows, _outcome(width, 4, device))
        ends = memory.map.ends(step, rows, limits)
        memory.region.propose(step, rows, numbers(3, num_guesses, high=VOCAB_SIZE).to(device))
        gathered = [getattr(stash, field.name) for field in fields(stash)]
        seen.append([None if tensor is None else tensor.tolist() for tensor in (*ends, *gathered)])
        left.append(memory.state())
        accessed.append(set(step.take_accesses()))
    assert seen[0] == seen[1]
    assert left[0] == left[1]
    assert accessed[0] == accessed[1]


@pytest.mark.parametrize("kinds", _fused())
@pytest.mark.parametrize("is_captured", [False, True])
def test_new_tokens_after_the_limit_of_a_slot_do_not_count(
    kinds: tuple[type[FutureMap], type[Region]], is_captured: bool, device: torch.device
) -> None:
    """A draft would take them for tokens before it, in pages that others share."""
    rows, limits = torch.tensor([5, 1, 3], device=device), torch.full((SLOTS,), 18, device=device)
    memory = Memory(*kinds, 0, device)
    memory.shared[BufferName.SEQ_LENS][rows] = torch.tensor([20, 18, 50], device=device)
    memory.shared[BufferName.NUM_NEW][rows] = torch.tensor([4, 4, 3], device=device)
    stash = memory.region.gather(captured(1, device) if is_captured else 1, rows, limits)
    assert (stash.seq_lens.tolist(), stash.num_new.tolist()) == ([18, 18, 18], [2, 4, 1])


@pytest.mark.parametrize("kinds", _fused())
@pytest.mark.parametrize("width", [0, 12])
def test_a_step_s_stamps(kinds: tuple[type[FutureMap], type[Region]], width: int, device: torch.device) -> None:
    """Start and end of each worker go into the step's row of its own memory, and nowhere else."""
    rows, limits = torch.tensor([5, 1, 3], device=device), torch.full((SLOTS,), 9, device=device)
    memory = Memory(*kinds, width, device)
    for shared in (memory.region, memory.map):
        columns = shared.stamp_columns()
        for column in columns:
            column.zero_()
        step = captured(2, device, memory.region)
        step.start, step.end = (StampPlace(column, step.ring_row) for column in columns)
        if shared is memory.region:
            memory.region.gather(step, rows, limits)
            memory.region.propose(step, rows, numbers(3, 3, high=VOCAB_SIZE).to(device))
        else:
            memory.map.ends(step, rows, limits)
            memory.map.stash_captured(step, rows, _outcome(width, 4, device))
        (first, last), others = torch.stack(columns, dim=1)[2].tolist(), torch.stack(columns, dim=1)[:2]
        assert 0 < first <= last
        assert not others.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_slots_with_logits_that_are_not_finite(bad: float, device: torch.device) -> None:
    """Accepted are 0, 3 and 1 draft tokens: of the third slot, only what does not count is bad."""
    rows = torch.tensor([5, 1, 3], device=device)
    scores = torch.zeros(3, 4, device=device)
    scores[0, 1] = scores[1, 2] = scores[2, 2:] = bad
    outcome = replace(_outcome(0, 4, device), scores=scores)
    left = []
    for kinds in _fused():
        memory = Memory(*kinds, 0, device)
        memory.map.publish(captured(1, device), rows, outcome)
        assert memory.results[BufferName.NUM_ACCEPTED][1, rows].tolist() == [0, NOT_FINITE, 1]
        left.append(memory.state())
    assert left[0] == left[1]


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("width", [0, 12, HIDDEN_BLOCK // 2 + 7])
def test_a_stash(width: int, num_tokens: int, device: torch.device) -> None:
    rows, before = torch.tensor([5, 1, 3], device=device), Memory(FutureMap, Region, width, device).state()
    left = []
    for kinds in _fused():
        at_once, in_graph, without = (Memory(*kinds, width, device) for _ in range(3))
        outcome = _outcome(width, num_tokens, device)
        at_once.region.stash(4, (5, 1, 3), rows, outcome)
        in_graph.map.stash_captured(captured(1, device, in_graph.region), rows, outcome)
        without.map.stash_captured(captured(1, device), rows, outcome)
        left += [at_once.state(), in_graph.state()]
        assert without.state() == before
    assert left[0] != before
    assert all(state == left[0] for state in left)


def test_states_that_a_draft_does_not_read_are_not_stashed(device: torch.device) -> None:
    """Plain steps leave some for the draft that is expected, while another may be there."""
    rows, left = torch.tensor([5, 1, 3], device=device), []
    for kinds in _fused():
        memory = Memory(*kinds, 0, device)
        memory.map.stash_captured(captured(1, device, memory.region), rows, _outcome(12, 1, device))
        left.append(memory.state())
    assert left[0] == left[1]


@pytest.mark.parametrize("step", [1, 6])
def test_copying_in(step: int, device: torch.device) -> None:
    rows, before = torch.tensor([5, 1, 0, 0], device=device), Memory(FutureMap, Region, 0, device).state()
    copied, left = [], []
    for kinds in _fused():
        at_once, in_graph, without = (Memory(*kinds, 0, device) for _ in range(3))
        copied.append(at_once.map.copy_in(step, at_once.region, (5, 1), rows).tolist())
        place = captured(step % RING, device, in_graph.region)
        copied.append(in_graph.map.copy_in_captured(place, rows, 3).tolist())
        fewer = Memory(*kinds, 0, device)
        narrow = fewer.map.copy_in_captured(captured(step % RING, device, fewer.region), rows, 2).tolist()
        assert narrow == [tokens[:2] for tokens in copied[0]], "a step may have fewer than K"
        left += [at_once.state(), in_graph.state(), fewer.state()]
        stamps_alone = Memory(*kinds, 0, device)
        stamps_alone.map.copy_stamps(step, stamps_alone.region)
        left.append(stamps_alone.state())
        assert not without.map.copy_in_captured(captured(step % RING, device), rows, 3).any()
        assert without.state() == before
    assert all(tokens == copied[0] for tokens in copied)
    assert all(state == left[0] for state in left)
    assert left[0][0]["draft_stamps"] != before[0]["draft_stamps"]
