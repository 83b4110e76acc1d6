"""The settings of a grammar worker."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.common.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class GrammarConfig(Settings, heading="Masks"):
    """Checked when it is built; the command line takes its options from here."""

    mask_threads: int | None = setting(
        None, help="Threads that fill masks.", unit="N", low=1, high=1024, unset="four of five cores, at most 32"
    )
