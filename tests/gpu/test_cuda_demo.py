"""The demo on a GPU, as a user runs it."""

from __future__ import annotations

import shutil

import pytest

from slipstream.cli.demo import MAX_NEW_TOKENS
from slipstream.cli.mps import CONTROL
from tests.harness.running import slipstream


@pytest.mark.timeout(180)
def test_the_demo_serves_the_same_tokens_with_a_draft_and_without() -> None:
    """Under MPS where the driver brings that."""
    found = slipstream("demo", "--device", "cuda", timeout_s=170)
    assert found.returncode == 0, found.stdout + found.stderr
    compared = f"the same, all {4 * MAX_NEW_TOKENS} tokens of 4 prompts."
    assert f"Token ids with and without drafting: {compared}" in found.stdout
    assert "no drafting (timeline fences" in found.stdout or "no drafting (event fences" in found.stdout
    if shutil.which(CONTROL) is not None and "without MPS" not in found.stderr:
        assert "fences, MPS)" in found.stdout
