"""`slipstream check-drafter` finds nothing in our own drafters, and names each planted fault of others."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.cli.check_drafter import run_check_drafter
from slipstream.cli.scripted_verify import ScriptedVerify
from slipstream.common.errors import UnavailableError
from tests.harness.checkpoints import VOCAB_SIZE, write_json, write_tokenizer
from tests.harness.example_drafters import OWN_DRAFTERS, serving
from tests.harness.running import slipstream

HARNESS = Path(__file__).parent.parent / "harness"
NAMED = {
    "signals-first": ("Drafts tokens", r"draft_tokens of slot \d in step \d+ are not written when it is signalled"),
    "beyond-vocabulary": ("Drafts tokens", r"are no tokens: \["),
    "scribbles": (
        "Drafts tokens",
        r"its own memory is changed.*draft_tokens",
    ),
    "does-not-wait": ("Takes commands ahead", r"is signalled before the stash that it waits for"),
    "reads-early": (
        "Guesses alike",
        r"a stash that is there before the command",
    ),
    "keeps-history": ("Forgets a slot's last sequence", r"differ between a sequence in a new slot"),
    "skips-steps": ("Takes in the stash in a step that asks for no guess", r"greedy guesses differ between"),
    "never-leaves": ("Ends with the stream", r"has_scheduler is true after the end of Execute"),
    "takes-anything": ("Refuses an attachment that does not fit", r"Attach with an epoch that is over is taken"),
}
"""By fault: the check that it breaks, and what that says of it."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The drafters with faults, and one without: the directory of their sockets."""
    folder = tmp_path_factory.mktemp("drafters")
    write_tokenizer(folder)
    write_json(folder / "config.json", {"vocab_size": VOCAB_SIZE})
    program = (sys.executable, str(HARNESS / "faulty_drafters.py"))
    command = (*program, "--tokenizer", str(folder), "--listen", f"unix:{folder}")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield folder
        process.kill()


def test_nothing_is_broken_by_the_numpy_drafter(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check_drafter(f"unix:{faulty}/none.sock", "cpu", timeout_s=20.0) == 0
    assert run_check_drafter(f"unix:{faulty}/none.sock", "cpu", timeout_s=20.0) == 0
    assert "✗" not in capsys.readouterr().out


def test_memory_is_compared_when_all_parts_that_may_run_are_over(faulty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step's prefill part writes meanwhile would be taken for a fault of its decode part."""
    check_memory, pending = ScriptedVerify.check_memory, []

    def check(verify: ScriptedVerify, when: str) -> None:
        if when.startswith("in step"):
            may_run = [point for point, stash in verify._waits.items() if stash <= verify._released]
            pending.append([point for point in may_run if verify._fences[point.fence].poll() < point.value])
        check_memory(verify, when)

    monkeypatch.setattr(ScriptedVerify, "check_memory", check)
    assert run_check_drafter(f"unix:{faulty}/pauses.sock", "cpu", timeout_s=20.0) == 0
    assert len(pending) > 10
    assert not any(pending)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", NAMED)
def test_a_planted_fault_is_named(faulty: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check_drafter(f"unix:{faulty}/{fault}.sock", "auto", timeout_s=5.0) == 1
    check, text = NAMED[fault]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"✗ {check}")]
    assert len(lines) == 1
    assert re.search(text, lines[0])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", OWN_DRAFTERS)
def test_nothing_is_broken_by_our_own_drafters(tmp_path: Path, algorithm: str) -> None:
    with serving(tmp_path, *OWN_DRAFTERS[algorithm], "--device", "cpu") as address:
        found = slipstream("check-drafter", "--address", address, "--timeout-s", "30", timeout_s=100)
    print(found.stdout)
    assert found.returncode == 0, found.stderr
    assert "0 broken" in found.stdout


def test_nobody_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=f"^no drafter answers at unix:{tmp_path}/none.sock: "):
        run_check_drafter(f"unix:{tmp_path}/none.sock", "auto", timeout_s=1.0)
