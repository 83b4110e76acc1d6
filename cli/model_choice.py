"""Which models `slipstream up` serves, decided from what was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream import bundled
from slipstream.common.errors import ConfigError
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.worker.config import ALGORITHMS as WORKER_ALGORITHMS
from slipstream.services.worker.config import EAGLE3, STANDALONE

if TYPE_CHECKING:
    from pathlib import Path

ALGORITHMS = (*WORKER_ALGORITHMS, "none")

_NOTHING_DRAFTS = "only with a draft, and algorithm none has none"


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A target and what drafts for it."""

    target: Path
    """Directory of the target model."""
    draft: Path | None
    """Directory of the draft model; None when nothing drafts."""
    draft_algorithm: str = STANDALONE
    """How the draft model drafts; unused when nothing drafts."""
    num_draft_tokens: int = SchedulerConfig.num_draft_tokens
    """Tokens drafted in a step; unused when nothing drafts."""

    @property
    def algorithm(self) -> str:
        """How drafts are made."""
        return "none" if self.draft is None else self.draft_algorithm

    @classmethod
    def choose(
        cls, *, target: Path | None, draft: Path | None, algorithm: str | None, num_draft_tokens: int | None
    ) -> ModelChoice:
        """Decides from options, None for those not given: without any, the bundled pair; a target alone has no draft.

        Raises ConfigError naming the one that contradicts another or has no model in it.
        """
        if algorithm is None:
            algorithm = "none" if target is not None and draft is None else STANDALONE
        if algorithm not in ALGORITHMS:
            raise ConfigError("algorithm", algorithm, " or ".join(ALGORITHMS))
        if algorithm == "none":
            if draft is not None:
                raise ConfigError("draft", str(draft), _NOTHING_DRAFTS)
            if num_draft_tokens is not None:
                raise ConfigError("num_draft_tokens", num_draft_tokens, _NOTHING_DRAFTS)
        elif draft is None:
            if target is not None:
                raise ConfigError("draft", None, f"a draft model for {target}; or give --algorithm none")
            draft = bundled.eagle3_dir() if algorithm == EAGLE3 else bundled.standalone_dir()
        if num_draft_tokens is None:
            num_draft_tokens = cls.num_draft_tokens
        target = target or bundled.target_dir()
        _check_model("target", target)
        if draft is not None:
            _check_model("draft", draft)
        if draft is None:
            return cls(target=target, draft=None, num_draft_tokens=num_draft_tokens)
        return cls(target=target, draft=draft, draft_algorithm=algorithm, num_draft_tokens=num_draft_tokens)


def _check_model(option: str, path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ConfigError(option, str(path), "a directory with a model: config.json, safetensors, tokenizer.json")
