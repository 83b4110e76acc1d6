"""The models that a benchmark serves, and options that several benchmarks have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.benchmarks.model_shapes import write_shape
from slipstream.bundled import eagle3_dir, eagle_dir, mtp_dir, standalone_dir, target_dir

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NONE, STANDALONE, EAGLE3, EAGLE, MTP, NGRAM = "none", "standalone", "eagle3", "eagle", "mtp", "ngram"
STANDALONE_AUTO, EAGLE3_AUTO = "standalone_auto", "eagle3_auto"
"""These drafts, which draft as long as that is faster than plain decoding."""
NGRAM_SUFFIX = "ngram_suffix"
"""Prompt lookup that searches in recent outputs of other requests, too."""
ALGORITHMS = (NONE, STANDALONE, EAGLE3, EAGLE, MTP, NGRAM)
_LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 5}
"""Prompts and outputs are short, so a match of one token counts, too."""
_DRAFT_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    NGRAM: _LOOKUP,
    NGRAM_SUFFIX: {**_LOOKUP, "algorithm": NGRAM, "suffix_cache_tokens": 65_536},
}
DEVICES = ("cpu", "cuda")
BUNDLED = "bundled"
NUM_DRAFT_TOKENS = 4
ACCEPT_LENGTH = 3.5
"""Tokens that a step brings where drafts are accepted by chance."""
SHAPES_DIR = Path("build/shapes")


def _known_device(value: str) -> str:
    if value not in DEVICES:
        raise typer.BadParameter(" or ".join(DEVICES))
    return value


def known_names(option: str, given: str, known: Iterable[str]) -> tuple[str, ...]:
    """The names of an option, which are separated by commas. Raises BadParameter for one that is not known."""
    names = tuple(given.split(","))
    if unknown := set(names) - set(known):
        raise typer.BadParameter(f"{option}: {', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    return names


DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda.", callback=_known_device)]
JsonOption = Annotated[Path | None, typer.Option("--json", help="The file for the results.")]


def _bundled_drafts() -> Mapping[str, Path | None]:
    with_model = {STANDALONE: standalone_dir(), EAGLE3: eagle3_dir(), EAGLE: eagle_dir(), MTP: mtp_dir()}
    return {**with_model, NGRAM: None, NGRAM_SUFFIX: None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """A target and its drafts: the bundled models, unless others are named."""

    target: Path = field(default_factory=target_dir)
    drafts: Mapping[str, Path | None] = field(default_factory=_bundled_drafts)
    """By algorithm; None for one without a model."""

    def with_drafts(self, *algorithms: str) -> Models:
        """The same target with the drafts of these algorithms alone; there is none for "none"."""
        drafts = {name: path for name, path in self.drafts.items() if name in algorithms}
        return Models(target=self.target, drafts=drafts)

    def options_of(self, name: str) -> Mapping[str, Any]:
        """Options of the service of a draft."""
        return {"model": self.drafts[name], "target": self.target, "algorithm": name, **_DRAFT_OPTIONS.get(name, {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A pair of models, and the lengths of sequences."""

    name: str
    target: Path
    draft: Path | None
    """None for one without a model."""
    load_format: str
    prompt_tokens: int
    max_new_tokens: int
    kv_memory_mib: int
    """For all slots, in each of both modes."""
    algorithm: str = EAGLE3
    """How the draft drafts."""

    @classmethod
    def named(cls, name: str) -> Setup:
        """`bundled`, or a shape with an EAGLE-3 head, or with the draft that the name ends with, as in `-mtp`."""
        if name == BUNDLED:
            return cls(
                name=name,
                target=target_dir(),
                draft=eagle3_dir(),
                load_format="auto",
                prompt_tokens=64,
                max_new_tokens=600,
                kv_memory_mib=512,
            )
        shape, _, algorithm = name.rpartition("-")
        if algorithm not in (STANDALONE, EAGLE, MTP, NGRAM):
            shape, algorithm = name, EAGLE3
        return cls(
            name=name,
            target=write_shape(SHAPES_DIR, shape),
            draft=None if algorithm == NGRAM else write_shape(SHAPES_DIR, f"{algorithm}-{shape}"),
            algorithm=algorithm,
            load_format="dummy",
            prompt_tokens=1024,
            max_new_tokens=376,
            kv_memory_mib=18 * 1024,
        )

    @property
    def context_tokens(self) -> int:
        """Tokens of a request, prompt and output."""
        return self.prompt_tokens + self.max_new_tokens

    def up_options(self, draft: str = EAGLE3) -> dict[str, Path | str | int | float | None]:
        """Options of `slipstream up` for these models, with EAGLE3, EAGLE3_AUTO or NONE; a shape accepts by chance."""
        options: dict[str, Path | str | int | float | None] = {"target": self.target, "load_format": self.load_format}
        if draft == NONE:
            return options | {"algorithm": NONE}
        options |= {"draft": self.draft, "algorithm": self.algorithm}
        options["num_draft_tokens"] = "auto" if draft == EAGLE3_AUTO else NUM_DRAFT_TOKENS
        return options if self.name == BUNDLED else options | {"simulate_accept_length": ACCEPT_LENGTH}


def draft_of(algorithm: str) -> str | None:
    """The name of the draft service for an algorithm; None for "none"."""
    return None if algorithm == NONE else STANDALONE if algorithm == STANDALONE_AUTO else algorithm


def with_context(model: Path, context_tokens: int, into: Path) -> Path:
    """The model if its context suffices, else a copy in `into` whose context does: its other files are links.

    RoPE has an angle for every position, so a step takes as long as any other there, whatever its text is worth.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["max_position_embeddings"] >= context_tokens:
        return model
    copy = into / model.name
    copy.mkdir(parents=True)
    for file in model.iterdir():
        if file.name != "config.json":
            (copy / file.name).symlink_to(file.resolve())
    config["max_position_embeddings"] = context_tokens
    (copy / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return copy
