"""The tokenizer of the served model: text to token ids and back, without importing transformers where that can be.

transformers takes seconds to import and reads `tokenizer.json` with the `tokenizers` library, which is imported in
milliseconds. `load_tokenizer` reads the file directly where transformers would take it as it is, and leaves every
other tokenizer to transformers: its classes may build a tokenizer of their own, or add tokens that only
`tokenizer_config.json` names.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from slipstream.common.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_DEFAULT_TOKEN = "<|endoftext|>"
_QWEN2_TOKENS = ("eos_token", "unk_token", "pad_token")
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
_UNUSUAL_SETTINGS = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "split_special_tokens")
"""Fields of `tokenizer_config.json` that make transformers treat `tokenizer.json` in another way."""

_WHOLE_PRE_TOKENIZERS = ("ByteLevel", "Split", "Digits", "Metaspace")
_NFC_CHARACTERS = 4
"""Characters that NFC makes one of, at most."""

_import_lock = threading.Lock()
"""The lazy import of transformers breaks when two threads begin it."""


class Tokenizer:
    """A tokenizer read from `tokenizer.json`, with the part of the interface of transformers' tokenizers used here."""

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | dict[str, str] | None = None,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Takes `backend` over. `special_tokens`: their names, by what they are for, as "eos_token"."""
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer = backend
        eos_token = special_tokens.get("eos_token")
        self.eos_token_id: int | None = None if eos_token is None else backend.token_to_id(eos_token)
        """The token with which the model ends a text, None if the tokenizer names none."""
        self.chat_template = chat_template
        """The model's chat template, several by name, None if it has none."""
        self.special_tokens_map = dict(special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the tokenizer's post-processor adds or without them."""
        # Unlike `encode`, it lets other threads run meanwhile.
        ids: list[int] = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Returns the text of token ids. Spaces are never cleaned up: that would change text which was sent already."""
        assert not clean_up_tokenization_spaces, "text that was sent cannot be changed"
        text: str = self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text


def load_tokenizer(path: str | Path) -> Any:
    """Loads the tokenizer of a model's directory: a `Tokenizer`, or one of transformers with the same interface.

    Raises CheckpointError when it cannot be loaded.
    """
    path = Path(path)
    with _explaining(path):
        tokenizer = _read_directly(path)
    return tokenizer or _load_with_transformers(path)


def longest_token(tokenizer: Any) -> int | None:
    """Returns the most characters of a text that one token stands for; None if that is unbounded, or not known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, models.BPE) or not _leaves_no_text_out(backend):
        return None
    num_characters = {None: 1, "NFC": _NFC_CHARACTERS}.get((_state(backend.normalizer) or {"type": None})["type"])
    return num_characters and num_characters * max(map(len, backend.get_vocab()))


def _leaves_no_text_out(backend: Backend) -> bool:
    """Returns whether a token for a long text has a long name: nothing is unknown, and no white space is dropped."""
    state = _state(backend.pre_tokenizer) or {"type": "none"}
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    is_whole = all(step["type"] in _WHOLE_PRE_TOKENIZERS and step.get("behavior") != "Removed" for step in steps)
    has_all_bytes = backend.model.byte_fallback or any(step["type"] == "ByteLevel" for step in steps)
    added = backend.get_added_tokens_decoder().values()
    return is_whole and has_all_bytes and not any(token.lstrip or token.rstrip for token in added)


def _read_directly(path: Path) -> Tokenizer | None:
    """Reads `tokenizer.json`; returns None where transformers would make another tokenizer of the directory."""
    config = _read_json(path / "tokenizer_config.json")
    if not (path / "tokenizer.json").is_file() or _is_unusual(path, config):
        return None
    backend = Backend.from_file(str(path / "tokenizer.json"))
    padding = backend.padding or {}
    token_map = _read_json(path / "special_tokens_map.json")
    if not all(_has_all_tokens(backend, source) for source in (config, token_map, padding)):
        return None
    kind = config.get("tokenizer_class")
    is_of_qwen2 = _read_json(path / "config.json").get("model_type") == "qwen2" or kind in _QWEN2_CLASSES
    # For these classes transformers builds a tokenizer of the vocabulary, which must be the same.
    if not (_is_qwen2(backend) if is_of_qwen2 else kind in _PLAIN_CLASSES):
        return None
    # As in transformers, the older file counts where the newer one does not list the added tokens.
    named = config if "added_tokens_decoder" in config else config | token_map
    tokens = dict.fromkeys(_QWEN2_TOKENS, _QWEN2_DEFAULT_TOKEN) if is_of_qwen2 else {}
    tokens |= {name: value for name, value in (padding | named).items() if name.endswith("_token")}
    special = {name: text for name, value in tokens.items() for text in _special_tokens({name: value})}
    return Tokenizer(backend, chat_template=_chat_template(path, config), special_tokens=special)


def _load_with_transformers(path: Path) -> Any:
    with _import_lock:
        from transformers import AutoTokenizer

    with _explaining(path):
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        # The first call may change the tokenizer's settings, which no two threads may be in the middle of.
        tokenizer.encode("a")
    return tokenizer


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Raises CheckpointError in place of anything that the libraries raise for a file with values of a wrong kind."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the backend is no Exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path}: the tokenizer cannot be loaded: {reason}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty without the file."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: got a {type(value).__name__}, supported: a JSON object")
    return value


def _is_unusual(path: Path, config: dict[str, Any]) -> bool:
    """Returns whether the directory has files or settings that change what transformers makes of `tokenizer.json`."""
    if any(config.get(name) for name in _UNUSUAL_SETTINGS) or (path / "tekken.json").exists():
        return True
    return (path / "added_tokens.json").exists() and "added_tokens_decoder" not in config


def _is_qwen2(backend: Backend) -> bool:
    """Returns whether the tokenizer is what transformers' `Qwen2Tokenizer` builds of its vocabulary and merges."""
    model = backend.model
    if not isinstance(model, models.BPE) or not isinstance(backend.decoder, decoders.ByteLevel):
        return False
    options = (model.dropout, model.unk_token, model.fuse_unk, model.byte_fallback, model.ignore_merges)
    if any((*options, model.continuing_subword_prefix, model.end_of_word_suffix)):
        return False
    split = pre_tokenizers.Split(Regex(_QWEN2_PATTERN), "isolated")
    accepted = [  # offsets are not used
        _state(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, trim_offsets, use_regex=False)]))
        for trim_offsets in (False, True)
    ]
    is_same = _state(backend.normalizer) == _state(normalizers.NFC()) and _state(backend.pre_tokenizer) in accepted
    return is_same and _has_all_tokens(backend, {"unk_token": _QWEN2_DEFAULT_TOKEN})


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _has_all_tokens(backend: Backend, config: dict[str, Any]) -> bool:
    """Returns whether `tokenizer.json` has all the added tokens of `config` as transformers would add them."""
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for number, fields in config.get("added_tokens_decoder", {}).items():
        token = present.get(fields["content"])
        is_same = token is not None and token.__getstate__() == AddedToken(**fields).__getstate__()
        if not is_same or backend.token_to_id(fields["content"]) != int(number):
            return False
    return all(
        name in present and present[name].__getstate__() == AddedToken(name, special=True).__getstate__()
        for name in _special_tokens(config)
    )


def _special_tokens(config: dict[str, Any]) -> Iterator[str]:
    """Yields the special tokens that a configuration names."""
    values: list[Any] = [value for name, value in config.items() if name.endswith("_token")]
    for name in _SPECIAL_LISTS:
        given = config.get(name) or []
        values += given.values() if isinstance(given, dict) else given
    for value in values:
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            yield content


def _chat_template(path: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Returns the templates of a directory, as transformers finds them: files count before the configuration."""
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    found = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    if not found:
        given = config.get("chat_template")
        return {one["name"]: one["template"] for one in given} if isinstance(given, list) else given
    return found["default"] if found.keys() == {"default"} else found
