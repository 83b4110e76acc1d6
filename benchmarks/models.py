"""The models that benchmarks serve: the bundled ones, and shapes of published models with random weights.

The directory of a shape has `config.json` as it is published, for `--load-format dummy`, and a byte-level tokenizer
with as many tokens as the model has, made up but for the first 256.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slipstream.bundled import dflash_dir, eagle3_dir, eagle_dir, mtp_dir, standalone_dir, target_dir
from slipstream.services.worker.config import Shares

NONE, STANDALONE, EAGLE3, EAGLE, MTP, NGRAM = "none", "standalone", "eagle3", "eagle", "mtp", "ngram"
DFLASH = "dflash"
STANDALONE_AUTO, EAGLE3_AUTO = "standalone_auto", "eagle3_auto"
"""Drafts that rest where plain decoding is faster."""
NGRAM_SUFFIX = "ngram_suffix"
"""Prompt lookup that also searches recent outputs of other requests."""
ALGORITHMS = (NONE, STANDALONE, EAGLE3, EAGLE, MTP, DFLASH, NGRAM)
DRAFT_TITLES = {
    NONE: "none",
    STANDALONE: "standalone",
    STANDALONE_AUTO: "standalone, `auto`",
    EAGLE3: "EAGLE-3",
    EAGLE3_AUTO: "EAGLE-3, auto",
    EAGLE: "EAGLE",
    MTP: "MTP modules",
    DFLASH: "DFlash",
    NGRAM: "n-grams",
    NGRAM_SUFFIX: "n-grams, and outputs",
}
"""Names of drafts in tables."""
THREE, ONE = MODES = ("three processes", "one process")
"""Ways of serving with a draft."""
PLAIN = "plain"
"""Serving without a draft, in two processes."""
BUNDLED = "bundled"
NUM_DRAFT_TOKENS = 4
ACCEPT_LENGTH = 3.5
"""Tokens of a step where drafts are accepted by chance."""
ACCEPTED_SHARE = 0.8206
"""Share of draft tokens that are accepted after accepted ones; with K = 4 a step has ACCEPT_LENGTH tokens."""
SHAPES_DIR = Path("build/shapes")
_DATA = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
SHAPES: dict[str, dict[str, Any]] = {
    name: reduce(or_, (_DATA["parts"][part] for part in parts)) for name, parts in _DATA["shapes"].items()
}
"""`config.json` by the name of the directory. The EAGLE-3 heads are of the shape that the paper's authors publish."""
# Prompts and outputs are short, so a match of one token counts, too.
_LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 5}
_DRAFTS: Mapping[str, tuple[Path | None, Mapping[str, Any]]] = {
    STANDALONE: (standalone_dir(), {}),
    EAGLE3: (eagle3_dir(), {}),
    EAGLE: (eagle_dir(), {}),
    MTP: (mtp_dir(), {}),
    DFLASH: (dflash_dir(), {}),
    NGRAM: (None, _LOOKUP),
    NGRAM_SUFFIX: (None, {**_LOOKUP, "algorithm": NGRAM, "suffix_cache_tokens": 65_536}),
}
"""Models of the bundled target's drafts, and options of their services."""


def draft_options(name: str, *, target: Path | None = None, model: Path | None = None) -> dict[str, Any]:
    """Returns the options of a draft service, for the bundled models unless others are given."""
    bundled, options = _DRAFTS[name]
    return {"model": model or bundled, "target": target or target_dir(), "algorithm": name, **options}


def draft_of(algorithm: str) -> str | None:
    """Returns the name of the draft service for an algorithm; None for "none"."""
    return None if algorithm == NONE else STANDALONE if algorithm == STANDALONE_AUTO else algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A pair of models, and the lengths of sequences."""

    name: str
    target: Path
    draft: Path | None
    """None: a draft without a model."""
    load_format: str = "dummy"
    prompt_tokens: int = 1024
    max_new_tokens: int = 376
    kv_memory_mib: int = 18 * 1024
    """KV memory of all slots, of draft and verify together."""
    algorithm: str = EAGLE3
    """How the draft drafts."""

    @classmethod
    def named(cls, name: str) -> Setup:
        """Returns `bundled`, or a shape with an EAGLE-3 head, or with the draft that the name ends with, as `-mtp`."""
        if name == BUNDLED:
            sizes: dict[str, Any] = {"prompt_tokens": 64, "max_new_tokens": 600, "kv_memory_mib": 512}
            return cls(name=name, target=target_dir(), draft=eagle3_dir(), load_format="auto", **sizes)
        shape, _, algorithm = name.rpartition("-")
        if algorithm not in (STANDALONE, EAGLE, MTP, DFLASH, NGRAM):
            shape, algorithm = name, EAGLE3
        draft = None if algorithm == NGRAM else write_shape(SHAPES_DIR, f"{algorithm}-{shape}")
        return cls(name=name, target=write_shape(SHAPES_DIR, shape), draft=draft, algorithm=algorithm)

    @property
    def context_tokens(self) -> int:
        """Tokens of a request, prompt and output."""
        return self.prompt_tokens + self.max_new_tokens

    def accepting(self, shares: Shares | None = None) -> dict[str, Any]:
        """Options of the verify service, which accepts by chance: by these shares, or with a mean of ACCEPT_LENGTH."""
        length = None if shares else ACCEPT_LENGTH
        simulated = {"simulate_accept_by_position": shares, "simulate_accept_length": length}
        return {"model": self.target, "load_format": self.load_format, **simulated}

    @property
    def draft_options(self) -> dict[str, Any]:
        """Options of the draft service."""
        models = {"model": self.draft, "target": self.target}
        return {**models, "algorithm": self.algorithm, "load_format": self.load_format}

    def up_options(self, draft: str = EAGLE3) -> dict[str, Path | str | int | float | None]:
        """Options of `slipstream up` for these models, with EAGLE3, EAGLE3_AUTO or NONE; a shape accepts by chance."""
        options: dict[str, Path | str | int | float | None] = {"target": self.target, "load_format": self.load_format}
        if draft == NONE:
            return options | {"algorithm": NONE}
        options |= {"draft": self.draft, "algorithm": self.algorithm}
        options["fixed_draft_tokens"] = None if draft == EAGLE3_AUTO else NUM_DRAFT_TOKENS
        return options if self.name == BUNDLED else options | {"simulate_accept_by_position": ACCEPTED_SHARE}


def with_context(model: Path, context_tokens: int, into: Path) -> Path:
    """Writes a copy of the model in `into` whose context suffices; its other files are links.

    RoPE has an angle for every position, so a step takes as long as any other there, whatever its text is worth.
    """
    copy, config = into / model.name, json.loads((model / "config.json").read_text(encoding="utf-8"))
    copy.mkdir(parents=True)
    for file in model.iterdir():
        if file.name != "config.json":
            (copy / file.name).symlink_to(file.resolve())
    _write_json(copy / "config.json", {**config, "max_position_embeddings": context_tokens})
    return copy


def write_shape(folder: Path, name: str) -> Path:
    """Writes the directory of one shape into `folder`, unless it is there; returns it."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    if not (path / "tokenizer.json").is_file():
        _write_tokenizer(path, SHAPES[name]["vocab_size"])
    _write_json(path / "config.json", SHAPES[name])
    return path


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """A token for each byte, and others that decode to words and that no text is encoded to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + [f"Ġt{number}" for number in range(len(alphabet), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    tokenizer.save(str(path / "tokenizer.json"), pretty=False)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
