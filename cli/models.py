"""The models that `slipstream up` serves: chosen from the options, and checked without PyTorch, which takes seconds."""

from __future__ import annotations

import ctypes
import json
import runpy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream import bundled
from slipstream.cli.hub import MODEL_UNIT, find_model
from slipstream.common.errors import CheckpointError, ConfigError
from slipstream.common.settings import Settings, setting
from slipstream.scheduler.config import AUTO, DRAFT_TOKENS_HELP, parse_number_or_auto
from slipstream.services.models.head_config import DFLASH, EAGLE, EAGLE3, MTP, algorithm_of_head
from slipstream.services.worker.config import ALGORITHMS as WORKER_ALGORITHMS
from slipstream.services.worker.config import NGRAM, STANDALONE

if TYPE_CHECKING:
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.head_config import HeadConfig, HeadKind

CUDA = "cuda"
NONE = "none"
ALGORITHMS = (*WORKER_ALGORITHMS, NONE)
INFERRED = "eagle3, eagle, dflash or standalone, as the draft's tensors are"
"""The algorithm of a draft model for which none is given."""
WITHOUT_MODEL = {NGRAM: "algorithm ngram has no model", NONE: "algorithm none has none"}
"""Algorithms that take no draft model, and why."""


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A target and its draft."""

    target: Path
    """Directory of the target model."""
    draft: Path | None
    """Directory of the draft model. None: no draft, or an algorithm without a model."""
    algorithm: str
    """Algorithm of the draft; "none": no draft."""
    num_draft_tokens: int | None = None
    """Most tokens drafted for a request in a step. None: the scheduler's "auto". Unused without a draft."""

    @property
    def has_draft(self) -> bool:
        """True if there is a draft service."""
        return self.algorithm != NONE


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Settings, heading="Models"):
    """The options that name models. Without any, the bundled pair is served."""

    target: Path | None = setting(
        None, unit=MODEL_UNIT, help="Directory of the target model, or its name on the hub.", unset="the bundled one"
    )
    draft: Path | None = setting(
        None, unit=MODEL_UNIT, help="The draft model, in the same way.", unset="the bundled one for its target"
    )
    algorithm: str | None = setting(
        None,
        choices=ALGORITHMS,
        help="How drafts are made.",
        unset=f"{INFERRED}; none for a --target without --draft",
    )
    num_draft_tokens: int | None = setting(
        None,
        unit="K|auto",
        help=DRAFT_TOKENS_HELP,
        parse=parse_number_or_auto,
        unset=AUTO,
    )

    def choose(self, *, may_download: bool = True) -> ModelChoice:
        """Decides; --target without --draft has no draft. Raises ConfigError for a contradiction or a missing model.

        `may_download`: models of the hub that are not in the cache are downloaded.
        """
        target, draft = (
            None if given is None else find_model(option, given, may_download=may_download)
            for option, given in (("target", self.target), ("draft", self.draft))
        )
        target = target or bundled.target_dir()
        algorithm = self.algorithm or (NONE if self.target is not None and draft is None else algorithm_of(draft))
        check_without_model(algorithm, draft=draft, num_draft_tokens=self.num_draft_tokens)
        if draft is None and algorithm not in WITHOUT_MODEL:
            if self.target is not None:
                raise ConfigError("draft", None, f"a draft model for {target}; or give --algorithm ngram or none")
            drafts = {STANDALONE: bundled.standalone_dir, EAGLE3: bundled.eagle3_dir}
            drafts |= {EAGLE: bundled.eagle_dir, MTP: bundled.mtp_dir, DFLASH: bundled.dflash_dir}
            if algorithm not in drafts:
                raise ConfigError("draft", None, f"a draft model: none of algorithm {algorithm} is bundled")
            draft = drafts[algorithm]()
        _check_model("target", target)
        if draft is not None:
            _check_model("draft", draft)
        return ModelChoice(target=target, draft=draft, algorithm=algorithm, num_draft_tokens=self.num_draft_tokens)


def check_without_model(algorithm: str | None, *, draft: Path | str | None, num_draft_tokens: int | None) -> None:
    """Raises ConfigError for options that an algorithm without a draft model, or without a draft, cannot use."""
    if draft is not None and algorithm in WITHOUT_MODEL:
        raise ConfigError("draft", str(draft), f"only with a draft model, and {WITHOUT_MODEL[algorithm]}")
    if num_draft_tokens is not None and algorithm == NONE:
        raise ConfigError("num_draft_tokens", num_draft_tokens, "only with a draft, and algorithm none has none")


def algorithm_of(draft: Path | None) -> str:
    """Infers a draft's algorithm from its tensors, or from `config.json` without any; by default standalone."""
    if draft is None:
        return STANDALONE
    if of_head := algorithm_of_head(name for file in draft.glob("*.safetensors") for name in _tensors(file)):
        return of_head
    try:
        config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # found, and said, when it is loaded
        return STANDALONE
    if not isinstance(config, dict):
        return STANDALONE
    names = "".join(str(config.get(field)).lower() for field in ("architectures", "speculators_model_type"))
    if DFLASH in names or "dflash_config" in config:
        return DFLASH
    return EAGLE3 if EAGLE3 in names else STANDALONE


def _tensors(file: Path) -> list[str]:
    # Imported here: the gateway's image has the commands, and nothing that loads models.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError):
        return []


def _check_model(option: str, path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ConfigError(option, str(path), "a directory with a model: config.json, safetensors, tokenizer.json")


def check_models(
    models: ModelChoice,
    *,
    needs_weights: bool = True,
    tensor_parallel_size: int = 1,
    context_tokens: int | None = None,
) -> None:
    """Raises CheckpointError if a model cannot be served, or the draft does not fit the target.

    Raises ConfigError for a target that cannot be divided into so many parts, or has no context of so many tokens.
    """
    # Imported here and below: the gateway's image has the commands, and nothing that loads models.
    from slipstream.services.models.config import ModelConfig, Rank
    from slipstream.services.models.sharding import sharded

    config = ModelConfig.from_directory(models.target)
    if context_tokens is not None and context_tokens > (longest := config.max_position_embeddings):
        raise ConfigError("context_tokens", context_tokens, f"at most {longest}, what the model was made for")
    sharded(config, Rank(0, tensor_parallel_size))
    describe_target(models, needs_weights=needs_weights)
    if models.draft is not None:
        describe_draft(models, needs_weights=needs_weights)


def describe_target(models: ModelChoice, *, needs_weights: bool = True) -> str:
    """Describes the target. Raises CheckpointError if it cannot be served."""
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.json_files import tokenizer_fingerprint

    config = ModelConfig.from_directory(models.target)
    tokenizer_fingerprint(models.target)
    if needs_weights:
        _check_decoder(models.target, config)
    return config.architecture


def describe_draft(models: ModelChoice, *, needs_weights: bool = True) -> str:
    """Describes the draft model. Raises CheckpointError if it cannot draft for the target."""
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.head_config import HEADS, check_target
    from slipstream.services.models.json_files import tokenizer_fingerprint

    path, head = models.draft, HEADS.get(models.algorithm)
    assert path is not None, "there is a draft model"
    if head is None:
        config = ModelConfig.from_directory(path)
        name, check = config.architecture, partial(_check_decoder, path, config)
    else:
        head_config = head.config(path)
        check_target(path, head_config, models.target)
        name, check = head.name, partial(_check_head, path, head_config, head)
    has_tokenizer = head is None or (path / "tokenizer.json").is_file()
    if has_tokenizer and tokenizer_fingerprint(path) != tokenizer_fingerprint(models.target):
        raise CheckpointError(f"{path}: its tokenizer is not that of the target, {models.target}")
    if needs_weights:
        check()
    return name + (", with the target's tokenizer" if has_tokenizer else "")


def _check_decoder(path: Path, config: ModelConfig) -> None:
    """Compares the headers of all tensors with `config.json`."""
    from slipstream.services.models.slots import checked_decoder_slots, weight_files

    with weight_files(path, config, framework="numpy") as files:
        checked_decoder_slots(files, config)


def _check_head(path: Path, config: HeadConfig, kind: HeadKind) -> None:
    from slipstream.services.models.slots import checked_head_slots
    from slipstream.services.models.weight_files import WeightFiles

    with WeightFiles(path, framework="numpy") as files:
        checked_head_slots(files, config, kind)


def check_device(device: str) -> None:
    """Raises ConfigError if a GPU is asked for and cannot be used, as far as that can be told without PyTorch."""
    if device != CUDA:
        return
    if (torch := find_spec("torch")) is not None and torch.origin is not None:
        version = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
        if version.get("cuda") is None:
            reason = "this PyTorch was built without CUDA; install a build for your driver"
            raise ConfigError("device", device, f"cpu here: {reason}")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ConfigError("device", device, "cpu here: there is no libcuda.so.1, of NVIDIA's driver") from None
