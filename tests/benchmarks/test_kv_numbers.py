"""What rounded keys and values cost: FP8 numbers are coarser than bfloat16's, and both are near."""

from __future__ import annotations

from slipstream.benchmarks.kv_numbers import BFLOAT16, FP8, Plan, compare


def test_errors_are_of_the_size_of_the_rounding() -> None:
    rows = {row["kind"]: row for row in compare(Plan(prompts=1, max_new_tokens=6))}
    assert 0 < rows[BFLOAT16]["mean_logit_error"] < rows[FP8]["mean_logit_error"] / 4
    assert rows[FP8]["mean_logit_error"] < 0.5
    assert rows[BFLOAT16]["share_of_equal_tokens"] == 1.0
    assert rows[FP8]["kv_bytes_per_token"] < 0.55 * rows[BFLOAT16]["kv_bytes_per_token"]
