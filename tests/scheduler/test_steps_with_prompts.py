"""Steps that take in prompts beside sequences that decode: how many tokens of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.scheduler.records import Step
from slipstream.scheduler.sizes import MOST_WITHOUT, BatchSizes
from tests.harness.simulated_run import make_job, reference
from tests.harness.step_kinds import Kind, kind_of_step
from tests.scheduler.test_batch import SMALL, run_of


def _beside_a_stream(sizes: BatchSizes, *prompt_tokens: int) -> list[Step]:
    """The steps from when prompts come beside a running sequence until all are in."""
    run, steps = run_of(sizes), []
    run.jobs.add(make_job("decodes", (1,), 200))
    for _ in range(3):
        run.turn()
    for number, count in enumerate(prompt_tokens):
        run.jobs.add(make_job(f"prompt {number}", tuple(range(number, number + count)), 200))
    missing, last = sum(prompt_tokens), run.device.last_step
    while missing:
        assert run.turn()
        if run.device.last_step > last:
            last = run.device.last_step
            steps.append(run.in_flight[-1][0])
            missing -= steps[-1].num_prompt_tokens
    return steps


def _steps_beside_a_stream(sizes: BatchSizes, *prompt_tokens: int) -> list[tuple[Kind, int]]:
    """Their kinds and prompt tokens."""
    return [(kind_of_step(step), step.num_prompt_tokens) for step in _beside_a_stream(sizes, *prompt_tokens)]


def test_prompts_and_decoding_take_turns_where_steps_are_not_mixed() -> None:
    steps = _steps_beside_a_stream(replace(SMALL, mixes=False), 24)
    assert steps == [(Kind.PREFILL, 8), (Kind.DECODE, 0)] * 2 + [(Kind.PREFILL, 8)]


def test_steps_decode_and_take_in_prompts_up_to_a_number_of_tokens() -> None:
    """Of 8 tokens the sequence that decodes has 3; one that joins it has 3 more, and prompts have 2 at least."""
    sizes = replace(SMALL, num_slots=5, num_pages=200)
    assert _steps_beside_a_stream(sizes, 7, 6) == [(Kind.DECODE, count) for count in (5, 5, 2, 1)]
    numbers = replace(sizes, shared_chunk_tokens=4)
    assert _steps_beside_a_stream(numbers, 4) == [(Kind.DECODE, count) for count in (2, 2)]
    run = run_of(sizes)
    run.batch.bound_shared_steps(4, 1000)
    assert run.batch.sizes == replace(numbers, doubling_context=1000)
    run.jobs.add(make_job("alone", tuple(range(30)), 2))
    run.turn()
    assert [len(chunk.tokens) for chunk in run.in_flight[-1][0].chunks] == [8]


def test_a_few_prompts_come_in_by_small_steps_and_many_by_large_ones() -> None:
    """The stream decodes 3 tokens of 1,024, or of 2,048 while more waits than three small steps take in."""
    sizes = replace(SMALL, num_slots=8, num_pages=3000, chunk_tokens=2048)
    assert [count for _, count in _steps_beside_a_stream(sizes, 1500)] == [1021, 479]
    assert [count for _, count in _steps_beside_a_stream(sizes, 3000)] == [1021, 1021, 958]
    assert [count for _, count in _steps_beside_a_stream(sizes, 4000)] == [2045, 1021, 934]
    assert [count for _, count in _steps_beside_a_stream(sizes, 900, 800, 700, 700)] == [2045, 1015, 40]
    assert sizes.room_in_small_step(0) == sizes.room_for_prompts(0) == 2048
    assert replace(sizes, chunk_tokens=8192).room_in_small_step(3) == 4093
    beyond = replace(sizes, chunk_tokens=8192, shared_chunk_tokens=2048, large_chunk_tokens=4096)
    assert [count for _, count in _steps_beside_a_stream(beyond, 6400, 800)] == [4093, 2042, 1018, 47]
    for few in (replace(sizes, chunk_tokens=512), replace(sizes, mixes=False)):
        assert few.room_in_small_step(3) == few.room_for_prompts(3)


def test_beside_a_stream_a_step_has_fewer_tokens_of_a_prompt_behind_a_long_context() -> None:
    """The stream decodes 3 tokens of 11. Behind 8 tokens each counts for two, behind 16 for three."""
    sizes = replace(SMALL, num_slots=5, num_pages=200, chunk_tokens=11, doubling_context=8)
    counts = [count for _, count in _steps_beside_a_stream(sizes, 24)]
    assert counts == [8, 4, 3, 2, 2, 2, 2, 1]
    assert [count for _, count in _steps_beside_a_stream(replace(sizes, doubling_context=None), 24)] == [8, 8, 8]
    assert {count for _, count in _steps_beside_a_stream(replace(sizes, doubling_context=1), 24)} == {8, 2}


def test_what_a_long_context_leaves_of_a_step_goes_to_no_other_prompt_before_its_own_is_over() -> None:
    """Two prompts came together, and the last token of the first counts for four of eight."""
    sizes = replace(SMALL, num_slots=5, num_pages=200, chunk_tokens=11, doubling_context=8)
    counts = [count for _, count in _steps_beside_a_stream(sizes, 24, 24)]
    assert counts[:8] == [8, 4, 3, 2, 2, 2, 2, 1 + 4]


@pytest.mark.usefixtures("tiny_small_steps")
def test_steps_draft_none_while_many_prompts_wait() -> None:
    """The stream decodes 3 tokens, or 1 while more prompts wait than three small steps take in, and more than one."""

    def drafted(sizes: BatchSizes, *prompt_tokens: int) -> list[tuple[int, int]]:
        steps = _beside_a_stream(sizes, *prompt_tokens)
        assert {kind_of_step(step) for step in steps} == {Kind.DECODE}
        return [(step.most_draft_tokens, step.num_prompt_tokens) for step in steps]

    sizes = replace(SMALL, num_slots=8, num_pages=3000, chunk_tokens=64)
    assert drafted(sizes, 250, 250) == [(0, 63)] * 4 + [(2, 58)] * 3 + [(2, 26)] * 2 + [(2, 22)]
    assert drafted(sizes, 500) == [(2, 61)] * 7 + [(2, 29)] * 2 + [(2, 15)]
    lasting = [num_drafted for num_drafted, _ in drafted(sizes, 2000, 2000, 2000)]
    assert lasting[: MOST_WITHOUT + 1] == [0] * MOST_WITHOUT + [2]
    large = replace(sizes, chunk_tokens=65)
    assert drafted(large, 250, 250)[0] == (2, 62), "its draft tokens are few of these"


def test_those_that_decode_are_drafted_for_while_few_wait_beside_them() -> None:
    sizes = replace(SMALL, chunk_tokens=2048)
    assert sizes.skips_drafting(4, 16, 4)
    assert not sizes.skips_drafting(4, 16, 3)
    assert not sizes.skips_drafting(4, 15, 4), "60 tokens are less than one of 32"
    assert not sizes.skips_drafting(0, 300, 300), "there is no draft"
    for other in (replace(sizes, mixes=False), replace(sizes, chunk_tokens=1024)):
        assert not other.skips_drafting(4, 64, 64)


def test_where_nothing_decodes_a_context_takes_no_tokens_from_a_step() -> None:
    run = run_of(replace(SMALL, doubling_context=1))
    run.jobs.add(make_job("alone", tuple(range(24)), 1))
    counts = []
    while run.turn():
        counts += [step.num_prompt_tokens for step, _ in list(run.in_flight)[-1:]]
    assert set(counts) - {0} == {8}


def test_prompts_have_as_many_tokens_as_are_decoded_up_to_a_part_of_the_largest_step() -> None:
    sizes = replace(SMALL, chunk_tokens=64, shared_chunk_tokens=8)
    assert [sizes.room_for_prompts(num_decoded) for num_decoded in (0, 3, 6, 12, 16, 40)] == [64, 5, 6, 12, 16, 16]
    large = replace(sizes, chunk_tokens=8192, shared_chunk_tokens=2048)
    assert [large.room_for_prompts(num_decoded) for num_decoded in (3, 1800)] == [2045, 512]
    one_size = replace(sizes, shared_chunk_tokens=None)
    assert [one_size.room_for_prompts(num_decoded) for num_decoded in (0, 12, 60, 90)] == [64, 52, 16, 16]


def test_prompts_come_beside_sequences_that_do_not_speculate() -> None:
    run = run_of(replace(SMALL, num_pages=200))
    first, second = make_job("plain", (1,), 30, max_draft_tokens=0), make_job("prompt", tuple(range(20)), 30)
    run.jobs.add(first)
    for _ in range(3):
        run.turn()
    run.jobs.add(second)
    run.turn()
    step, _ = run.in_flight[-1]
    assert (kind_of_step(step), step.num_prompt_tokens) == (Kind.PLAIN, 7)
    while run.turn():
        pass
    for job in (first, second):
        assert run.jobs.outputs[job] == reference(job)[0]
