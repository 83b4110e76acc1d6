"""A process of its own for work whose time and memory a client or a model decides, as that of a template.

Its bounds end the process, not the gateway.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = dict[str, Any]


class BoundedProcess:
    """A process that answers requests, one at a time; it is started again when it ended. For any thread."""

    def __init__(self, module: str, *arguments: str) -> None:
        """`module` calls `answer_all` when it is run with these arguments."""
        self._command = (sys.executable, "-P", "-m", module, *arguments)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> Answer | None:
        """Returns the answer; None if a bound ended the process in its place, {} if it ended a fork of it."""
        sent = json.dumps(request).encode() + b"\n"
        with self._lock:
            answer = self._exchange(sent)
            if answer is None:
                self._end()
        return answer

    def end(self) -> None:
        """Ends the process; the next request starts another."""
        with self._lock:
            self._end()

    def _exchange(self, sent: bytes) -> Answer | None:
        process = self._process
        if process is None or process.poll() is not None:
            self._end()
            process = self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            process.stdin.write(sent)
            process.stdin.flush()
            found: Answer = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            return None
        return found

    def _end(self) -> None:
        if self._process is not None:
            with self._process as ended:
                ended.kill()
            self._process = None


def bound_memory(max_bytes: int, max_stack_bytes: int | None = None) -> None:
    """Bounds the address space of this process, and the stack of its first thread, in bytes."""
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    if max_stack_bytes is not None:
        resource.setrlimit(resource.RLIMIT_STACK, (max_stack_bytes, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def answer_all(answer: Callable[[dict[str, Any]], Answer], *, seconds: float) -> None:
    """Answers what arrives at standard input, a line each, until it ends. The process ends after `seconds` for one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        _answer(answer, line, signal.ITIMER_REAL, seconds)


def answer_all_in_forks(answer: Callable[[dict[str, Any]], Answer], *, processor_seconds: float) -> None:
    """Answers each in a process of its own, which begins as this one is; one that a bound ends is answered with {}."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        child = os.fork()
        if not child:
            _answer(answer, line, signal.ITIMER_PROF, processor_seconds)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            _write({})


def _answer(answer: Callable[[dict[str, Any]], Answer], line: bytes, timer: int, seconds: float) -> None:
    signal.setitimer(timer, seconds)
    found = answer(json.loads(line))
    signal.setitimer(timer, 0)
    _write(found)


def _write(found: Answer) -> None:
    sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
    sys.stdout.buffer.flush()
