"""Real engines on real streams, driven by the real loop, in any way that jobs can be served."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream.common.worker.access_log import JsonLinesAccessLog, StreamName
from slipstream.common.worker.step import FenceName, FenceOps
from slipstream.scheduler.config import SchedulerConfig
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import LocalWorker

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.common.worker.step import StepCommand
    from slipstream.scheduler.core.sequence import Sequence
    from slipstream.services.worker.engine import RoleEngine


@dataclass(frozen=True)
class Models:
    """Both sides of a step, loaded once."""

    verify: RoleEngine
    draft: RoleEngine
    twin: RoleEngine
    """A draft that is the target itself."""
    path: Path | None = None
    """Where the target was written."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How jobs are served."""

    num_draft_tokens: int = 0
    """0 is without a draft."""
    run_ahead: int = 1
    slots: int = 4
    chunk_tokens: int = 8
    page_tokens: int = 4
    debug: bool = True

    def config(self, log_dir: Path | None) -> SchedulerConfig:
        """The scheduler's settings."""
        return SchedulerConfig(
            verify="unix:/none",
            num_draft_tokens=max(1, self.num_draft_tokens),
            run_ahead=self.run_ahead,
            slots=self.slots,
            context_tokens=96,
            chunk_tokens=self.chunk_tokens,
            page_tokens=self.page_tokens,
            debug=self.debug,
            access_log_dir=log_dir,
        )


class Served:
    """Workers and an epoch."""

    def __init__(
        self, models: Models, way: Way, *, log_dir: Path | None = None, strip: FenceName | None = None
    ) -> None:
        self._strip = strip
        self._logs: list[JsonLinesAccessLog] = []
        roles = [models.verify, models.draft][: 2 if way.num_draft_tokens else 1]
        self.workers = [LocalWorker(role, self._log(role, log_dir), before_send=self._stripped) for role in roles]
        self.epoch = LocalEpoch(1, way.config(log_dir), self.workers)

    def run(self, *waves: list[Sequence]) -> list[list[int]]:
        """The tokens of each job."""
        outputs = self.epoch.run(*waves)
        self.close()
        assert not [error for worker in self.workers for error in worker.failures]
        return [outputs[job] for wave in waves for job in wave]

    def close(self) -> None:
        """The workers end."""
        for worker in self.workers:
            worker.close()
        for log in self._logs:
            log.close()

    def _log(self, role: RoleEngine, log_dir: Path | None) -> JsonLinesAccessLog | None:
        if log_dir is None:
            return None
        name = role.describe().role.value
        self._logs.append(JsonLinesAccessLog(log_dir / f"{name}.jsonl", StreamName(name)))
        return self._logs[-1]

    def _stripped(self, command: StepCommand) -> StepCommand:
        """The command without the waits that are to be left out."""
        waits = tuple(point for point in command.ops.waits if point.fence is not self._strip)
        return replace(command, ops=FenceOps(waits, command.ops.signals))
