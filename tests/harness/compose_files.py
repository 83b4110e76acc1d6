"""Compose files as docker-compose reads them: variables filled in, overrides merged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")

_REPLACED = ("command", "entrypoint", "test")
"""Sequences that an override replaces; all others it extends."""


def load(*names: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Files of `deploy/`, later ones laid over earlier ones."""
    merged: Any = {}
    for name in names:
        text = (DEPLOY / name).read_text(encoding="utf-8")
        filled = VARIABLE.sub(lambda match: (environment or {}).get(match[1]) or match[2], text)
        assert "${" not in filled, "every variable has a default"
        merged = _merge(merged, yaml.safe_load(filled))
    assert isinstance(merged, dict)
    return merged


def scraped() -> dict[str, dict[str, Any]]:
    """Returns what `prometheus.yml` says of the targets of each job, without a job whose targets users write."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = [job for job in config["scrape_configs"] if "static_configs" in job]
    return {job["job_name"]: static for job in jobs for static in job["static_configs"]}


def _merge(below: Any, above: Any, key: str = "") -> Any:
    if isinstance(above, dict):
        base = below if isinstance(below, dict) else {}
        return base | {name: _merge(base.get(name), value, name) for name, value in above.items()}
    if isinstance(above, list) and isinstance(below, list) and key not in _REPLACED:
        return [*below, *(item for item in above if item not in below)]
    return above
