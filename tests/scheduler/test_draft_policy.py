"""When the draft rests and when it comes back, by made-up costs of steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import pytest

from slipstream.scheduler.draft_policy import ALONE_STEPS, LEAST_STAY, MIXED_STEPS, PROBE_STEPS, DraftPolicy
from slipstream.scheduler.records import RestCause

CHUNK = 100
WAY_BACK = 3
"""Steps in which the draft catches up."""


@dataclass
class Server:
    """Steps as a policy would have them made."""

    rng: random.Random
    accepted: float
    """Tokens of a draft that are accepted, on average."""
    noise: float = 0.0
    slowness: float = 1.0
    """Times how long a step takes otherwise, of either kind: the host is busy with other things, too."""
    num_rows: int = 8
    way_back: int = WAY_BACK
    prompt_s: tuple[float, float] = (0.0, 0.0)
    """For each token of the output, of the prompts that are taken in: without a draft, and with one."""
    chunk_s: tuple[float, float] | None = None
    """Of the chunk in each step that decodes, if the policy wants none without: in verify, and in a draft behind it."""
    skips_drafting: bool = False
    """Whether nothing is drafted in mixed steps."""
    policy: DraftPolicy = field(init=False)
    causes: list[RestCause] = field(default_factory=list)
    kinds: list[bool] = field(default_factory=list)
    """For each step whether it was drafted."""
    mixed: list[bool] = field(default_factory=list)
    """For each step whether it was mixed."""
    seconds: float = 0.0
    num_tokens: float = 0.0
    _left: int = 0
    _draft_lags_s: float = 0.0

    def __post_init__(self) -> None:
        self.policy = DraftPolicy(self.causes.append)

    def plain_s(self) -> float:
        """A step of 1 ms and 0.1 ms a sequence."""
        return 1e-3 + 1e-4 * self.num_rows

    def drafted_s(self) -> float:
        """Draft adds half of 1 ms and verify of five rows for each sequence 0.3 ms."""
        return 1.5e-3 + 4e-4 * self.num_rows

    def run(self, num_steps: int) -> list[bool]:
        """Makes steps, and returns whether they were drafted."""
        for _ in range(num_steps):
            was_drafted = not self.kinds or self.kinds[-1]
            self._left = self._left - 1 if self.policy.drafts and not was_drafted else self.way_back
            is_drafted = self.policy.drafts and (was_drafted or self._left <= 0)
            num_prompt_tokens = self._take_chunk()
            has_guesses = is_drafted and not (self.skips_drafting and num_prompt_tokens)
            seconds = (self.drafted_s() if has_guesses else self.plain_s()) * self.slowness
            seconds *= self.rng.lognormvariate(0, self.noise)
            num_tokens = self.num_rows + has_guesses * self._num_accepted()
            if self.prompt_s[0]:
                prompts_s = num_tokens * self.prompt_s[is_drafted]
                self.policy.take_in_prompts(prompts_s, 2 * num_tokens, is_drafted=is_drafted)
                self.seconds += prompts_s
            if self.chunk_s is not None:
                chunk_s, draft_s = (num_prompt_tokens / CHUNK * each for each in self.chunk_s)
                seconds += chunk_s + self._draft_lags_s
                self._draft_lags_s = draft_s * is_drafted
            self.policy.take_in(
                seconds,
                self.num_rows,
                num_tokens,
                is_drafted=is_drafted,
                num_prompt_tokens=num_prompt_tokens,
                has_guesses=has_guesses or not is_drafted,
            )
            self.kinds.append(is_drafted)
            self.seconds += seconds
            self.num_tokens += num_tokens
        return self.kinds[-num_steps:]

    def _take_chunk(self) -> int:
        """Tokens that the next step takes in of prompts, of which there are always some if any come at all."""
        takes_prompts = self.chunk_s is not None and not self.policy.decodes_alone()
        self.policy.sending(decodes=True, takes_prompts=takes_prompts)
        self.mixed.append(takes_prompts)
        return CHUNK * takes_prompts

    def _num_accepted(self) -> int:
        """As many as of four tokens a sequence, each accepted by chance."""
        mean, most = self.accepted * self.num_rows, 4 * self.num_rows
        return min(most, max(0, round(self.rng.gauss(mean, (mean * (1 - mean / most)) ** 0.5))))

    @property
    def best(self) -> float:
        """Tokens a second of the better kind of step."""
        return self.num_rows * max(1 / self.plain_s(), (1 + self.accepted) / self.drafted_s())

    @property
    def num_changes(self) -> int:
        """Changes so far."""
        return sum(one != other for one, other in pairwise(self.kinds))


def make_server(accepted: float, **settings: float) -> Server:
    """A server whose seed is printed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return Server(random.Random(seed), accepted, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("accepted", [0.0, 0.6, 1.5, 4.0])
def test_it_is_hardly_slower_than_the_better_kind_of_step(num_rows: int, accepted: float) -> None:
    server = make_server(accepted, noise=0.1, num_rows=num_rows)
    server.run(2000)
    server.seconds = server.num_tokens = 0.0
    server.run(10_000)
    assert server.num_tokens / server.seconds > 0.96 * server.best


def test_a_draft_that_is_always_wrong_rests_from_the_first_steps_on() -> None:
    server = make_server(0.0)
    assert not any(server.run(4000)[2 * LEAST_STAY :][: 128 * PROBE_STEPS[True]])
    assert server.causes[0] is RestCause.SLOWER
    assert not server.policy.drafts


def test_a_draft_that_is_worth_it_rests_for_probes_alone() -> None:
    server = make_server(3.0, noise=0.2)
    server.run(20_000)
    assert set(server.causes) == {RestCause.PROBE}


@pytest.mark.parametrize("accepted", [0.0, 3.0])
def test_probes_disturb_less_than_one_step_of_a_hundred(accepted: float) -> None:
    server = make_server(accepted, noise=0.1)
    server.run(2000)
    home = server.policy.drafts
    kinds = server.run(30_000)
    disturbed = kinds.count(not home)
    assert 0 < disturbed < len(kinds) / 100


@pytest.mark.parametrize(("accepted", "num_steps"), [(3.0, 8), (2.0, 32)])
def test_a_probe_is_longer_where_both_kinds_are_about_as_fast(accepted: float, num_steps: int) -> None:
    """Drafted steps bring 1.53 and 1.15 times as many tokens a second; two steps after a change are not measured."""
    server = make_server(accepted, way_back=0)
    server.run(20_000)
    assert {len(list(steps)) for is_drafted, steps in groupby(server.kinds) if not is_drafted} == {num_steps + 2}


def test_a_draft_of_which_hardly_a_token_is_accepted_is_tried_at_no_other_size_of_batch() -> None:
    server = make_server(0.0)
    server.run(1000)
    server.num_rows = 64
    assert not any(server.run(500))


@pytest.mark.parametrize("way_back", [0, 3, 40])
def test_it_does_not_flap_where_both_kinds_are_as_fast(way_back: int) -> None:
    server = make_server(0.0, noise=0.2, way_back=way_back)
    server.accepted = server.drafted_s() / server.plain_s() - 1
    server.run(10_000)
    assert server.num_changes < 2 * 10_000 / max(LEAST_STAY, 8 * way_back) / 2
    server.seconds = server.num_tokens = 0.0
    server.run(20_000)
    assert server.num_changes < 200
    assert server.num_tokens / server.seconds > 0.96 * server.best


@pytest.mark.parametrize("slowness", [0.5, 2.0])
@pytest.mark.parametrize("accepted", [1.2, 2.2])
def test_a_host_that_is_slower_or_faster_for_a_while_is_no_reason_to_change(accepted: float, slowness: float) -> None:
    """Drafted steps bring 0.84 and 1.23 times as many tokens a second as plain ones; no probe comes meanwhile."""
    server = make_server(accepted)
    server.run(1000)
    for server.slowness in (slowness, 1.0):
        kinds = server.run(200)
        assert kinds == [accepted > 2] * 200


def test_it_comes_back_when_drafts_are_accepted_again() -> None:
    server = make_server(0.0)
    server.run(20_000)
    assert not server.policy.drafts
    server.accepted = 3.0
    kinds = server.run(4 * 128 * (PROBE_STEPS[True] + 2 * WAY_BACK + 8))
    assert kinds.count(True) > LEAST_STAY
    assert all(kinds[-LEAST_STAY:])


def test_it_goes_by_the_size_of_the_batch() -> None:
    server = make_server(1.2, noise=0.05)
    best = {1: True, 32: False}
    for _ in range(3):
        for num_rows in best:
            server.num_rows = num_rows
            server.run(1500)
    for num_rows, is_drafted in best.items():
        server.num_rows = num_rows
        kinds = server.run(1000)
        assert kinds[300:].count(is_drafted) > 650, num_rows


@pytest.mark.parametrize("with_draft", [1, 2, 4])
def test_prompts_count_where_they_take_longer_with_a_draft(with_draft: int) -> None:
    """Decode steps alone would be a fifth faster with this draft."""
    server = make_server(0.0, noise=0.1, prompt_s=(1e-4, with_draft * 1e-4))
    server.accepted = 1.2 * server.drafted_s() / server.plain_s() - 1
    server.run(2000)
    assert server.policy.drafts is (with_draft == 1)


@pytest.mark.parametrize("skips_drafting", [False, True])
@pytest.mark.parametrize("accepted", [0.0, 4.0])
def test_it_learns_where_every_step_would_be_mixed(accepted: float, skips_drafting: bool) -> None:
    """With chunks that take ten times as long as a decode step, which says nothing of decoding."""
    server = make_server(accepted, noise=0.1, skips_drafting=skips_drafting)
    server.chunk_s = 10 * server.drafted_s(), 0.0
    server.run(1000)
    is_better = (1 + accepted) / server.drafted_s() > 1 / server.plain_s()
    kinds = server.run(30_000)
    assert kinds.count(is_better) > 0.98 * len(kinds)
    assert server.policy._seconds[is_better][3].value == pytest.approx(
        server.drafted_s() if is_better else server.plain_s(), rel=0.1
    )


def test_mixed_steps_go_on_while_it_learns() -> None:
    server = make_server(3.0)
    server.chunk_s = 10 * server.drafted_s(), 0.0
    server.run(20_000)
    assert True in server.kinds
    assert False in server.kinds, "the other kind was looked at meanwhile"
    longest = max(len(list(steps)) for is_mixed, steps in groupby(server.mixed) if not is_mixed)
    assert longest <= ALONE_STEPS
    assert server.mixed.count(True) > 0.9 * MIXED_STEPS / (MIXED_STEPS + ALONE_STEPS) * len(server.mixed)


@pytest.mark.parametrize("draft_s", [0.0, 1.0])
def test_the_drafts_part_of_a_chunk_counts_though_it_comes_in_the_step_behind(draft_s: float) -> None:
    """Decode steps alone would be a fifth faster with this draft; its chunks take as long as verify's or no time."""
    server = make_server(0.0, noise=0.1)
    server.accepted = 1.2 * server.drafted_s() / server.plain_s() - 1
    server.chunk_s = 0.02, draft_s * 0.02
    server.run(3000)
    assert server.policy.drafts is (draft_s == 0.0)


def test_steps_that_draft_none_say_what_their_prompts_cost_and_nothing_of_guesses() -> None:
    server = make_server(3.0, skips_drafting=True)
    server.chunk_s = 0.02, 0.0
    server.run(3000)
    assert server.policy.drafts
    assert server.policy._tokens.value == pytest.approx(4.0, rel=0.05)
    for is_drafted in (False, True):
        assert server.policy._prompt_seconds[is_drafted].value == pytest.approx(0.02 / CHUNK, rel=0.05)


def test_where_no_step_would_be_mixed_none_is_kept_from_it() -> None:
    policy = DraftPolicy()
    for _ in range(1000):
        policy.sending(decodes=True, takes_prompts=False)
        policy.sending(decodes=False, takes_prompts=True)
        assert not policy.decodes_alone()


def test_a_pause_of_the_host_is_no_cost() -> None:
    server = make_server(3.0)
    server.run(500)
    server.policy.take_in(60.0, 8, 32, is_drafted=True)
    assert all(server.run(500))


def test_nothing_changes_while_a_draft_is_judged() -> None:
    server = make_server(0.0)
    with server.policy.held():
        assert all(server.run(1000))
    assert not all(server.run(LEAST_STAY))


def test_another_draft_drafts_at_first() -> None:
    server = make_server(0.0)
    server.run(1000)
    assert not server.policy.drafts
    server.policy.joined()
    server.accepted = 3.0
    assert all(server.run(1000)[WAY_BACK:])
