"""Faults in the processes that a test starts; see `slipstream.common.fail_points`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from slipstream.common.fail_points import RECORD_VARIABLE, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class PlantedFaults:
    """Points at which processes with this environment fail, each of them once."""

    def __init__(self, record: Path, *points: str) -> None:
        """`points`: as "gateway.before_commit:kill@2". `record`: an empty directory, made here."""
        record.mkdir()
        self._record = record
        self._points = points

    @property
    def variables(self) -> Mapping[str, str]:
        """What they add to a process's environment."""
        return {VARIABLE: ",".join(self._points), RECORD_VARIABLE: str(self._record)}

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of this process, with the faults."""
        return {**os.environ, **self.variables}

    @property
    def have_failed(self) -> bool:
        """True once every point has failed."""
        return all((self._record / point.partition(":")[0]).exists() for point in self._points)
