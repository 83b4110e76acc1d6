"""Looks the pinned packages up in PyPI's advisories with pip-audit; ends with 1 if one of them has a known flaw.

Prints why, and ends with 0, where that is not possible: without a network, or behind an index without advisories.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PINNED = Path(__file__).parent.parent / "constraints.txt"
PROBE = "certifi"
"""A package that is asked for alone first, so that an index that cannot answer gets one question and not a hundred."""
TIMEOUT_S = 120.0


def main() -> int:
    """Prints what was found."""
    pins = [line for line in PINNED.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    probe = [pin for pin in pins if pin.startswith(f"{PROBE}==")]
    try:
        unknown = [package["skip_reason"] for package in _audit(probe) if "skip_reason" in package]
        if unknown:
            print(f"audit: skipped, the index has no advisories: {unknown[0]}")
            return 0
        packages = _audit(pins)
    except LookupError as error:
        print(f"audit: skipped, {error}")
        return 0
    flawed = [package for package in packages if package.get("vulns")]
    for package in flawed:
        for flaw in package["vulns"]:
            fixed_in = ", ".join(flaw["fix_versions"]) or "no version"
            print(f"audit: {package['name']} {package['version']}: {flaw['id']}, fixed in {fixed_in}")
    num_skipped = sum("skip_reason" in package for package in packages)
    print(f"audit: {len(packages) - num_skipped} packages looked up, {num_skipped} unknown, {len(flawed)} with flaws")
    return 1 if flawed else 0


def _audit(pins: list[str]) -> list[dict[str, Any]]:
    """Returns pip-audit's answer for each package. Raises LookupError if it has none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write("\n".join(pins))
        requirements.flush()
        options = ("--no-deps", "--disable-pip", "--progress-spinner=off", "--format=json", "--timeout=10")
        command = [sys.executable, "-m", "pip_audit", *options, "--requirement", requirements.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise LookupError(f"pip-audit had no answer after {TIMEOUT_S:g} s") from None
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise LookupError(f"pip-audit ended with {done.returncode}: {last}") from None
    return packages


if __name__ == "__main__":
    sys.exit(main())
