"""What one check found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.Enum):
    """How it is."""

    OK = "ok"
    NOTE = "note"
    """It works, but one should know."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    verdict: Verdict
    detail: str
    """What is there."""
    remedy: str = ""
    """What to do, unless all is well."""


def ok(name: str, detail: str) -> Finding:
    """All is well."""
    return Finding(name, Verdict.OK, detail)


def note(name: str, detail: str, remedy: str = "") -> Finding:
    """It works all the same."""
    return Finding(name, Verdict.NOTE, detail, remedy)


def failed(name: str, detail: str, remedy: str) -> Finding:
    """It will not work."""
    return Finding(name, Verdict.FAILED, detail, remedy)
