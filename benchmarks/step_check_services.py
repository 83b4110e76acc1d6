"""The services that `step_check.py` measures: real processes, with delays and marks at the places that it needs."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.benchmarks.decode import ACCEPT_LENGTH, NUM_DRAFT_TOKENS, Setup
from slipstream.benchmarks.mps_stack import mps_stack
from slipstream.benchmarks.serving_stack import free_ports
from slipstream.benchmarks.step_check_marks import read_marks
from slipstream.bundled import standalone_dir, target_dir
from slipstream.cli.up.mps import MpsMode
from slipstream.client import AsyncClient
from slipstream.services.worker.config import EAGLE3

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from slipstream.benchmarks.delayed_plan import DelayPlan
    from slipstream.benchmarks.stack import Stack
    from slipstream.benchmarks.step_check_marks import Mark

NUM_CLIENTS = 4
PROMPT = "def main():\n"
DUMMY_CONTEXT = 1 << 18
CONTEXT_TOKENS = 12_288
"""Of a real model: no request may end while steps are counted."""
BUNDLED_ACCEPT_LENGTH = 1.0
"""One token a step: the context stays as short as can be."""
KV_MEMORY_MIB = {"cpu": 2048, "cuda": 18 * 1024}
STRETCHED_DIR = Path("build/stretched")
LOG_DIR = Path("build/benchmarks")
SESSION_TIMEOUT_S = 120.0
LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Which models, and how they are served."""

    name: str
    device: str
    draft: dict[str, object]
    """Options of the services beside those that all have."""
    verify: dict[str, object]
    scheduler: dict[str, object]
    max_new_tokens: int

    @classmethod
    def dummies(cls, device: str, draft_ms: float, verify_ms: float) -> Served:
        """Kernels of a known length."""
        return cls(
            name=f"dummy kernels {draft_ms:g} + {verify_ms:g} ms",
            device=device,
            draft={"model": standalone_dir(), "length_ms": draft_ms},
            verify={"model": target_dir(), "length_ms": verify_ms},
            scheduler={"context_tokens": DUMMY_CONTEXT},
            max_new_tokens=DUMMY_CONTEXT // 2,
        )

    @classmethod
    def models(cls, device: str, name: str) -> Served:
        """A target and its EAGLE-3 head: a shape with random weights, or "bundled"."""
        setup = Setup.named(name)
        is_bundled = setup.load_format != "dummy"
        target, draft = (_stretched(path) if is_bundled else path for path in (setup.target, setup.draft))
        shared = {"load_format": setup.load_format}
        accept_length = BUNDLED_ACCEPT_LENGTH if is_bundled else ACCEPT_LENGTH
        return cls(
            name=f"{name}, EAGLE-3 head",
            device=device,
            draft={"model": draft, "target": target, "algorithm": EAGLE3, **shared},
            verify={"model": target, "simulate_accept_length": accept_length, **shared},
            scheduler={"context_tokens": CONTEXT_TOKENS, "kv_memory_mib": KV_MEMORY_MIB[device]},
            max_new_tokens=CONTEXT_TOKENS - 256,
        )


@asynccontextmanager
async def step_check_stack(device: str) -> AsyncIterator[Stack]:
    """Where the services of all parts live; under MPS where it can be had."""
    async with mps_stack(MpsMode.AUTO if device == "cuda" else MpsMode.OFF, LOG_DIR) as stack:
        yield stack


class StepCheckServices:
    """Workers that stay, and a scheduler for each plan."""

    def __init__(self, stack: Stack, served: Served, folder: Path) -> None:
        """`folder`: of its own, made if need be."""
        folder.mkdir(exist_ok=True)
        self._stack = stack
        self._served = served
        self._plan_file = folder / "plan.json"
        self._marks_file = folder / "marks.jsonl"

    async def start(self) -> None:
        """Starts the workers."""
        await asyncio.gather(self._worker("draft", self._served.draft), self._worker("verify", self._served.verify))

    async def _worker(self, role: str, options: dict[str, object]) -> None:
        module = (
            ("slipstream.benchmarks.dummy_worker", role)
            if "length_ms" in options
            else (f"slipstream.services.{role}.main",)
        )
        program = _module("delayed_worker", self._plan_file, *module)
        address = {"listen": self._socket(role), "device": self._served.device}
        await self._stack.process(self._name(role), *program, *_options(address | options))

    def _name(self, role: str) -> str:
        return f"{role}-{self._plan_file.parent.name}"

    def _socket(self, role: str) -> str:
        return self._stack.socket(self._name(role))

    @asynccontextmanager
    async def scheduler(self, plan: DelayPlan, run_ahead: int) -> AsyncIterator[StepCheckScheduler]:
        """A scheduler for as long as the context."""
        plan.write(self._plan_file)
        port, metrics_port = free_ports(2)
        settings = {
            "verify": self._socket("verify"),
            "draft": self._socket("draft"),
            "device": self._served.device,
            "run_ahead": run_ahead,
            "num_draft_tokens": NUM_DRAFT_TOKENS,
            "slots": NUM_CLIENTS,
            # Commands are sent together, which events do not allow.
            "fence": "timeline" if self._served.device == "cuda" else "auto",
        }
        program = _module("delayed_scheduler", self._plan_file, self._marks_file)
        options = _options(settings | self._served.scheduler)
        scheduler = self._stack.scheduler(*options, port=port, metrics_port=metrics_port, program=program)
        async with scheduler as address, AsyncClient(address) as client:
            info = await client.server_info()
            yield StepCheckScheduler(client, self._marks_file, self._served, info.fence, info.under_mps)


class StepCheckScheduler:
    """A scheduler that marks its steps, with clients that come for a while."""

    def __init__(self, client: AsyncClient, marks_file: Path, served: Served, fence: str, has_mps: bool) -> None:
        self._client = client
        self._marks_file = marks_file
        self._served = served
        self.fence = fence
        self.has_mps = has_mps

    def marks(self) -> list[Mark]:
        """Those so far."""
        return read_marks(self._marks_file)

    async def stream_until(self, is_enough: Callable[[list[Mark]], bool], *, is_plain: bool) -> None:
        """Lets all clients stream until the marks are enough. Raises RuntimeError if they end before.

        `is_plain`: without drafts.
        """
        streams = [asyncio.create_task(self._stream(speculation=not is_plain)) for _ in range(NUM_CLIENTS)]
        try:
            async with asyncio.timeout(SESSION_TIMEOUT_S):
                while not is_enough(self.marks()):
                    ended, _ = await asyncio.wait(streams, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    for stream in ended:
                        stream.result()
                        raise RuntimeError("a request came to its end before enough steps were counted")
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    async def _stream(self, *, speculation: bool) -> None:
        limit = self._served.max_new_tokens
        async for _ in self._client.generate(PROMPT, max_new_tokens=limit, ignore_eos=True, speculation=speculation):
            pass


def _module(name: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-m", f"slipstream.benchmarks.{name}", *map(str, arguments))


def _options(settings: dict[str, object]) -> tuple[str, ...]:
    return tuple(word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value)))


def _stretched(model: Path) -> Path:
    """The same model for longer contexts than it was made for: its text is none there, but its steps are steps."""
    folder = STRETCHED_DIR / model.name
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        link = folder / path.name
        if path.is_file() and path.name != "config.json" and not link.exists():
            link.symlink_to(path.resolve())
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"max_position_embeddings": CONTEXT_TOKENS}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
