"""Signals to a real process."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from slipstream.common.rpc.shutdown import ShutdownSignals, on_failure
from tests.harness.waiting import until

ROOT = Path(__file__).parents[3]
FAILING = textwrap.dedent(
    """
    import asyncio, sys, threading
    from slipstream.common.rpc.address import parse_address
    from slipstream.common.rpc.logs import configure_logging
    from slipstream.common.rpc.shutdown import ShutdownSignals, raise_failure

    async def fail():
        raise MemoryError("lost")

    async def main():
        with ShutdownSignals() as signals:
            match sys.argv[1]:
                case "callback":
                    asyncio.get_running_loop().call_soon(parse_address, "nowhere")
                case "thread":
                    threading.Thread(target=parse_address, args=("nowhere",)).start()
                case "task":
                    task = asyncio.create_task(fail())
                    task.add_done_callback(raise_failure)
                case "callback of another library":
                    asyncio.get_running_loop().call_soon(int, "nowhere")
                    asyncio.get_running_loop().call_later(0.1, signals.request)
            await signals.wait()

    configure_logging("test")
    asyncio.run(main())
    """
)

SERVICE = textwrap.dedent(
    """
    import asyncio, logging, sys
    from slipstream.common.rpc.logs import configure_logging
    from slipstream.common.rpc.shutdown import ShutdownSignals

    async def main():
        with ShutdownSignals() as signals:
            print("ready", flush=True)
            await signals.wait()
            print("draining", flush=True)
            if sys.argv[1] == "stuck":
                while True:
                    pass
            if sys.argv[1] == "endless":
                await asyncio.Event().wait()

    configure_logging("test")
    asyncio.run(main())
    """
)


def start(ending: str) -> subprocess.Popen[str]:
    """A service whose draining is `ending`, ready for signals."""
    command = [sys.executable, "-c", SERVICE, ending]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert read_line(process) == "ready"
    return process


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line that the process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(number: signal.Signals) -> None:
    with start("quick") as process:
        process.send_signal(number)
        output, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert output == "draining\n"
    assert f"{number.name}: finishing up" in log


@pytest.mark.parametrize("ending", ["endless", "stuck"])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_at_once(ending: str, second: signal.Signals) -> None:
    with start(ending) as process:
        process.send_signal(signal.SIGTERM)
        assert read_line(process) == "draining"
        process.send_signal(second)
        assert process.wait(timeout=30) == 128 + second


@pytest.mark.parametrize(
    ("place", "error", "status"),
    [
        ("callback", "ConfigError", 1),
        ("thread", "ConfigError", 1),
        ("task", "MemoryError: lost", 1),
        ("callback of another library", "ValueError", 0),
    ],
)
def test_a_failure_without_a_caller_ends_the_process(place: str, error: str, status: int) -> None:
    found = subprocess.run(
        (sys.executable, "-c", FAILING, place), capture_output=True, text=True, timeout=30, check=False
    )
    assert found.returncode == status
    assert error in found.stderr
    assert ("this process has failed" in found.stderr) == bool(status)


async def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    hook = threading.excepthook
    with ShutdownSignals() as signals:
        waiting = asyncio.ensure_future(signals.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await waiting
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert threading.excepthook is hook
    assert asyncio.get_running_loop().get_exception_handler() is None


async def test_the_end_can_be_asked_for_without_a_signal() -> None:
    with ShutdownSignals() as signals:
        waiting = asyncio.ensure_future(signals.wait())
        signals.request()
        await waiting


def test_the_product_drops_no_task_whose_failure_would_be_nothing() -> None:
    folders = ("cli", "client", "common", "door", "gateway", "scheduler", "services")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    makes_task = re.compile(r"\b(create_task|ensure_future)$")
    num_tasks, dropped = 0, []
    for file, text in ((file, file.read_text(encoding="utf-8")) for file in files):
        if "create_task(" not in text and "ensure_future(" not in text:
            continue
        tree = ast.parse(text)
        is_task = {
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and makes_task.search(ast.unparse(node.func))
        }
        num_tasks += len(is_task)
        dropped += [
            f"{file}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr | ast.Attribute) and node.value in is_task
        ]
    assert num_tasks > 15
    assert dropped == []


async def test_what_grpcs_poller_fails_to_read_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """Other failures without a caller are."""

    def fail(error: Exception) -> None:
        raise error

    loop, closed = asyncio.get_running_loop(), asyncio.new_event_loop()
    closed.close()
    on_failure(loop, lambda: None)
    loop.call_soon(closed.call_soon_threadsafe, fail)
    for error in (BlockingIOError("nothing to read"), OSError("a failure")):
        loop.call_soon(fail, error)
    await until(lambda: "a failure" in caplog.text)
    assert "nothing to read" not in caplog.text
    assert "closed" not in caplog.text
