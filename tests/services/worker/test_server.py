"""A worker's process: how it ends when it is told to, and when its device is broken."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slipstream.common.errors import FailedPreconditionError, UnavailableError
from slipstream.common.wire.step import FenceOps, Role
from slipstream.scheduler.link import Link, LinkThread
from tests.harness.checkpoints import write_checkpoint
from tests.harness.leaks import check_it_holds_no_more_than, held_by
from tests.harness.waiting import TIMEOUT_S
from tests.harness.worker_processes import WorkerProcesses
from tests.harness.workers import SharedArenas, attachment_to, decode

STUCK_WORKER = Path(__file__).parents[2] / "harness" / "stuck_worker.py"


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcesses]:
    """Dummies for both roles, each for one test."""
    folder = tmp_path_factory.mktemp("workers")
    model = write_checkpoint(folder / "model")
    with WorkerProcesses(folder, dict.fromkeys(Role, model), dummy_ms=0) as made:
        made.start(Role.DRAFT, Role.VERIFY)
        yield made


@pytest.fixture
def thread() -> Iterator[LinkThread]:
    """The thread of links."""
    made = LinkThread()
    yield made
    made.close()


@pytest.fixture
def arena() -> Iterator[SharedArenas]:
    """Shared with the worker."""
    made = SharedArenas()
    yield made
    made.close()


def attached(address: str, role: Role, thread: LinkThread, arena: SharedArenas, epoch: int = 1) -> Link:
    """A link to the worker, when it is ready."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while True:
        link = Link(role, address, thread, on_failure=lambda: None)
        try:
            link.describe()
            link.attach(attachment_to(arena, epoch, role=role, is_debug=True))
        except (UnavailableError, FailedPreconditionError):  # not there yet, or with the scheduler before
            link.detach(drain=False)
            assert time.monotonic() < give_up_at, "the worker does not attach"
            time.sleep(0.05)
        else:
            return link


def test_it_ends_though_its_stream_waits_for_what_never_comes(
    processes: WorkerProcesses, thread: LinkThread, arena: SharedArenas
) -> None:
    link = attached(processes.address(Role.DRAFT), Role.DRAFT, thread, arena)
    for step in (1, 2, 3):
        link.send(decode(step, 1, waits=1000))
    processes.send_signal(Role.DRAFT, signal.SIGTERM)
    told_at = time.monotonic()
    assert processes.wait(Role.DRAFT) == 0
    assert time.monotonic() - told_at < 18.0, "the time for calls that run, and no more"
    assert link.failure is not None
    link.detach(drain=True)


def test_it_ends_and_says_so_when_its_stream_is_broken(
    processes: WorkerProcesses, thread: LinkThread, arena: SharedArenas
) -> None:
    link = attached(processes.address(Role.VERIFY), Role.VERIFY, thread, arena)
    # In debug mode a slot that was never filled is an error.
    link.send(replace(decode(1, 1, role=Role.VERIFY), num_draft_tokens=(), attachment=0, ops=FenceOps()))
    with pytest.raises(UnavailableError, match="the verify service is lost"):
        link.wait_for_acknowledgement(1, TIMEOUT_S)
    assert processes.wait(Role.VERIFY) == 1
    link.detach(drain=True)


def test_it_ends_at_once_when_its_stream_cannot_be_released(
    tmp_path: Path, thread: LinkThread, arena: SharedArenas
) -> None:
    address = f"unix:{tmp_path}/draft.sock"
    model = write_checkpoint(tmp_path / "model")
    options = ("draft", "--model", str(model), "--listen", address, "--length-ms", "0", "--log-level", "ERROR")
    process = subprocess.Popen([sys.executable, str(STUCK_WORKER), *options], stderr=subprocess.PIPE, text=True)
    try:
        link = attached(address, Role.DRAFT, thread, arena)
        link.send(replace(decode(1, 1, waits=1000), wants_acknowledgement=True))
        assert link.wait_for_acknowledgement(1, TIMEOUT_S)
        link.detach(drain=False)
        _, log = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    (line,) = log.splitlines()
    assert " ERROR " in line
    assert "the draft stream waits for what does not happen" in line
    assert "(of attachment 1: VERIFY_STASH 1000, which is 0)" in line
    assert line.endswith("must be started again step=1 epoch=1")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("role", [Role.DRAFT, Role.VERIFY])
def test_lost_epochs_leave_nothing_behind(role: Role, tmp_path: Path, thread: LinkThread) -> None:
    """A scheduler that goes away in the middle of a step, again and again."""
    with WorkerProcesses(tmp_path, {role: write_checkpoint(tmp_path / "model")}, dummy_ms=0) as processes:
        processes.start(role)
        worker, epoch = psutil.Process(processes.pid(role)), 0

        def lose_epochs(count: int) -> None:
            nonlocal epoch
            for _ in range(count):
                epoch, arenas = epoch + 1, SharedArenas()
                link = attached(processes.address(role), role, thread, arenas, epoch=epoch)
                if role is Role.DRAFT:
                    link.send(decode(1, 1, waits=1000, epoch=epoch))
                link.detach(drain=False)
                arenas.close()
            give_up_at = time.monotonic() + TIMEOUT_S
            while "/dev/shm/slipstream-" in Path(f"/proc/{worker.pid}/maps").read_text():
                assert time.monotonic() < give_up_at, "the memory of an epoch stays mapped"
                time.sleep(0.05)

        lose_epochs(5)
        before = held_by(worker)
        lose_epochs(12)
        check_it_holds_no_more_than(before, worker)


def test_model_that_cannot_be_served_is_one_line_and_status_2(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    model = write_checkpoint(tmp_path / "model", eos_token_id=-1)
    (model / "generation_config.json").unlink()
    options = ("--model", str(model), "--listen", f"unix:{tmp_path}/verify.sock", "--device", "cpu")
    command = (sys.executable, "-m", "slipstream.services.verify_main", *options)
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    accepted = "a token id below vocab_size = 272, or a list of them"
    expected = f"slipstream-verify: {model}: config.json: eos_token_id: got -1, supported: {accepted}\n"
    assert (found.returncode, found.stderr) == (2, expected)


@pytest.mark.slow
def test_error_of_the_operating_system_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    options = ("--model", str(tmp_path), "--listen", f"unix:{tmp_path}/verify.sock", "--device", "cpu")
    command = (sys.executable, "-m", "slipstream.services.verify_main", *options, "--access-log-dir", "/proc")
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.stderr.startswith("slipstream-verify: [Errno 2] No such file or directory: '/proc/verify-")
    assert (found.returncode, found.stderr.count("\n")) == (1, 1)
