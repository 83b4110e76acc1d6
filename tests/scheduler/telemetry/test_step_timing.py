"""Wall, busy and bubbles of one step. `before`: verify's end, and the last end of both workers."""

from __future__ import annotations

from slipstream.scheduler.telemetry.step_metrics import (
    DECODE,
    DRAFT_TO_VERIFY,
    MIXED,
    PREFILL,
    VERIFY_TO_DRAFT,
    VERIFY_TO_VERIFY,
    time_step,
)


def test_decode() -> None:
    timing = time_step(DECODE, (100, 100), verify=(130, 180), decoded=(107, 120), is_drafted=True)
    assert (timing.draft_ns, timing.verify_ns, timing.wall_ns) == (13, 50, 80)
    assert timing.bubbles_ns == {VERIFY_TO_DRAFT: 7, DRAFT_TO_VERIFY: 10}
    assert timing.wall_ns == timing.draft_ns + timing.verify_ns + sum(timing.bubbles_ns.values())


def test_stamps_that_make_no_sense_make_no_bubble_longer_than_the_step() -> None:
    timing = time_step(DECODE, (100, 100), verify=(130, 140), decoded=(135, 10), is_drafted=True)
    assert timing.wall_ns == 40
    assert timing.bubbles_ns == {VERIFY_TO_DRAFT: 35, DRAFT_TO_VERIFY: 5}


def test_plain() -> None:
    timing = time_step(DECODE, (100, 100), verify=(111, 150), decoded=None)
    assert (timing.draft_ns, timing.verify_ns, timing.wall_ns) == (0, 39, 50)
    assert timing.bubbles_ns == {VERIFY_TO_VERIFY: 11}


def test_the_first_step_after_an_idle_time_has_no_bubble_and_no_wall() -> None:
    timing = time_step(DECODE, None, verify=(130, 180), decoded=(107, 120), is_drafted=True)
    assert (timing.draft_ns, timing.verify_ns, timing.wall_ns) == (13, 50, None)
    assert timing.bubbles_ns == {}


def test_prefill_of_both_at_the_same_time() -> None:
    """Draft is not on the path of the step: verify starts late only because of the host."""
    timing = time_step(PREFILL, (100, 100), verify=(104, 150), decoded=None, prefilled=(101, 190))
    assert (timing.draft_ns, timing.verify_ns, timing.wall_ns) == (89, 46, 50)
    assert timing.bubbles_ns == {VERIFY_TO_VERIFY: 4}


def test_a_prefill_of_draft_that_outlasts_verifys_is_no_bubble() -> None:
    """`before`: verify was done at 150, draft not until 190. The next step starts right behind draft."""
    timing = time_step(DECODE, (150, 190), verify=(205, 240), decoded=(192, 204), is_drafted=True)
    assert timing.bubbles_ns == {VERIFY_TO_DRAFT: 2, DRAFT_TO_VERIFY: 1}
    assert timing.wall_ns == 90


def test_a_step_without_draft_tokens_waits_for_draft_only_before_it_samples() -> None:
    timing = time_step(DECODE, (100, 100), verify=(111, 150), decoded=(105, 120))
    assert (timing.draft_ns, timing.bubbles_ns) == (15, {VERIFY_TO_VERIFY: 11})


def test_both_parts_of_a_draft_count() -> None:
    timing = time_step(MIXED, (100, 100), verify=(122, 150), decoded=(105, 120), prefilled=(151, 160), is_drafted=True)
    assert timing.draft_ns == 24
    assert timing.bubbles_ns == {VERIFY_TO_DRAFT: 5, DRAFT_TO_VERIFY: 2}


def test_work_that_overlaps_is_no_bubble() -> None:
    timing = time_step(PREFILL, (100, 140), verify=(110, 150), decoded=None, prefilled=(141, 190))
    assert timing.bubbles_ns == {VERIFY_TO_VERIFY: 0}


def test_prompts_that_verify_takes_in_while_draft_works_are_no_bubble() -> None:
    """`before`: verify was done at 125, with the chunks of the step before. Draft had drafted by then."""
    timing = time_step(MIXED, (125, 125), verify=(128, 150), decoded=(102, 120), is_drafted=True)
    assert timing.bubbles_ns == {VERIFY_TO_DRAFT: 0, DRAFT_TO_VERIFY: 3}
    assert timing.wall_ns == 25
