"""Tests that the scheduler reads a step's result behind its fence, once, and only the rows that were published."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import FutureMapError
from slipstream.common.wire.events import EventLog
from slipstream.common.wire.job import TokenLogprobs
from slipstream.common.wire.layout import NOT_FINITE, RESULT_FENCES, BufferName, EpochShape
from slipstream.common.wire.step import FenceName
from slipstream.scheduler.records import SlotLease, Step, StepResult, StepSlots
from slipstream.scheduler.results import ResultReader
from slipstream.services.models.sampler import Logprobs
from slipstream.services.worker.future_map import FutureMap, VerifyResult

SHAPE = EpochShape(num_slots=5, run_ahead=1, num_draft_tokens=2, chunk_tokens=8)


class Shared:
    """Verify's end and the scheduler's."""

    def __init__(self, *, is_debug: bool) -> None:
        device = HostDevice()
        self.arena = device.create_arena(SHAPE.specs(), RESULT_FENCES)
        buffers = {BufferName(spec.name): self.arena.tensor(spec.name) for spec in SHAPE.specs()}
        self.verify = FutureMap(SHAPE, buffers, vocab_size=100, log=EventLog(), is_debug=is_debug)
        self.reader = ResultReader(self.arena, SHAPE, EventLog(), is_debug=is_debug)

    def publish(self, number: int, rows: list[int], accepted: list[int], logprobs: Logprobs | None = None) -> None:
        """As verify's stream does."""
        outcome = VerifyResult(
            seq_lens=torch.tensor([10 * row for row in rows]),
            num_accepted=torch.tensor(accepted),
            tokens=torch.tensor([[row, row + 1, row + 2] for row in rows]),
            logprobs=logprobs,
        )
        self.verify.publish(number, torch.tensor(rows), outcome)
        self.arena.fence(FenceName.VERIFY_PUBLISH).release(number)


@pytest.fixture(params=[False, True], ids=["plain", "debug"])
def shared(request: pytest.FixtureRequest) -> Iterator[Shared]:
    """Without and with debug mode."""
    made = Shared(is_debug=request.param)
    yield made
    made.arena.close()


def step_of(
    number: int, *slots: int, num_draft_tokens: int = SHAPE.num_draft_tokens, bounds: tuple[int, ...] = ()
) -> Step:
    """A step that decodes these slots. `bounds`: the most draft tokens that each may accept; none is K."""
    decoded = StepSlots.of([SlotLease(slot, 1) for slot in slots])
    most_more = np.array(bounds or [num_draft_tokens] * len(slots), np.int32) + 1
    return Step(
        number=number,
        decoded=decoded,
        yielding=decoded,
        most_more=most_more,
        is_bounded=bool(bounds),
        num_draft_tokens=(num_draft_tokens,) * len(slots),
        most_draft_tokens=num_draft_tokens,
    )


def tokens_of(result: StepResult) -> list[list[int]]:
    """The tokens of each row that count."""
    return [row[: count + 1] for row, count in zip(result.tokens.tolist(), result.num_accepted.tolist(), strict=True)]


def test_brings_accepted_tokens_and_the_targets_own_in_the_steps_order(shared: Shared) -> None:
    step = step_of(1, 4, 2)
    assert shared.reader.resolve(step, 0.01) is None
    shared.publish(1, [2, 3, 4], [0, 1, 2])
    result = shared.reader.resolve(step, 5.0)
    assert result is not None
    assert tokens_of(result) == [[4, 5, 6], [2]]


def test_brings_logprobs_to_those_who_asked(shared: Shared) -> None:
    step = step_of(1, 4, 2, 3)._replace(top_logprobs={0: 1, 2: 0})
    assert shared.reader.resolve(step, 0.01) is None
    likely = Logprobs(
        output=torch.tensor([[-1.0, -2.0, -3.0]] * 3) * torch.tensor([[1], [2], [3]]),
        top_tokens=torch.arange(9, dtype=torch.int32).view(3, 3, 1),
        top=-torch.arange(9.0).view(3, 3, 1) / 8,
    )
    shared.publish(1, [2, 3, 4], [0, 1, 1], likely)
    result = shared.reader.resolve(step, 5.0)
    assert result is not None
    assert tokens_of(result) == [[4, 5], [2], [3, 4]]
    assert result.logprobs == {
        0: (TokenLogprobs(-3.0, ((6, -0.75),)), TokenLogprobs(-6.0, ((7, -0.875),))),
        2: (TokenLogprobs(-2.0), TokenLogprobs(-4.0)),
    }
    shared.publish(2, [2], [0])
    plain = shared.reader.resolve(step_of(2, 2), 5.0)
    assert plain is not None
    assert plain.logprobs == {}


def test_a_later_publish_does_not_disturb_an_earlier_result(shared: Shared) -> None:
    shared.publish(1, [1], [1])
    shared.publish(2, [1], [2])
    for number, expected in ((1, [1, 2]), (2, [1, 2, 3])):
        result = shared.reader.resolve(step_of(number, 1), 5.0)
        assert result is not None
        assert tokens_of(result) == [expected]


def test_a_step_is_consumed_once(shared: Shared) -> None:
    for number in (1, 2):
        shared.publish(number, [1], [0])
        shared.reader.resolve(step_of(number, 1), 5.0)
    for number in (2, 1):
        with pytest.raises(FutureMapError, match=f"step {number} is consumed again, after step 2"):
            shared.reader.resolve(step_of(number, 1), 5.0)


@pytest.mark.parametrize("shared", [True], indirect=True)
def test_a_row_that_the_step_did_not_publish_is_noticed(shared: Shared) -> None:
    shared.publish(1, [1], [0])
    with pytest.raises(FutureMapError, match="step 1, slot 3: length -1 and 0 accepted tokens cannot be its result"):
        shared.reader.resolve(step_of(1, 1, 3), 5.0)


@pytest.mark.parametrize(("accepted", "num_draft_tokens"), [(-2, 2), (3, 2), (1, 0)])
def test_more_accepted_than_can_be_is_refused(shared: Shared, accepted: int, num_draft_tokens: int) -> None:
    shared.publish(1, [1], [0])
    shared.arena.tensor(BufferName.NUM_ACCEPTED)[1, 1] = accepted
    with pytest.raises(FutureMapError, match="cannot be its result"):
        shared.reader.resolve(step_of(1, 1, num_draft_tokens=num_draft_tokens), 5.0)


def test_what_a_sequence_may_not_accept_is_refused(shared: Shared) -> None:
    for number in (1, 2):
        shared.publish(number, [1, 2, 3], [2, 1, 0])
    assert shared.reader.resolve(step_of(1, 1, 2, 3, bounds=(2, 1, 0)), 5.0) is not None
    with pytest.raises(FutureMapError, match="step 2, slot 2: length 20 and 1 accepted tokens cannot be its result"):
        shared.reader.resolve(step_of(2, 1, 2, 3, bounds=(2, 0, 0)), 5.0)


def test_rows_without_tokens_are_named(shared: Shared) -> None:
    shared.publish(1, [1, 2, 3], [2, NOT_FINITE + 1, 1])
    shared.arena.tensor(BufferName.NUM_ACCEPTED)[1, 2] = NOT_FINITE
    result = shared.reader.resolve(step_of(1, 3, 2, 1), 5.0)
    assert result is not None
    assert (result.not_finite, result.num_accepted.tolist()) == ((1,), [1, 0, 2])


def test_rows_without_tokens_are_named_beside_bounded_ones(shared: Shared) -> None:
    shared.publish(1, [1, 2, 3], [2, NOT_FINITE + 1, 0])
    shared.arena.tensor(BufferName.NUM_ACCEPTED)[1, 2] = NOT_FINITE
    result = shared.reader.resolve(step_of(1, 1, 2, 3, bounds=(2, 2, 0)), 5.0)
    assert result is not None
    assert (result.not_finite, result.num_accepted.tolist(), result.num_tokens.tolist()) == ((1,), [2, 0, 0], [3, 1, 1])


def test_the_stamp_of_the_end_is_told_once_it_is_there(shared: Shared) -> None:
    stamps = shared.arena.tensor(BufferName.VERIFY_STAMPS)
    stamps[2] = torch.tensor([100, 110])
    assert shared.reader.ended_ns(2) == 110
    stamps[2, 0] = 300  # the row's next step began
    assert shared.reader.ended_ns(2 + SHAPE.ring) == 0
    stamps[2, 1] = 310
    assert shared.reader.ended_ns(2 + SHAPE.ring) == 310


def test_a_step_that_yields_nothing_brings_nothing(shared: Shared) -> None:
    shared.arena.fence(FenceName.VERIFY_PUBLISH).release(1)
    result = shared.reader.resolve(step_of(1), 5.0)
    assert result is not None
    assert tokens_of(result) == []
