"""Workloads: their requests, and when these arrive."""

from __future__ import annotations

import itertools
import random
from statistics import mean

import pytest
from tokenizers import Tokenizer

from slipstream.benchmarks.workloads import (
    CPU_SCALE,
    GPU_SCALE,
    NAMES,
    Lengths,
    LogNormal,
    Scale,
    TextWorkload,
    poisson,
    poisson_times,
    warm_up,
    workloads,
)
from slipstream.bundled import target_dir

NUM_DRAWS = 50_000


@pytest.fixture(scope="module")
def workload() -> TextWorkload:
    return TextWorkload(Lengths(scale=0.25))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_lengths_have_the_mean_and_the_width_that_they_state(scale: float) -> None:
    rng = random.Random(1)
    draws = [LogNormal(mean_tokens=340.0, sigma=0.9).draw(rng, scale=scale, most=10**6) for _ in range(NUM_DRAWS)]
    # Standard errors are 0.5 % of the mean and 0.6 % of the quantile.
    assert mean(draws) == pytest.approx(scale * 340, rel=0.03)
    median, upper = sorted(draws)[NUM_DRAWS // 2], sorted(draws)[round(0.8413 * NUM_DRAWS)]
    assert upper / median == pytest.approx(2.71828**0.9, rel=0.05)


def test_lengths_fit_the_context() -> None:
    lengths, rng = Lengths(scale=50.0, context_tokens=256), random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(1000)]
    assert max(prompt + output for prompt, output in drawn) < 256
    assert {output for _, output in drawn} >= {128}
    tiny = Lengths(scale=0.001)
    assert min(itertools.chain(*(tiny.draw(rng) for _ in range(1000)))) == 1


def test_arrivals_are_a_poisson_process() -> None:
    times = list(itertools.takewhile(lambda at: at < 1000.0, poisson_times(50.0, random.Random(1))))
    # 50,000 are expected, give or take 224; of exponential gaps 1 / e are longer than their mean.
    assert len(times) == pytest.approx(50_000, abs=1000)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) > 0
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.01)


def test_the_same_seed_gives_the_same_requests(workload: TextWorkload) -> None:
    first, again = (workload.arrivals(20.0, 10.0, "a") for _ in range(2))
    assert first == again
    assert first != workload.arrivals(20.0, 10.0, "b")
    assert len({arrival.request.prompt for arrival in first}) > len(first) * 0.9
    assert len({arrival.request.options["seed"] for arrival in first}) == len(first)


def test_prompts_have_about_as_many_tokens_as_were_drawn(workload: TextWorkload) -> None:
    tokenizer = Tokenizer.from_file(str(target_dir() / "tokenizer.json"))
    rng = random.Random(1)
    for num_tokens in (1, 2, 17, 100, 496):
        for _ in range(50):
            text = workload.prompt(num_tokens, rng)
            assert text
            assert abs(len(tokenizer.encode(text, add_special_tokens=False).ids) - num_tokens) <= 4
    assert workload.prompt(10**6, rng)


def test_the_mean_of_the_outputs_is_that_of_the_requests(workload: TextWorkload) -> None:
    requests = list(itertools.islice(workload.requests("c"), 5000))
    assert mean(request.options["max_new_tokens"] for request in requests) == pytest.approx(
        workload.mean_output_tokens, rel=0.05
    )


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
        assert max(len(r.prompt) + r.options["max_new_tokens"] for r in requests) <= one.sizes.context_tokens
        assert min(r.options["max_new_tokens"] for r in requests) >= 2
        assert {r.options["temperature"] for r in requests} == {0.0}


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
        for turn, following in itertools.pairwise(session):
            assert following.prompt[: len(turn.prompt)] == turn.prompt
            added = len(following.prompt) - len(turn.prompt) - turn.options["max_new_tokens"]
            assert 100 <= added < 200
    assert len({session[0].prompt for session in turns.sessions}) == 32


def test_rates_differ_in_times_and_in_no_length() -> None:
    slow, fast = poisson(CPU_SCALE, 1.0, 50, 3), poisson(CPU_SCALE, 4.0, 50, 4)
    assert [one.at_s for one in slow] == pytest.approx([4 * one.at_s for one in fast])
    assert [one.request.prompt[1:] for one in slow] == [one.request.prompt[1:] for one in fast]
    assert {one.request.prompt[0] for one in slow} != {one.request.prompt[0] for one in fast}
    assert [one.request.options["max_new_tokens"] for one in slow] == [
        one.request.options["max_new_tokens"] for one in fast
    ]
