"""The FutureMap: what is written is what is read, in range whatever was in the memory, and never too early."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.errors import FutureMapError
from slipstream.common.wire.events import EventLog
from slipstream.common.wire.layout import DECODE_PART, LENT_WEIGHTS, PREFILL_PART, BufferName, DraftShape
from slipstream.common.wire.worker import DraftSizes
from slipstream.services.models.sampler import Logprobs
from slipstream.services.worker.future_map import POISON, FutureMap, Region, VerifyResult
from tests.harness.workers import ATTACHMENT, SharedArenas, epoch_shape

VOCAB_SIZE = 100
SHAPE = DraftShape(num_slots=6, run_ahead=1, num_draft_tokens=3, chunk_tokens=8, hidden_width=2)
SLOTS = (2, 5)
ROWS = torch.tensor(SLOTS)
LIMITS = torch.full((6,), 50)
OUTCOME = VerifyResult(
    seq_lens=torch.tensor([11, 23]),
    num_accepted=torch.tensor([1, 3]),
    tokens=torch.tensor([[7, 8, 9, 10], [17, 18, 19, 20]]),
    hidden_states=torch.arange(16, dtype=torch.float32).view(2, 4, 2),
)
TWO = replace(OUTCOME, num_accepted=torch.tensor([1, 0]), tokens=OUTCOME.tokens[:, :2])
INT64 = st.one_of(st.sampled_from([-(2**63), -1, 0, 1, VOCAB_SIZE - 1, VOCAB_SIZE, 2**63 - 1]), st.integers(-9, 120))


class RecordingLog(EventLog):
    """Keeps the accesses."""

    is_enabled = True

    def __init__(self) -> None:
        self.accesses: list[tuple[str, tuple[int, ...], bool, int, int]] = []

    def access(
        self, buffer: BufferName, rows: Sequence[int], *, is_write: bool, step: int, attachment: int = 0
    ) -> None:
        """Keeps it."""
        self.accesses.append((buffer.value, tuple(rows), is_write, step, attachment))


class Shared:
    """The memory, and what verify and draft see of it."""

    def __init__(self, shape: DraftShape, *, is_debug: bool) -> None:
        self.arenas = SharedArenas(shape)
        self.log = RecordingLog()
        others = {*LENT_WEIGHTS, BufferName.COPIED_TOKENS, BufferName.MASKS, BufferName.MASK_STAMPS}
        names = [name for name in BufferName if name not in others and (shape.hidden_width or "hidden" not in name)]
        buffers = {name: self.arenas.tensor(name) for name in names}
        results = {BufferName(spec.name): self.arenas.results.tensor(spec.name) for spec in epoch_shape(shape).specs()}
        self.map = FutureMap(epoch_shape(shape), results, vocab_size=VOCAB_SIZE, log=self.log, is_debug=is_debug)
        sizes = DraftSizes(num_draft_tokens=shape.num_draft_tokens, hidden_width=shape.hidden_width)
        self.region = Region(
            shape, sizes, buffers, number=ATTACHMENT, vocab_size=VOCAB_SIZE, log=self.log, is_debug=is_debug
        )
        if is_debug:
            self.region.poison()

    def row(self, name: BufferName, row: int) -> torch.Tensor:
        """A copy of a row of a buffer."""
        return self.arenas.tensor(name)[row].clone()


@contextmanager
def shared(shape: DraftShape = SHAPE, *, is_debug: bool = False) -> Iterator[Shared]:
    """For the length of a block."""
    both = Shared(shape, is_debug=is_debug)
    yield both
    both.arenas.close()


def test_publish_fills_the_row_of_its_step() -> None:
    with shared() as both:
        for step in (1, 2, 3, 4):
            both.map.publish(step, ROWS, replace(OUTCOME, seq_lens=OUTCOME.seq_lens + step))
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
        both.map.publish(1, ROWS, OUTCOME)
        assert not [access for access in both.log.accesses if access[0] in names]
        both.map.publish(2, ROWS, replace(TWO, logprobs=logprobs))
        assert [access[1:] for access in both.log.accesses if access[0] in names] == [((2,), True, 2, 0)] * 3
        assert both.row(BufferName.OUTPUT_LOGPROBS, 2)[ROWS, :2].tolist() == logprobs.output.tolist()
        assert both.row(BufferName.TOP_TOKENS, 2)[ROWS, :2, :3].tolist() == logprobs.top_tokens.tolist()
        assert both.row(BufferName.TOP_LOGPROBS, 2)[ROWS, :2, :3].tolist() == logprobs.top.tolist()
        assert not both.row(BufferName.TOP_LOGPROBS, 2)[ROWS, 2:].any()
        assert not both.row(BufferName.TOP_LOGPROBS, 2)[ROWS, :, 3:].any()


def test_the_draft_gathers_what_was_stashed() -> None:
    with shared() as both:
        both.region.stash(1, SLOTS, ROWS, OUTCOME)
        stash = both.region.gather(2, ROWS.flip(0), LIMITS)
        assert stash.seq_lens.tolist() == [23, 11]
        assert stash.bonus_tokens.tolist() == [20, 8]
        assert stash.num_new.tolist() == [4, 2]
        assert stash.last_tokens[0].tolist() == [17, 18, 19, 20]
        assert stash.last_tokens[1, :2].tolist() == [7, 8]
        assert stash.hidden_states is not None
        assert stash.hidden_states[0].tolist() == [[8, 9], [10, 11], [12, 13], [14, 15]]


def test_verify_keeps_its_own_ends_where_no_draft_can_write() -> None:
    with shared() as both:
        both.map.publish(1, ROWS, OUTCOME)
        for arena in (both.arenas.own, both.arenas.given):
            for placed in arena.manifest.buffers:
                arena.tensor(placed.spec.name).fill_(77)
        seq_lens, bonus_tokens = both.map.ends(2, ROWS.flip(0), torch.tensor([0, 0, 9, 0, 0, 50]))
        assert seq_lens.tolist() == [23, 9], "as long as the limit at most"
        assert bonus_tokens.tolist() == [20, 8]


def test_the_first_token_of_a_prompt_is_a_bonus_with_nothing_accepted() -> None:
    first = VerifyResult(
        seq_lens=torch.tensor([5]), num_accepted=torch.zeros(1, dtype=torch.int64), tokens=torch.tensor([[42]])
    )
    with shared() as both:
        both.region.stash(1, SLOTS, ROWS, OUTCOME)
        both.region.stash(2, SLOTS[:1], ROWS[:1], first)
        stash = both.region.gather(3, ROWS, LIMITS)
        assert stash.seq_lens.tolist() == [5, 23]
        assert stash.bonus_tokens.tolist() == [42, 20]
        assert stash.num_new.tolist() == [1, 4]
        assert int(stash.last_tokens[0, 0]) == 42


def test_copied_in_draft_tokens_are_a_copy() -> None:
    with shared() as both:
        both.region.propose(1, ROWS, torch.full((2, 3), 4))
        copied = both.map.copy_in(1, both.region, SLOTS, ROWS)
        both.region.propose(2, ROWS, torch.full((2, 3), 5))
        assert copied.tolist() == [[4] * 3] * 2


def test_prefill_leaves_hidden_states_for_the_drafts_own_prefill() -> None:
    with shared() as both:
        both.region.stash_prefill(1, torch.ones(5, 2))
        assert both.arenas.tensor(BufferName.PREFILL_HIDDEN).sum(dim=1).tolist() == [2] * 5 + [0] * 3


def test_a_draft_without_hidden_states_is_given_none() -> None:
    with shared(replace(SHAPE, hidden_width=0)) as both:
        both.region.stash(1, SLOTS, ROWS, OUTCOME)
        assert both.region.gather(2, ROWS, LIMITS).hidden_states is None


@given(
    st.lists(INT64, min_size=4, max_size=4),
    st.lists(INT64, min_size=4, max_size=4),
    st.lists(st.integers(0, 60), min_size=6, max_size=6),
)
def test_whatever_is_in_the_memory_is_in_range_when_it_is_read(
    scalars: list[int], tokens: list[int], limits: list[int]
) -> None:
    with shared() as both:
        both.arenas.tensor(BufferName.SEQ_LENS)[ROWS] = torch.tensor(scalars[:2])
        both.arenas.tensor(BufferName.NUM_NEW)[ROWS] = torch.tensor(scalars[2:])
        both.arenas.tensor(BufferName.BONUS_TOKENS)[ROWS] = torch.tensor(tokens[:2])
        both.arenas.tensor(BufferName.LAST_TOKENS)[ROWS] = torch.tensor(tokens)
        both.arenas.tensor(BufferName.DRAFT_TOKENS)[ROWS] = torch.tensor(tokens[:3])
        stash = both.region.gather(1, ROWS, torch.tensor(limits))
        assert ((stash.seq_lens >= 0) & (stash.seq_lens <= torch.tensor(limits)[ROWS])).all()
        assert ((stash.num_new >= 1) & (stash.num_new <= 4)).all()
        for read in (stash.bonus_tokens, stash.last_tokens, both.map.copy_in(1, both.region, SLOTS, ROWS)):
            assert ((read >= 0) & (read < VOCAB_SIZE)).all()
        in_range = [0 <= token < VOCAB_SIZE for token in tokens[:2]]
        assert [int(b) == t for b, t in zip(stash.bonus_tokens, tokens, strict=False)] == in_range


class TestDebugMode:
    """Reading too early fails loudly."""

    def test_gather_before_any_stash(self) -> None:
        with shared(is_debug=True) as both:
            both.region.stash(1, SLOTS[:1], ROWS[:1], _first_row(OUTCOME))
            both.map.publish(1, ROWS[:1], _first_row(OUTCOME))
            for read in (both.region.gather, both.map.ends):
                read(2, ROWS[:1], LIMITS)
                with pytest.raises(FutureMapError, match=r"step 2: gathered slots \[2, 5\] before they were stashed"):
                    read(2, ROWS, LIMITS)

    def test_gather_of_a_slot_that_another_request_took(self) -> None:
        with shared(is_debug=True) as both:
            both.region.stash(1, SLOTS, ROWS, OUTCOME)
            both.map.publish(1, ROWS, OUTCOME)
            both.region.forget(2, SLOTS[:1])
            both.map.forget(SLOTS[:1])
            for read in (both.region.gather, both.map.ends):
                read(3, ROWS[1:], LIMITS)
                with pytest.raises(FutureMapError, match="before they were stashed"):
                    read(3, ROWS, LIMITS)

    def test_rows_that_no_step_published_hold_no_length(self) -> None:
        with shared(is_debug=True) as both:
            for step in range(1, 8):
                both.map.publish(step, ROWS, OUTCOME)
                lengths = [both.row(BufferName.NEW_SEQ_LENS, row).tolist() for row in range(SHAPE.ring)]
                assert lengths[step % 3][2] == 11
                assert set(lengths[(step + 1) % 3]) == {POISON}

    def test_outside_of_it_nothing_is_poisoned(self) -> None:
        with shared() as both:
            both.map.publish(1, ROWS, OUTCOME)
            assert both.region.gather(2, ROWS, LIMITS).seq_lens.tolist() == [0, 0]
            assert both.row(BufferName.NEW_SEQ_LENS, 2).tolist() == [0] * 6


def test_every_access_to_shared_memory_is_logged_with_its_rows() -> None:
    with shared() as both:
        both.map.publish(4, ROWS, OUTCOME)
        both.map.ends(5, ROWS, LIMITS)
        both.region.stash(4, SLOTS, ROWS, OUTCOME)
        both.region.gather(5, ROWS, LIMITS)
        both.region.propose(5, ROWS, torch.zeros(2, 3, dtype=torch.int64))
        both.map.copy_in(5, both.region, SLOTS, ROWS)
        both.region.stash_prefill(6, torch.zeros(1, 2))
        stashed = ("seq_lens", "bonus_tokens", "num_new", "last_tokens", "hidden_states")
        assert sorted(both.log.accesses) == sorted(
            [(name, (1,), True, 4, 0) for name in ("new_seq_lens", "num_accepted", "output_tokens")]
            + [(name, (2, 5), True, 4, ATTACHMENT) for name in stashed]
            + [(name, (2, 5), False, 5, ATTACHMENT) for name in (*stashed, "draft_tokens")]
            + [(name, (2, 5), True, 5, ATTACHMENT) for name in ("draft_tokens", "num_proposed")]
            + [("prefill_hidden", (0,), True, 6, ATTACHMENT)]
            # By parts: the decode part of the step in row 2, the prefill part of the step in row 1.
            + [("draft_stamps", (4, 3), True, 5, 0), ("draft_stamps", (4, 3), False, 5, ATTACHMENT)]
        )


def test_stamps_of_a_step_are_where_the_scheduler_reads_them() -> None:
    with shared() as both:
        for number, stamps in enumerate(
            (both.region.stamps(5), both.region.stamps(5, PREFILL_PART), both.map.stamps(5))
        ):
            for stamp, value in zip(stamps, (10, 20), strict=True):
                stamp.fill_(value + number)
        assert both.row(BufferName.DRAFT_STAMPS, 5 % 3).tolist() == [[10, 20], [11, 21]]
        assert both.row(BufferName.VERIFY_STAMPS, 5 % 3).tolist() == [12, 22]


@pytest.mark.parametrize("copies_tokens", [True, False])
def test_the_stamps_of_draft_s_parts_before_are_copied(copies_tokens: bool) -> None:
    """Also in a step without draft tokens for which draft takes in the stash."""
    with shared() as both:
        for step in (5, 6, 7):
            for part in (DECODE_PART, PREFILL_PART):
                both.region.stamps(step, part)[0].fill_(10 * step + part)
        if copies_tokens:
            both.map.copy_in(7, both.region, SLOTS, ROWS)
        else:
            both.map.copy_stamps(7, both.region)
            assert [access for access in both.log.accesses if access[0] == "draft_stamps"] == [
                ("draft_stamps", (2, 1), False, 7, ATTACHMENT),
                ("draft_stamps", (2, 1), True, 7, 0),
            ]
        copied = both.arenas.results.tensor(BufferName.DRAFT_STAMPS)
        assert copied[:, :, 0].tolist() == [[0, 61], [70, 0], [0, 0]], "the others may be written meanwhile"


@pytest.mark.parametrize("width", [0, 2])
def test_hidden_states_have_memory_only_where_a_draft_reads_them(width: int) -> None:
    names = {spec.name for spec in replace(SHAPE, hidden_width=width).given_specs()}
    assert (BufferName.HIDDEN_STATES in names) == (BufferName.PREFILL_HIDDEN in names) == bool(width)


def _first_row(outcome: VerifyResult) -> VerifyResult:
    assert outcome.hidden_states is not None
    return VerifyResult(
        seq_lens=outcome.seq_lens[:1],
        num_accepted=outcome.num_accepted[:1],
        tokens=outcome.tokens[:1],
        hidden_states=outcome.hidden_states[:1],
    )
