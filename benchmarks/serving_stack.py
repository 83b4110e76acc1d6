"""Models served by the real console scripts, for scripts that measure or check."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.benchmarks.stack import Stack
from slipstream.bundled import eagle3_dir, standalone_dir, target_dir

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

NONE, STANDALONE, EAGLE3 = "none", "standalone", "eagle3"
NGRAM = "ngram"
"""The NumPy drafter of the examples, which has no model."""
ALGORITHMS = (NONE, STANDALONE, EAGLE3)

_NUMPY_DRAFTER = Path(__file__).resolve().parent.parent / "examples" / "numpy_drafter" / "main.py"


def _bundled_drafts() -> Mapping[str, Path]:
    return {STANDALONE: standalone_dir(), EAGLE3: eagle3_dir()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What is served: the bundled models, unless others are named."""

    target: Path = field(default_factory=target_dir)
    drafts: Mapping[str, Path] = field(default_factory=_bundled_drafts)
    """By algorithm."""
    device: str = "cpu"

    @classmethod
    def choose(cls, *, target: Path | None, drafts: Mapping[str, Path | None], device: str) -> Models:
        """The models that are given, None for those that are not; without a target, the bundled ones besides."""
        given = {algorithm: path for algorithm, path in drafts.items() if path is not None}
        if target is None:
            return cls(drafts={**_bundled_drafts(), **given}, device=device)
        return cls(target=target, drafts=given, device=device)

    def with_draft(self, algorithm: str) -> Models:
        """The same target with the draft of this algorithm alone; with none for "none"."""
        drafts = {name: path for name, path in self.drafts.items() if name == algorithm}
        return Models(target=self.target, drafts=drafts, device=self.device)


class ServingStack:
    """Verify and drafts of a model, which stay, and schedulers that come and go."""

    def __init__(self, stack: Stack) -> None:
        """Use `start`."""
        self._stack = stack

    @classmethod
    @asynccontextmanager
    async def start(cls, log_dir: Path, models: Models | None = None) -> AsyncIterator[ServingStack]:
        """Loads all models."""
        models = models or Models()
        async with Stack(log_dir) as stack:
            device = ("--device", models.device)
            starts = [stack.worker("verify", "--model", str(models.target), *device)]
            for algorithm, path in models.drafts.items():
                head = ("--model", str(path), "--target", str(models.target), "--algorithm", algorithm)
                starts.append(stack.worker("draft", *head, *device, name=algorithm))
            await asyncio.gather(*starts)
            yield cls(stack)

    async def start_ngram(self, target: Path) -> None:
        """Starts the NumPy drafter for this target beside the others."""
        options = ("--tokenizer", str(target), "--listen", self._stack.socket(NGRAM))
        await self._stack.process(NGRAM, sys.executable, str(_NUMPY_DRAFTER), *options)

    @asynccontextmanager
    async def scheduler(
        self, algorithm: str, *, run_ahead: int = 1, metrics_port: int = 0, arguments: tuple[str, ...] = ()
    ) -> AsyncIterator[str]:
        """A scheduler with drafts by one of the algorithms that were started, or "none"; yields its address."""
        draft = () if algorithm == NONE else ("--draft", self._stack.socket(algorithm))
        (port,) = free_ports(1)
        async with self._stack.scheduler(
            *("--verify", self._stack.socket("verify")),
            *draft,
            *("--run-ahead", str(run_ahead)),
            *arguments,
            port=port,
            metrics_port=metrics_port,
        ) as address:
            yield address


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports
