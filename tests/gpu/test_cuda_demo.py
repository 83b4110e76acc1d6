"""The demo on a GPU, as a user runs it."""

from __future__ import annotations

import shutil

import pytest

from slipstream.cli.mps import CONTROL
from tests.harness.running import slipstream


@pytest.mark.timeout(180)
def test_the_demo_serves_the_same_tokens_with_a_draft_and_without() -> None:
    """Under MPS where the driver brings that."""
    found = slipstream("demo", "--device", "cuda", timeout_s=170)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "Token ids with and without drafting: the same, all 768 tokens of 4 prompts." in found.stdout
    assert "no drafting (timeline fences" in found.stdout or "no drafting (event fences" in found.stdout
    if shutil.which(CONTROL) is not None and "without MPS" not in found.stderr:
        assert "fences, MPS)" in found.stdout
