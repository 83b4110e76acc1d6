"""Which models `slipstream up` serves, decided from what was given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path  # noqa: TC003 - `with_options` reads the annotations

from slipstream import bundled
from slipstream.common.errors import ConfigError
from slipstream.common.settings import Settings, setting
from slipstream.scheduler.config import AUTO, DEFAULT_DRAFT_TOKENS, parse_draft_tokens
from slipstream.services.worker.config import ALGORITHMS as WORKER_ALGORITHMS
from slipstream.services.worker.config import EAGLE3, STANDALONE

ALGORITHMS = (*WORKER_ALGORITHMS, "none")


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A target and what drafts for it."""

    target: Path
    """Directory of the target model."""
    draft: Path | None
    """Directory of the draft model; None when nothing drafts."""
    draft_algorithm: str = STANDALONE
    """Draft algorithm of the draft model; unused when nothing drafts."""
    num_draft_tokens: int | None = None
    """Tokens drafted in each step; None is the scheduler's "auto". Unused when nothing drafts."""

    @property
    def algorithm(self) -> str:
        """The draft algorithm; "none" when nothing drafts."""
        return "none" if self.draft is None else self.draft_algorithm


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Settings):
    """The options that name models, None for those not given: without any, the bundled pair is served."""

    target: Path | None = setting(None, unit="DIR", help="Directory of the target model.", unset="the bundled one")
    draft: Path | None = setting(
        None, unit="DIR", help="Directory of the draft model.", unset="the bundled one for its target"
    )
    algorithm: str | None = setting(
        None, choices=ALGORITHMS, help="How drafts are made.", unset="none for a --target without --draft"
    )
    num_draft_tokens: int | None = setting(
        None,
        unit="K|auto",
        help="Tokens drafted in each step; auto drafts as long as that is faster than plain decoding.",
        parse=parse_draft_tokens,
        unset=f"{AUTO}, with {DEFAULT_DRAFT_TOKENS}",
    )

    def choose(self) -> ModelChoice:
        """Decides; a target alone has no draft. Raises ConfigError naming what contradicts another or has no model."""
        target, draft = self.target or bundled.target_dir(), self.draft
        algorithm = self.algorithm or ("none" if self.target is not None and draft is None else STANDALONE)
        if algorithm == "none":
            for name in ("draft", "num_draft_tokens"):
                if (given := getattr(self, name)) is not None:
                    raise ConfigError(name, str(given), "only with a draft, and algorithm none has none")
            _check_model("target", target)
            return ModelChoice(target=target, draft=None)
        if draft is None:
            if self.target is not None:
                raise ConfigError("draft", None, f"a draft model for {target}; or give --algorithm none")
            draft = bundled.eagle3_dir() if algorithm == EAGLE3 else bundled.standalone_dir()
        _check_model("target", target)
        _check_model("draft", draft)
        choice = ModelChoice(target=target, draft=draft, draft_algorithm=algorithm)
        return choice if self.num_draft_tokens is None else replace(choice, num_draft_tokens=self.num_draft_tokens)


def _check_model(option: str, path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ConfigError(option, str(path), "a directory with a model: config.json, safetensors, tokenizer.json")
