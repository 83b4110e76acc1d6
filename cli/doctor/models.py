"""Checks of model directories: readable, supported, and fit for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.cli.doctor.finding import failed, ok
from slipstream.common.errors import SlipstreamError
from slipstream.services.worker.config import EAGLE3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from slipstream.cli.doctor.finding import Finding
    from slipstream.cli.model_choice import ModelChoice


def check_models(models: ModelChoice) -> Iterator[Finding]:
    """The target's directory, and the draft's if there is one."""
    from slipstream.services.models.checkpoint import tokenizer_fingerprint
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.eagle3 import Eagle3Config

    def of_target() -> str:
        tokenizer_fingerprint(models.target)
        return ModelConfig.from_directory(models.target).architecture

    def of_draft(path: Path) -> str:
        if models.draft_algorithm == EAGLE3:
            Eagle3Config.from_directory(path)
            return "an EAGLE-3 head"
        if tokenizer_fingerprint(path) != tokenizer_fingerprint(models.target):
            raise SlipstreamError("its tokenizer is not the target's")
        return f"{ModelConfig.from_directory(path).architecture}, with the target's tokenizer"

    yield _check("target model", models.target, of_target)
    draft = models.draft
    if draft is not None:
        yield _check("draft model", draft, lambda: of_draft(draft))


def _check(name: str, path: Path, describe: Callable[[], str]) -> Finding:
    try:
        description = describe()
    except (SlipstreamError, OSError) as error:
        return failed(name, f"{path}: {error}", "another directory, or the whole checkpoint")
    if not any(path.glob("*.safetensors")):
        return failed(name, f"{path}: no safetensors in it", "the whole checkpoint, with its *.safetensors")
    return ok(name, f"{path}: {description}")
