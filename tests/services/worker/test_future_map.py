"""The FutureMap: what is written is what is read, in range whatever was in the memory, and never too early."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.device.cpu.arena import HostArena
from slipstream.common.errors import FutureMapError
from slipstream.common.worker.access_log import AccessLog
from slipstream.common.worker.layout import BufferName, FutureMapShape
from slipstream.common.worker.step import FenceName, Role
from slipstream.services.worker.future_map import POISON, FutureMap, Logprobs, VerifyResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VOCAB_SIZE = 100
SHAPE = FutureMapShape(num_slots=6, run_ahead=1, num_draft_tokens=3, chunk_tokens=8, hidden_width=2)
ROWS = torch.tensor([2, 5])
LIMITS = torch.tensor([50, 50])
OUTCOME = VerifyResult(
    seq_lens=torch.tensor([11, 23]),
    num_accepted=torch.tensor([1, 3]),
    tokens=torch.tensor([[7, 8, 9, 10], [17, 18, 19, 20]]),
    hidden_states=torch.arange(16, dtype=torch.float32).view(2, 4, 2),
)
INT64 = st.one_of(st.sampled_from([-(2**63), -1, 0, 1, VOCAB_SIZE - 1, VOCAB_SIZE, 2**63 - 1]), st.integers(-9, 120))


class RecordingLog(AccessLog):
    """Keeps the accesses."""

    is_enabled = True

    def __init__(self) -> None:
        self.accesses: list[tuple[str, tuple[int, ...], bool, int]] = []

    def access(self, buffer: BufferName, rows: Sequence[int], *, is_write: bool, step: int) -> None:
        """Keeps it."""
        self.accesses.append((buffer.value, tuple(rows), is_write, step))


class Shared:
    """One arena and what verify, draft and the scheduler see of it."""

    def __init__(self, shape: FutureMapShape, *, is_debug: bool) -> None:
        self.arena = HostArena.create(shape.specs(), list(FenceName))
        self.log = RecordingLog()
        self.verify = self._map(shape, Role.VERIFY, is_debug=is_debug)
        self.draft = self._map(shape, Role.DRAFT, is_debug=is_debug)

    def row(self, name: BufferName, row: int) -> torch.Tensor:
        """A copy of a row of a buffer."""
        return self.arena.tensor(name)[row].clone()

    def _map(self, shape: FutureMapShape, role: Role, *, is_debug: bool) -> FutureMap:
        return FutureMap(shape, self.arena, role, VOCAB_SIZE, self.log, is_debug=is_debug)


@contextmanager
def shared(shape: FutureMapShape = SHAPE, *, is_debug: bool = False) -> Iterator[Shared]:
    """For the length of a block."""
    both = Shared(shape, is_debug=is_debug)
    yield both
    both.arena.close()


def test_publish_fills_the_row_of_its_step() -> None:
    with shared() as both:
        for step in (1, 2, 3, 4):
            both.verify.publish(step, ROWS, replace(OUTCOME, seq_lens=OUTCOME.seq_lens + step))
        # Three rows: step 4 has taken the place of step 1.
        assert both.row(BufferName.NEW_SEQ_LENS, 1).tolist() == [0, 0, 15, 0, 0, 27]
        assert both.row(BufferName.NEW_SEQ_LENS, 2).tolist() == [0, 0, 13, 0, 0, 25]
        assert both.row(BufferName.NUM_ACCEPTED, 0).tolist() == [0, 0, 1, 0, 0, 3]
        assert both.row(BufferName.OUTPUT_TOKENS, 0)[ROWS].tolist() == OUTCOME.tokens.tolist()


def test_logprobs_are_published_where_there_are_any() -> None:
    logprobs = Logprobs(
        output=torch.tensor([[-1.5, -2.5], [-3.5, -4.5]]),
        top_tokens=torch.arange(12, dtype=torch.int32).view(2, 2, 3),
        top=-torch.arange(12.0).view(2, 2, 3),
    )
    names = ("output_logprobs", "top_tokens", "top_logprobs")
    with shared() as both:
        both.verify.publish(1, ROWS, OUTCOME)
        assert not [access for access in both.log.accesses if access[0] in names]
        both.verify.publish(2, ROWS, replace(OUTCOME, tokens=OUTCOME.tokens[:, :2], logprobs=logprobs))
        assert [access[1:] for access in both.log.accesses if access[0] in names] == [((2,), True, 2)] * 3
        assert both.row(BufferName.OUTPUT_LOGPROBS, 2)[ROWS, :2].tolist() == logprobs.output.tolist()
        assert both.row(BufferName.TOP_TOKENS, 2)[ROWS, :2, :3].tolist() == logprobs.top_tokens.tolist()
        assert both.row(BufferName.TOP_LOGPROBS, 2)[ROWS, :2, :3].tolist() == logprobs.top.tolist()
        assert not both.row(BufferName.TOP_LOGPROBS, 2)[ROWS, 2:].any()
        assert not both.row(BufferName.TOP_LOGPROBS, 2)[ROWS, :, 3:].any()


def test_draft_and_verify_gather_what_was_stashed() -> None:
    with shared() as both:
        both.verify.stash(1, ROWS, OUTCOME)
        for reader in (both.draft, both.verify):
            stash = reader.gather(2, ROWS.flip(0), LIMITS)
            assert stash.seq_lens.tolist() == [23, 11]
            assert stash.bonus_tokens.tolist() == [20, 8]
            assert stash.num_new.tolist() == [4, 2]
            assert stash.last_tokens[0].tolist() == [17, 18, 19, 20]
            assert stash.last_tokens[1, :2].tolist() == [7, 8]
            assert stash.hidden_states is not None
            assert stash.hidden_states[0].tolist() == [[8, 9], [10, 11], [12, 13], [14, 15]]


def test_the_first_token_of_a_prompt_is_a_bonus_with_nothing_accepted() -> None:
    first = VerifyResult(
        seq_lens=torch.tensor([5]), num_accepted=torch.zeros(1, dtype=torch.int64), tokens=torch.tensor([[42]])
    )
    with shared() as both:
        both.verify.stash(1, ROWS, OUTCOME)
        both.verify.stash(2, ROWS[:1], first)
        stash = both.draft.gather(3, ROWS, LIMITS)
        assert stash.seq_lens.tolist() == [5, 23]
        assert stash.bonus_tokens.tolist() == [42, 20]
        assert stash.num_new.tolist() == [1, 4]
        assert int(stash.last_tokens[0, 0]) == 42


def test_what_is_gathered_is_a_copy() -> None:
    with shared() as both:
        both.draft.propose(1, ROWS, torch.full((2, 3), 4))
        copied = both.verify.copy_in(1, ROWS)
        both.draft.propose(2, ROWS, torch.full((2, 3), 5))
        assert copied.tolist() == [[4] * 3] * 2


def test_prefill_leaves_hidden_states_for_the_drafts_own_prefill() -> None:
    with shared() as both:
        both.verify.stash_prefill(1, torch.ones(5, 2))
        assert both.arena.tensor(BufferName.PREFILL_HIDDEN).sum(dim=1).tolist() == [2] * 5 + [0] * 3


@given(
    st.lists(INT64, min_size=4, max_size=4),
    st.lists(INT64, min_size=4, max_size=4),
    st.lists(st.integers(0, 60), min_size=2, max_size=2),
)
def test_whatever_is_in_the_memory_is_in_range_when_it_is_read(
    scalars: list[int], tokens: list[int], limits: list[int]
) -> None:
    with shared() as both:
        both.arena.tensor(BufferName.SEQ_LENS)[ROWS] = torch.tensor(scalars[:2])
        both.arena.tensor(BufferName.NUM_NEW)[ROWS] = torch.tensor(scalars[2:])
        both.arena.tensor(BufferName.BONUS_TOKENS)[ROWS] = torch.tensor(tokens[:2])
        both.arena.tensor(BufferName.LAST_TOKENS)[ROWS] = torch.tensor(tokens)
        both.arena.tensor(BufferName.DRAFT_TOKENS)[ROWS] = torch.tensor(tokens[:3])
        for reader in (both.verify, both.draft):
            stash = reader.gather(1, ROWS, torch.tensor(limits))
            assert ((stash.seq_lens >= 0) & (stash.seq_lens <= torch.tensor(limits))).all()
            assert ((stash.num_new >= 1) & (stash.num_new <= 4)).all()
            for read in (stash.bonus_tokens, stash.last_tokens, both.verify.copy_in(1, ROWS)):
                assert ((read >= 0) & (read < VOCAB_SIZE)).all()
            in_range = [0 <= token < VOCAB_SIZE for token in tokens[:2]]
            assert [int(b) == t for b, t in zip(stash.bonus_tokens, tokens, strict=False)] == in_range


class TestDebugMode:
    """Reading too early fails loudly."""

    def test_gather_before_any_stash(self) -> None:
        with shared(is_debug=True) as both:
            both.verify.stash(1, ROWS[:1], _first_row(OUTCOME))
            both.draft.gather(2, ROWS[:1], LIMITS[:1])
            for reader in (both.verify, both.draft):
                with pytest.raises(FutureMapError, match=r"step 2: gathered slots \[2, 5\] before they were stashed"):
                    reader.gather(2, ROWS, LIMITS)

    def test_gather_of_a_slot_that_another_request_took(self) -> None:
        with shared(is_debug=True) as both:
            both.verify.stash(1, ROWS, OUTCOME)
            both.verify.forget(2, ROWS[:1])
            both.draft.gather(3, ROWS[1:], LIMITS[1:])
            with pytest.raises(FutureMapError, match="before they were stashed"):
                both.draft.gather(3, ROWS, LIMITS)

    def test_rows_that_no_step_published_hold_no_length(self) -> None:
        with shared(is_debug=True) as both:
            for step in range(1, 8):
                both.verify.publish(step, ROWS, OUTCOME)
                lengths = [both.row(BufferName.NEW_SEQ_LENS, row).tolist() for row in range(SHAPE.ring)]
                assert lengths[step % 3][2] == 11
                assert set(lengths[(step + 1) % 3]) == {POISON}

    def test_a_draft_poisons_nothing(self) -> None:
        arena = HostArena.create(SHAPE.specs(), list(FenceName))
        FutureMap(SHAPE, arena, Role.DRAFT, VOCAB_SIZE, AccessLog(), is_debug=True)
        assert not any(arena.tensor(spec.name).any() for spec in SHAPE.specs())
        arena.close()

    def test_outside_of_it_nothing_is_poisoned(self) -> None:
        with shared() as both:
            both.verify.forget(1, ROWS)
            both.verify.publish(1, ROWS, OUTCOME)
            assert both.draft.gather(2, ROWS, LIMITS).seq_lens.tolist() == [0, 0]
            assert both.row(BufferName.NEW_SEQ_LENS, 2).tolist() == [0] * 6


def test_every_access_is_logged_with_its_rows() -> None:
    with shared() as both:
        both.verify.publish(4, ROWS, OUTCOME)
        both.verify.stash(4, ROWS, OUTCOME)
        both.draft.gather(5, ROWS, LIMITS)
        both.draft.propose(5, ROWS, torch.zeros(2, 3, dtype=torch.int64))
        both.verify.copy_in(5, ROWS)
        both.verify.stash_prefill(6, torch.zeros(1, 2))
        stashed = ("seq_lens", "bonus_tokens", "num_new", "last_tokens", "hidden_states")
        assert sorted(both.log.accesses) == sorted(
            [(name, (1,), True, 4) for name in ("new_seq_lens", "num_accepted", "output_tokens")]
            + [(name, (2, 5), True, 4) for name in stashed]
            + [(name, (2, 5), False, 5) for name in (*stashed, "draft_tokens")]
            + [("draft_tokens", (2, 5), True, 5), ("prefill_hidden", (0,), True, 6)]
        )


def test_stamps_of_a_step_are_where_the_scheduler_reads_them() -> None:
    with shared() as both:
        for role, name in ((Role.DRAFT, BufferName.DRAFT_STAMPS), (Role.VERIFY, BufferName.VERIFY_STAMPS)):
            start, end = both.verify.stamps(role, 5)
            start.fill_(10)
            end.fill_(20)
            assert both.row(name, 5 % 3).tolist() == [10, 20]


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, hidden_width=0), replace(SHAPE, num_draft_tokens=0)])
def test_buffers_that_nobody_would_read_are_left_out(shape: FutureMapShape) -> None:
    names = {spec.name for spec in shape.specs()}
    assert (BufferName.HIDDEN_STATES in names) == (BufferName.PREFILL_HIDDEN in names) == bool(shape.hidden_width)
    assert (BufferName.DRAFT_TOKENS in names) == (BufferName.DRAFT_STAMPS in names) == bool(shape.num_draft_tokens)


def _first_row(outcome: VerifyResult) -> VerifyResult:
    assert outcome.hidden_states is not None
    return VerifyResult(
        seq_lens=outcome.seq_lens[:1],
        num_accepted=outcome.num_accepted[:1],
        tokens=outcome.tokens[:1],
        hidden_states=outcome.hidden_states[:1],
    )
