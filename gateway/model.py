"""The model that is served: its tokenizer, its vocabulary and the limits of requests."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import CheckpointError, InvalidArgumentError
from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.server import SamplingDefaults
from slipstream.gateway.chat_template import formats_of
from slipstream.gateway.request import RequestLimits
from slipstream.gateway.text import Vocabulary
from slipstream.gateway.tokenizer import load_tokenizer, longest_token

if TYPE_CHECKING:
    from slipstream.common.wire.server import SchedulerDescription

logger = logging.getLogger(__name__)

_GENERATION = "generation_config.json"
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.jinja")


class ServedModel:
    """The tokenizer, vocabulary and limits of a model."""

    def __init__(
        self, tokenizer: Any, limits: RequestLimits, *, tokenizer_path: str = "", identity: object = None
    ) -> None:
        """`tokenizer`: as `load_tokenizer` returns it, from the directory `tokenizer_path`.

        `identity`: equal for equal models, see `load_model`.
        """
        self.tokenizer = tokenizer
        self.tokenizer_path = tokenizer_path
        longest = longest_token(tokenizer)
        self.identity = identity
        self.vocabulary = Vocabulary(tokenizer)
        self.formats = formats_of(tokenizer.chat_template, tokenizer.special_tokens_map)
        """Forms of calls of tools and of thoughts, see `formats_of`."""
        special = {name: token for name, token in self.vocabulary.special_tokens.items() if token < limits.vocab_size}
        self.limits = replace(
            limits,
            max_characters=longest and longest * limits.context_tokens,
            special_tokens=special,
            eos_token_ids=limits.eos_token_ids | ({tokenizer.eos_token_id} & set(special.values())),
        )


def load_model(
    description: SchedulerDescription,
    last: ServedModel | None,
    *,
    max_samples: int,
    chat_template: Path | None = None,
    has_defaults: bool = True,
) -> ServedModel:
    """Loads the model that a scheduler describes; `last` itself if nothing has changed. Takes up to seconds.

    Outputs of models of the same identity belong together: name, vocabulary size and the files of the tokenizer.
    `chat_template`: a file with the template in place of the model's. `has_defaults`: the sampling defaults of the
    model's `generation_config.json` count. Raises CheckpointError when these or the tokenizer cannot be used.
    """
    server, path = description.server, description.tokenizer_path
    limits = RequestLimits(
        vocab_size=server.vocab_size,
        context_tokens=server.context_tokens,
        eos_token_ids=frozenset(description.eos_token_ids),
        num_draft_tokens=description.most_draft_tokens,
        max_samples=max_samples,
        sampling_defaults=sampling_defaults(Path(path) / _GENERATION) if has_defaults else SamplingDefaults(),
        has_constraints=description.constraints,
    )
    identity = (server.model, server.vocab_size, _digest(Path(path)))
    if last is None or last.identity != identity:
        tokenizer = load_tokenizer(path)
        if chat_template is not None:
            tokenizer.chat_template = _template_in(chat_template)
        return ServedModel(tokenizer, limits, tokenizer_path=path, identity=identity)
    model = ServedModel(last.tokenizer, limits, tokenizer_path=path, identity=identity)
    return last if (last.limits, last.tokenizer_path) == (model.limits, path) else model


def sampling_defaults(path: Path) -> SamplingDefaults:
    """Reads a `generation_config.json`; no defaults if there is none. Raises CheckpointError naming the field."""
    if not path.is_file():
        return SamplingDefaults()
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.parent}: cannot read {path.name}: {' '.join(str(error).split())}") from error
    if not isinstance(given, dict):
        raise CheckpointError(f"{path.parent}: {path.name}: got a {type(given).__name__}, supported: a JSON object")
    values: dict[str, Any] = {
        field.name: given[field.name] for field in fields(SamplingDefaults) if given.get(field.name) is not None
    }
    if given.get("do_sample") is True:
        values.setdefault("temperature", 1.0)  # which transformers does not write
    if values.get("top_k") == -1:
        values["top_k"] = 0
    for name, value in values.items():
        checked: dict[str, Any] = {name: value}
        kinds = (int,) if name == "top_k" else (int, float)
        accepted = "supported: a number that a request may have, or --generation-config none"
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise CheckpointError(f"{path.parent}: {path.name}: {name}: got {value!r:.80}, {accepted}")
        try:
            SamplingParams(**checked)
        except (InvalidArgumentError, OverflowError) as error:
            raise CheckpointError(f"{path.parent}: {path.name}: {name}: got {value!r:.80}, {accepted}") from error
    defaults = SamplingDefaults(**values)
    if values:
        logger.info("sampling parameters of requests that name none, by %s: %s", path.name, defaults)
    return defaults


def _template_in(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot read the chat template: {error}") from error


def _digest(directory: Path) -> str:
    """Hash of a tokenizer's files. Raises CheckpointError."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _TOKENIZER_FILES for path in directory.glob(pattern) if path.is_file()}):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{directory}: cannot read {path.name}: {error.strerror}") from error
        digest.update(f"{path.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()
