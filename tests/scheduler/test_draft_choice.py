"""How many tokens are drafted for each sequence, by made-up costs of steps and shares of accepted tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np
import pytest

from slipstream.common.wire.step import RowTokens
from slipstream.common.wire.worker import StepCost
from slipstream.scheduler.costs import KEPT, RESTING, CostTable, Survivals
from slipstream.scheduler.draft_choice import ALONE_STEPS, FIRST_TOKENS, MIXED_STEPS, PATIENCE, DraftChoice
from slipstream.scheduler.records import NO_OUTCOME, RestCause, SlotLease, Step, StepSlots

MOST = 5
WAY_BACK = 3
"""Steps in which the draft catches up."""


@dataclass
class Server:
    """Steps as a choice would have them made."""

    rng: np.random.Generator
    shares: list[float]
    """By sequence: of the tokens drafted for it that are accepted, each after those before it."""
    rows: RowTokens = RowTokens.RAGGED
    """How the draft tokens of a step's sequences may differ."""
    noise: float = 0.0
    slowness: float = 1.0
    token_s: float = 1e-4
    """Of verify's time, for each token; 1 ms comes before all of them."""
    forward_s: float = 1e-4
    """Of draft's, which makes one for each token."""
    between_s: float = 0.0
    """Of a drafted step, beyond the workers' parts: they take turns."""
    fixed: int | None = None
    """Drafts so many for each sequence."""
    most: int = MOST
    takes_prompts: bool = False
    choice: DraftChoice = field(init=False)
    causes: list[RestCause] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)
    """By step: the numbers of draft tokens; empty where the draft did not take part."""
    seconds: float = 0.0
    num_tokens: int = 0
    _left: int = 0
    _was_mixed: bool = False

    def __post_init__(self) -> None:
        self.choice = DraftChoice(100, MOST, self.causes.append)

    @property
    def evens(self) -> tuple[int, ...]:
        """See `ChooseDraftTokens`."""
        return self.rows.evens(MOST)

    def measure(self) -> None:
        """Has the choice begin with times that the workers measured when they were attached."""
        sizes = list(product((1, 2, 4, 8), range(MOST + 1)))
        self.choice.costs.begin(
            StepCost(rows, count, round(1e6 + 1e9 * self.token_s * rows * (count + 1))) for rows, count in sizes
        )
        self.choice.joined([StepCost(rows, count, round(1e9 * self.forward_s * count) or 1) for rows, count in sizes])

    def run(self, num_steps: int) -> float:
        """Makes steps; returns tokens per second."""
        self.seconds, self.num_tokens = 0.0, 0
        for _ in range(num_steps):
            self._step()
        return self.num_tokens / self.seconds

    def _step(self) -> None:
        rows = len(self.shares)
        slots = StepSlots.of(SlotLease(slot, 1) for slot in range(1, rows + 1))
        most = np.full(rows, self.most, np.int32)
        whole = Step(0, slots, slots, most + 1, num_draft_tokens=(1,), most_draft_tokens=MOST, is_kept=True)
        self._left = self._left - 1 if self.choice.drafts else WAY_BACK
        takes_prompts = self.takes_prompts and not self.choice.decodes_alone()
        if self.fixed is not None:
            step = whole.with_draft_tokens(np.full(rows, self.fixed, np.int32))
        elif self._left <= 0:
            counts = self.choice.choose(slots, most, evens=self.evens)
            step = whole.with_draft_tokens(counts, evens=self.evens)
            self.counts.append(counts.tolist())
        else:
            step = whole.with_draft_tokens(np.zeros(rows, np.int32))._replace(is_kept=False)
            self.counts.append([])
        self.choice.sending(decodes=True, takes_prompts=takes_prompts)
        noise = self.slowness * self.rng.lognormal(0, self.noise)
        verify_s = (1e-3 + self.token_s * step.num_decoded_tokens) * noise
        seconds = verify_s + (self.forward_s * step.most_draft_tokens + self.between_s * step.is_kept) * noise
        is_right = self.rng.random((rows, MOST)) < np.array(self.shares)[:, None]
        accepted = np.minimum(is_right.cumprod(axis=1).sum(axis=1), step.most_more - 1).astype(np.uint32)
        drafted = np.asarray(step.most_more - 1, np.int32)
        self.choice.take_in(NO_OUTCOME._replace(rows=slots.rows, num_accepted=accepted, num_drafted=drafted))
        if not (takes_prompts or self._was_mixed):
            self.choice.took(step, seconds, verify_s, has_draft=step.is_kept)
        self._was_mixed = takes_prompts
        self.seconds += seconds + 0.02 * takes_prompts
        self.num_tokens += rows + int(accepted.sum())


SEED = 1


def make_server(*shares: float, **settings: float) -> Server:
    """A server. Its seed is fixed, as about one of many random runs would miss a bound."""
    return Server(np.random.default_rng(SEED), list(shares), **settings)  # type: ignore[arg-type]


def best_of_fixed(*shares: float, **settings: float) -> float:
    """Tokens per second of the best fixed number, as expected."""
    model = Server(np.random.default_rng(0), list(shares), **settings)  # type: ignore[arg-type]
    rows, rates = len(shares), []
    for most in (0, *(model.evens or range(1, MOST + 1))):
        tokens = sum(1 + sum(share**place for place in range(1, most + 1)) for share in shares)
        rates.append(tokens / (1e-3 + model.token_s * rows * (most + 1) + model.forward_s * most))
    return max(rates)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row_tokens", RowTokens)
@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_it_is_hardly_slower_than_the_best_fixed_number(share: float, num_rows: int, row_tokens: RowTokens) -> None:
    shares = [share] * num_rows
    server = make_server(*shares, noise=0.1, rows=row_tokens)
    server.run(400)
    assert server.run(1200) > 0.95 * best_of_fixed(*shares, rows=row_tokens)


def test_it_is_faster_than_every_fixed_number_where_sequences_differ() -> None:
    shares = [0.1, 0.5, 0.95, 0.95] * 2
    server = make_server(*shares, noise=0.05)
    server.run(400)
    assert server.run(2000) > 1.02 * best_of_fixed(*shares)
    last = np.array([counts for counts in server.counts[-100:] if counts])
    assert last[:, [2, 3, 6, 7]].mean() > last[:, [0, 4]].mean() + 2


def test_trials_lose_little_and_try_everything() -> None:
    server = make_server(0.9, 0.9)
    server.run(400)
    begun = len(server.counts)
    rate = server.run(4000)
    assert rate > 0.97 * best_of_fixed(0.9, 0.9)
    seen = {max(counts, default=RESTING) for counts in server.counts[begun:]}
    assert seen == {RESTING, KEPT, *range(1, MOST + 1)}


@pytest.mark.parametrize(("share", "best"), [(1.0, MOST), (0.0, 0)])
def test_with_measured_costs_the_first_request_has_its_number_within_32_tokens(share: float, best: int) -> None:
    """Also where every step takes half as long again as the workers' parts of it, as hosts lose time between them."""
    server = make_server(share, slowness=1.5, token_s=3e-4, forward_s=2e-4)
    server.measure()
    while server.num_tokens < 32:
        server._step()
    server.run(20)
    last = [sum(counts) for counts in server.counts[-20:]]
    assert last.count(best) > 15 or (not best and not server.choice.drafts)


def test_what_was_measured_is_not_tried_at_once_and_counts_by_how_long_steps_really_take() -> None:
    server = make_server(0.9, 0.9, slowness=1.5)
    server.measure()
    server.run(60)
    assert min(max(counts, default=RESTING) for counts in server.counts) > KEPT
    expected = server.slowness * np.array([1e-3 + 1e-4 * tokens for tokens in (2, 6, 12)])
    assert server.choice.costs.verify(2, np.array([2.0, 6.0, 12.0])) == pytest.approx(expected, rel=0.1)


def test_what_a_drafted_step_takes_beyond_the_workers_parts_is_no_reason_to_draft_on() -> None:
    """Neither stamps of workers nor their measurements say what it costs that they take turns: drafted steps do."""
    settings = {"noise": 0.1, "slowness": 2.0}
    server = make_server(*[0.6] * 4, forward_s=4e-4, between_s=5e-4, **settings)
    server.measure()
    rate = server.run(150)
    assert server.causes == [RestCause.SLOWER]
    assert rate > 0.9 * make_server(*[0.6] * 4, fixed=0, **settings).run(400)


def test_a_sequence_that_is_accepted_gets_more_within_32_tokens() -> None:
    """One request on a server that knows its costs, and that of others little is accepted."""
    server = make_server(0.4)
    server.run(1500)
    assert sum(map(sum, server.counts[-20:])) < 2.5 * 20
    server.choice.survivals._generations[:] = 0
    server.shares, server.num_tokens = [1.0], 0
    while server.num_tokens < 32:
        server._step()
    server.run(20)
    assert server.counts[-20:].count([MOST]) > 15


@pytest.mark.parametrize("row_tokens", RowTokens)
def test_bounds_hold(row_tokens: RowTokens) -> None:
    server = make_server(0.9, 0.9, 0.9, rows=row_tokens)
    server.run(300)
    slots = StepSlots.of(SlotLease(slot, 1) for slot in (1, 2, 3))
    most = np.array([0, 2, MOST], np.int32)
    for _ in range(300):
        counts = server.choice.choose(slots, most, evens=server.evens)
        assert (counts <= most).all()
        expected = [np.minimum(most, even).tolist() for even in (0, *server.evens)]
        assert not server.evens or counts.tolist() in expected


def test_a_draft_that_is_always_wrong_rests_and_comes_back_for_short_trials() -> None:
    server = make_server(0.0, 0.0)
    rate = server.run(4000)
    assert server.causes[0] is RestCause.SLOWER
    assert sum(map(bool, server.counts)) < 0.15 * len(server.counts)
    assert rate > 0.97 * best_of_fixed(0.0, 0.0)


def test_it_comes_back_when_drafts_are_accepted_again() -> None:
    server = make_server(0.0, 0.0)
    server.run(2000)
    assert not server.choice.drafts
    server.shares = [0.95, 0.95]
    server.run(3000)
    assert all(map(any, server.counts[-PATIENCE:]))


def test_it_goes_by_the_size_of_the_batch() -> None:
    server = make_server(0.6, token_s=4e-4)
    for num_rows in (1, 64) * 3:
        server.shares = [0.6] * num_rows
        server.run(1000)
        drafted = [sum(counts) / num_rows for counts in server.counts[-200:]]
        assert bool(np.mean(drafted) > 0.5) is (num_rows == 1)


def test_a_host_that_is_slower_for_a_while_is_no_reason_to_rest_or_to_come_back() -> None:
    for shares in ((0.0, 0.0), (0.9, 0.9)):
        server = make_server(*shares)
        server.run(1000)
        num_rests = len(server.causes)
        for server.slowness in (2.0, 0.5, 1.0):
            server.run(150)
            num_drafted = sum(any(counts) for counts in server.counts[-150:])
            assert num_drafted > 120 if shares[0] else num_drafted < 30, "but for trials"
        assert len(server.causes) <= num_rests + 2


def test_a_pause_of_the_host_is_no_cost() -> None:
    server = make_server(0.9, 0.9)
    server.run(500)
    rates = [server.run(100)]
    server.slowness = 1000.0
    server.run(1)
    server.slowness = 1.0
    assert server.run(100) > 0.9 * rates[0]


def test_where_every_step_would_be_mixed_some_decode_alone() -> None:
    server = make_server(0.0, 0.0, takes_prompts=True)
    server.run(3000)
    assert not server.choice.drafts or server.choice._trial_left
    choice, alone = server.choice, []
    for _ in range(500):
        alone.append(choice.decodes_alone())
        choice.sending(decodes=True, takes_prompts=not alone[-1])
    assert sum(alone) == pytest.approx(len(alone) * ALONE_STEPS / (MIXED_STEPS + ALONE_STEPS), abs=ALONE_STEPS)
    assert max(sum(pair) for pair in pairwise(alone)) == ALONE_STEPS


@pytest.mark.parametrize("row_tokens", RowTokens)
def test_a_draft_that_is_judged_drafts_in_each_step_and_another_one_begins_so(row_tokens: RowTokens) -> None:
    server = make_server(0.0, 0.0, rows=row_tokens)
    with server.choice.held():
        server.run(300)
    assert all(all(counts) for counts in server.counts)
    least = MOST if row_tokens is RowTokens.WHOLE else 1
    assert server.counts[0] == [max(FIRST_TOKENS, least)] * 2
    assert server.counts[-1] == [least] * 2
    server.run(1500)
    assert not server.choice.drafts
    server.choice.joined()
    server.run(WAY_BACK)
    assert server.counts[-1] == [max(FIRST_TOKENS, least)] * 2


def test_the_same_measurements_give_the_same_choices() -> None:
    first, second = (Server(np.random.default_rng(5), [0.3, 0.9, 0.9], noise=0.2) for _ in range(2))
    first.run(700)
    second.run(700)
    assert first.counts == second.counts


def test_costs_are_read_between_what_was_measured() -> None:
    table = CostTable()
    for chain, tokens in ((1, 8), (5, 24)):
        for _ in range(40):
            table.add(1e-3 * tokens + 2e-3 * chain, 1e-3 * tokens, rows=4, tokens=tokens, chain=chain)
    found = table.verify(4, np.array([8.0, 16.0, 24.0, 48.0]))
    assert found == pytest.approx([0.008, 0.016, 0.024, 0.036], rel=0.01)
    assert table.chains(3, 6) == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.010, 0.011], rel=0.01)
    for _ in range(40):
        table.add(0.003, 0.002, rows=4, tokens=4, chain=KEPT)
        table.add(0.002, 0.002, rows=4, tokens=4, chain=RESTING)
    assert table.undrafted(KEPT, 4) == pytest.approx(0.003, rel=0.05)
    assert table.undrafted(RESTING, 4) == pytest.approx(0.002, rel=0.05)


def test_stamps_of_verify_may_be_equal() -> None:
    choice, slots = DraftChoice(10, MOST), StepSlots.of([SlotLease(1, 1), SlotLease(2, 1)])
    choice.costs.add(0.004, 0.0, rows=2, tokens=12, chain=MOST)
    counts = choice.choose(slots, np.full(2, MOST, np.int32), evens=())
    assert counts.shape == (2,)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_noise_of_the_steps_that_run_says_nothing_of_those_that_do_not(noise: float) -> None:
    rng, table = np.random.default_rng(4), CostTable()
    for _ in range(40):
        table.add(0.010, 0.009, rows=8, tokens=8, chain=RESTING)
    for seconds in 0.010 * rng.lognormal(0.0, noise, 10_000):
        table.add(seconds, 0.7 * seconds, rows=8, tokens=40, chain=4)
    assert table.undrafted(RESTING, 8) == pytest.approx(0.010, rel=0.2)
    for _ in range(200):
        table.add(0.020, 0.014, rows=8, tokens=40, chain=4)
    assert table.undrafted(RESTING, 8) == pytest.approx(0.020, rel=0.3), "the host is slower"


def test_survivals_are_told_from_chains_of_any_length_and_begin_with_the_servers() -> None:
    rng, survivals = np.random.default_rng(3), Survivals(4, 4)
    hazards = np.array([[0.1, 0.1, 0.1, 0.1], [0.5, 0.5, 0.5, 0.5]])
    rows = np.array([1, 2])
    slots = StepSlots.of(SlotLease(slot, 1) for slot in (1, 2))
    survivals.of(slots, 4)
    for _ in range(600):
        drafted = rng.integers(0, 5, 2).astype(np.int32)
        chains = (rng.random((2, 4)) > hazards).cumprod(axis=1).sum(axis=1)
        survivals.take_in(rows, np.minimum(chains, drafted).astype(np.uint32), drafted)
    found = survivals.of(slots, 4)
    assert found == pytest.approx((1 - hazards).cumprod(axis=1), abs=0.15)
    (new,) = survivals.of(StepSlots.of([SlotLease(2, 2)]), 4)
    assert found[1, 0] < new[0] < found[0, 0]
