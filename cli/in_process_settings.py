"""The settings of one process in place of three, as they go over its command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.worker.config import WorkerConfig

_PATHS = ("model", "target", "access_log_dir")


@dataclass(frozen=True, kw_only=True)
class InProcessSettings:
    """The settings of what would be three services."""

    verify: WorkerConfig
    draft: WorkerConfig | None
    scheduler: SchedulerConfig

    def as_json(self) -> str:
        """For the command line."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None}, default=str)

    @classmethod
    def from_json(cls, text: str) -> InProcessSettings:
        """The other way. Raises ConfigError for a setting that is wrong."""
        values: dict[str, Any] = json.loads(text)
        return cls(
            verify=_worker(values["verify"]),
            draft=_worker(values["draft"]) if "draft" in values else None,
            scheduler=SchedulerConfig(**_with_paths(values["scheduler"])),
        )


def _worker(values: dict[str, Any]) -> WorkerConfig:
    return WorkerConfig(**_with_paths(values))


def _with_paths(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no paths, only text."""
    return {name: Path(value) if name in _PATHS and value is not None else value for name, value in values.items()}
