"""The workloads of `benchmarks/load.py`: what is asked for, and when."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

import pytest

from slipstream.benchmarks.load_workloads import CPU_SCALE, GPU_SCALE, NAMES, Scale, poisson, warm_up, workloads

RATE = 40.0


@pytest.mark.parametrize(("scale", "divisor"), [(GPU_SCALE, 1), (CPU_SCALE, 8)])
def test_workloads_have_their_sizes(scale: Scale, divisor: int) -> None:
    made = {one.name: one for one in workloads(scale)}
    assert tuple(made) == NAMES
    expected = (256, 128, 64, 240, 384, 512, 192, 24, 480)
    assert [one.num_requests for one in made.values()] == [number // divisor for number in expected]
    clients = {name: one.num_clients for name, one in made.items() if not one.arrivals}
    assert clients == {
        name: number // divisor
        for name, number in {"chat": 64, "long": 64, "prefill": 16, "chat256": 256, "turns": 32, "ctx8k": 8}.items()
    }
    for one in (*made.values(), *(warm_up(scale, made[name].sizes) for name in ("chat", "ctx8k"))):
        requests = [r for session in one.sessions for r in session] + [arrival.request for arrival in one.arrivals]
        assert max(len(r.prompt) + r.max_new_tokens for r in requests) <= one.sizes.context_tokens
        assert min(r.max_new_tokens for r in requests) >= 2
        assert {r.temperature for r in requests} == {0.0}


def test_no_workload_finds_prompts_of_another_in_the_prefix_cache() -> None:
    made = workloads(CPU_SCALE)
    first = [{r.prompt[0] for session in one.sessions for r in session} for one in made]
    first += [{arrival.request.prompt[0] for arrival in one.arrivals} for one in made]
    assert sorted(tokens.pop() for tokens in first if tokens) == list(CPU_SCALE.token_ids[: len(NAMES)])
    assert not any(first)


def test_turns_of_a_conversation_continue_each_other_behind_a_common_prompt() -> None:
    (turns,) = (one for one in workloads(GPU_SCALE) if one.name == "turns")
    for session in turns.sessions:
        assert len(session) == 6
        assert session[0].prompt[:1000] == turns.sessions[0][0].prompt[:1000]
        for turn, following in pairwise(session):
            assert following.prompt[: len(turn.prompt)] == turn.prompt
            added = len(following.prompt) - len(turn.prompt) - turn.max_new_tokens
            assert 100 <= added < 200
    assert len({session[0].prompt for session in turns.sessions}) == 32


def test_arrivals_are_independent_and_as_many_a_second_as_asked_for() -> None:
    arrivals = poisson(CPU_SCALE, RATE, 4000, 0)
    gaps = [after.at_s - before.at_s for before, after in pairwise(arrivals)]
    assert min(gaps) > 0
    # The seed is fixed; standard errors are 1.6 % of the mean and 0.8 % of the share, 1 / e, that is longer.
    assert mean(gaps) == pytest.approx(1 / RATE, rel=0.05)
    assert sum(gap > 1 / RATE for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_rates_differ_in_times_and_in_no_length() -> None:
    slow, fast = poisson(CPU_SCALE, 1.0, 50, 3), poisson(CPU_SCALE, 4.0, 50, 4)
    assert [one.at_s for one in slow] == pytest.approx([4 * one.at_s for one in fast])
    assert [one.request.prompt[1:] for one in slow] == [one.request.prompt[1:] for one in fast]
    assert {one.request.prompt[0] for one in slow} != {one.request.prompt[0] for one in fast}
    assert [one.request.max_new_tokens for one in slow] == [one.request.max_new_tokens for one in fast]
