"""Sequences that grow beyond the draft's context: they decode plainly, and limit nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

from slipstream.scheduler.records import NO_DRAFT, DraftKV
from tests.harness.drafted_run import SIZES, DraftedRun, check
from tests.harness.fake_drafts import FakeDraft
from tests.harness.simulated_run import Run, make_job
from tests.harness.step_kinds import Kind

CONTEXT = 64
SLACK = (SIZES.run_ahead + 2) * SIZES.most_step_tokens
"""Tokens before the end of the context where a step may draft no more: those under way count as many as they can be."""


def drafted_run(draft: FakeDraft) -> DraftedRun:
    """A run in which this draft takes part from the first step on."""
    run = DraftedRun(SIZES, random.Random(1))
    run.offer(draft)
    run.speculation.settle()
    return run


def test_a_sequence_is_drafted_for_up_to_the_drafts_context_and_decodes_plainly_behind_it() -> None:
    run = drafted_run(FakeDraft(2, 3, context_tokens=CONTEXT))
    job = make_job("job", (1, 2, 3, 4), 150)
    run.jobs.add(job)
    run.finish()
    check(run, [job])
    first_plain = run.kinds.index(Kind.PLAIN)
    assert set(run.kinds[first_plain:]) == {Kind.PLAIN}, "steps for no sequence have no draft"
    beyond, stats = job.stats.tokens_beyond_draft, job.stats
    assert 154 - CONTEXT <= beyond <= 154 - CONTEXT + SLACK
    assert stats.num_output_tokens == 1 + stats.num_verify_steps + stats.total_accepted_tokens + beyond
    assert stats.total_accepted_tokens > 0


def test_a_sequence_beyond_takes_no_drafts_in_the_steps_of_others() -> None:
    run = drafted_run(FakeDraft(2, 3, context_tokens=CONTEXT))
    long, short = make_job("long", tuple(range(CONTEXT)), 40), make_job("short", (1, 2), 40)
    run.jobs.add(long, short)
    run.finish()
    check(run, [long, short])
    assert (long.stats.num_verify_steps, long.stats.tokens_beyond_draft) == (0, 39)
    assert short.stats.tokens_beyond_draft == 0, "it ends within the context"
    assert len(run.num_accepted) == short.stats.num_verify_steps, "others are not among the figures of the draft"


def test_requests_without_speculation_and_sequences_that_end_within_are_not_beyond() -> None:
    run = drafted_run(FakeDraft(2, 3, context_tokens=CONTEXT))
    off = make_job("off", (1, 2), 100, max_draft_tokens=0)
    full = make_job("full", (1, 2, 3, 4), CONTEXT - 4)
    run.jobs.add(off, full)
    run.finish()
    check(run, [off, full])
    assert off.stats.tokens_beyond_draft == full.stats.tokens_beyond_draft == 0


def test_no_sequence_is_beyond_a_draft_that_is_gone() -> None:
    run, kv = Run(SIZES, random.Random(1)), DraftKV(2, context_tokens=CONTEXT)
    run.jobs.add(make_job("job", tuple(range(10)), 100))
    is_beyond = {}
    run.batch.admit(run.queue)
    for draft in [kv] * 50 + [NO_DRAFT] * 2:
        step = run.batch.next_step(3 if draft is kv else 0, draft=draft)
        assert step is not None
        run.apply(step, run.device.run(step))
        is_beyond[draft] = step.is_beyond_draft is not None
    assert is_beyond == {kv: True, NO_DRAFT: False}


def test_another_draft_has_room_again_and_takes_in_nothing_that_it_has_no_room_for() -> None:
    run = drafted_run(FakeDraft(2, 3, context_tokens=16))
    job = make_job("job", tuple(range(20)), 150)
    run.jobs.add(job)
    for _ in range(30):
        run.turn()
    assert Kind.DECODE not in run.kinds
    small, large = FakeDraft(3, 3, context_tokens=30), FakeDraft(4, 3, context_tokens=100)
    run.offer(small)
    for _ in range(10):
        run.turn()
    assert ("joined", 3) in run.listener.events
    assert not any(slot.tokens for slot in small.slots.values()), "what is too long is not brought"
    run.offer(large)
    run.finish()
    check(run, [job])
    assert ("joined", 4) in run.listener.events
    assert Kind.DECODE in run.kinds
    assert run.kinds[-1] is Kind.PLAIN
    assert job.stats.num_verify_steps > 0
    assert job.stats.tokens_beyond_draft >= 170 - 100


def test_pages_that_a_draft_has_no_room_for_are_shared_all_the_same() -> None:
    """A first sequence grows beyond the context; a second one goes on from it, and a third one from its beginning."""
    run, kv = Run(replace(SIZES, chunk_tokens=64), random.Random(1)), DraftKV(2, context_tokens=CONTEXT)

    def serve(prompt: tuple[int, ...], max_new_tokens: int) -> tuple[tuple[int, ...], int]:
        job = make_job(str(len(run.jobs.outputs)), prompt, max_new_tokens)
        run.jobs.add(job)
        while job not in run.jobs.ends:
            run.batch.admit(run.queue)
            step = run.batch.next_step(3, draft=kv)
            assert step is not None
            run.apply(step, run.device.run(step))
        return prompt + tuple(run.jobs.outputs[job]), job.stats.cached_tokens

    first, _ = serve(tuple(range(20)), 100)
    _, cached = serve(first, 10)
    assert cached >= len(first) - 2 * SIZES.page_tokens - SIZES.most_step_tokens
    _, cached = serve(first[: CONTEXT - 24], 10)
    assert cached == CONTEXT - 24 - SIZES.page_tokens, "pages that are drafted for have the draft's keys and values"
