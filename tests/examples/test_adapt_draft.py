"""examples/adapt_draft.py, with a handful of prompts and steps: the new draft is trained, served, and drafts."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.benchmarks.stack import up_server
from slipstream.training import checkpoint
from slipstream.training.optimizer import Course

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "adapt_draft.py"
RATE = 1e-3
NUM_STEPS = 4


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("adapt_draft", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_brings_the_draft_closer_to_the_target(script: Any) -> None:
    student = checkpoint.load_for_training(script.standalone_dir())
    tokens = [(31 * place) % 97 + 300 for place in range(8 * script.LENGTH)]
    overlaps = script.train(student, tokens, Course(steps=NUM_STEPS, minutes=10.0), RATE)
    assert len(overlaps) == NUM_STEPS
    assert overlaps[-1] > overlaps[0]


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_draft_that_was_trained_on_traffic_is_swapped_in(script: Any, tmp_path: Path) -> None:
    out = tmp_path / "adapted"
    async with up_server("--device", "cpu") as server:
        status = await script.adapt(server.address, out, server.state_dir, 6, Course(steps=2, minutes=1.0), RATE)
        assert status == 0
        await server.restored("standalone")
        command = await asyncio.to_thread(server.services()["draft"].cmdline)
    assert str(out) in command
