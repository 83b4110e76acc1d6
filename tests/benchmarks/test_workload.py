"""Tests of the load generator's workload: its requests and their arrival times."""

from __future__ import annotations

import itertools
import random
from statistics import mean

import pytest
from tokenizers import Tokenizer

from slipstream.benchmarks.workload import Lengths, LogNormal, Workload, _poisson
from slipstream.bundled import target_dir

NUM_DRAWS = 50_000


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(target_dir(), Lengths(scale=0.25))


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
    times = list(_poisson(50.0, 1000.0, random.Random(1)))
    assert times == sorted(times)
    assert times[-1] < 1000
    # 50,000 are expected, give or take 224; of exponential gaps 1 / e are longer than their mean.
    assert len(times) == pytest.approx(50_000, abs=1000)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.01)


def test_the_same_seed_gives_the_same_requests(workload: Workload) -> None:
    first, again = (workload.arrivals(20.0, 10.0, "a") for _ in range(2))
    assert first == again
    assert first != workload.arrivals(20.0, 10.0, "b")
    assert len({arrival.request.prompt for arrival in first}) > len(first) * 0.9
    assert len({arrival.request.seed for arrival in first}) == len(first)


def test_prompts_have_about_as_many_tokens_as_were_drawn(workload: Workload) -> None:
    tokenizer = Tokenizer.from_file(str(target_dir() / "tokenizer.json"))
    rng = random.Random(1)
    for num_tokens in (1, 2, 17, 100, 496):
        for _ in range(50):
            text = workload.prompt(num_tokens, rng)
            assert text
            assert abs(len(tokenizer.encode(text, add_special_tokens=False).ids) - num_tokens) <= 4
    assert workload.prompt(10**6, rng)


def test_the_mean_of_the_outputs_is_that_of_the_requests(workload: Workload) -> None:
    requests = list(itertools.islice(workload.requests("c"), 5000))
    assert mean(request.max_new_tokens for request in requests) == pytest.approx(workload.mean_output_tokens, rel=0.05)
