"""The settings of a grammar worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - `with_options` reads the annotations

from slipstream.common.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class GrammarConfig(Settings, heading="Masks"):
    """Checked when it is built; the command line takes its options from here."""

    mask_threads: int | None = setting(
        None, help="Threads that fill masks.", unit="N", low=1, high=1024, unset="a quarter of the cores, at most 4"
    )
    access_log_dir: Path | None = setting(
        None, help="Debugging: log accesses to shared memory there, for the happens-before checker.", unit="DIR"
    )
