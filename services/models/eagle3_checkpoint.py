"""Loads an EAGLE-3 head's checkpoint, in the layout of the paper's authors or of the `speculators` package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import CheckpointError
from slipstream.services.models.checkpoint import (
    LoadFormat,
    Slot,
    WeightFiles,
    check_tensors,
    copy_finite,
    fill,
    fill_with_noise,
    layer_slots,
)
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.eagle3 import Eagle3Config, Eagle3Head

if TYPE_CHECKING:
    from collections.abc import Iterator

_EMBEDDING = "embed_tokens.weight"
_TARGET_EMBEDDING = "model.embed_tokens.weight"
_IDS = "d2t"
_TABLES = (_IDS, "t2d")


def load_eagle3(
    path: str | Path,
    *,
    target: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat = LoadFormat.AUTO,
) -> Eagle3Head:
    """Reads a head that computes in `dtype`, whatever the files hold.

    `target` is the target's directory: its embedding serves a head that has none of its own. Raises `CheckpointError`
    when the directory is not a whole head, or not one for this target.
    """
    path = Path(path)
    config = Eagle3Config.from_directory(path)
    if target is not None:
        _check_target(path, config, target)
    if load_format is LoadFormat.DUMMY:
        head = _empty_head(config, device=device, dtype=dtype)
        fill_with_noise(head)
        head.token_ids.mul_(config.layer.vocab_size // config.draft_vocab_size)  # spread evenly over the target's
    else:
        slots = dict(_slots(config))
        with WeightFiles(path) as files:
            if _EMBEDDING not in files.tensors:
                del slots[_EMBEDDING]
            check_tensors(files, slots, "an EAGLE-3 head", lambda name: name in _TABLES)
            token_ids = _token_ids(files, config)
            head = _empty_head(config, device=device, dtype=dtype)
            head.token_ids.copy_(token_ids)
            fill(head, slots, files)
            if _EMBEDDING not in slots:
                _copy_target_embedding(head.embedding, path, target)
    head.pack()
    return head.eval()


def _empty_head(config: Eagle3Config, *, device: torch.device, dtype: torch.dtype) -> Eagle3Head:
    if device.type == "cuda":
        # Imported here, as there is no triton where there is no GPU.
        from slipstream.services.models.fused import FusedEagle3Head

        return FusedEagle3Head(config, device=device, dtype=dtype)
    return Eagle3Head(config, device=device, dtype=dtype)


def _slots(config: Eagle3Config) -> Iterator[tuple[str, Slot]]:
    layer, name = config.layer, config.layer_name
    hidden = layer.hidden_size
    yield _EMBEDDING, Slot("embedding", 0, (layer.vocab_size, hidden))
    yield "fc.weight", Slot("fc.weight", 0, (hidden, config.fused_width))
    yield f"{name}.hidden_norm.weight", Slot("hidden_norm.weight", 0, (hidden,))
    yield f"{name}.input_layernorm.weight", Slot("layer.attention_norm.weight", 0, (hidden,))
    yield from layer_slots(layer, name, "layer", input_size=2 * hidden)
    yield "norm.weight", Slot("norm.weight", 0, (hidden,))
    yield "lm_head.weight", Slot("head.weight", 0, (config.draft_vocab_size, hidden))


def _token_ids(files: WeightFiles, config: Eagle3Config) -> torch.Tensor:
    """The target's ids of the draft's tokens: `d2t` has how far each is from the draft's own."""
    size, vocab_size = config.draft_vocab_size, config.layer.vocab_size
    own = torch.arange(size)
    if _IDS not in files.tensors:
        if size == vocab_size:
            return own
        raise CheckpointError(f"{files.path}: missing tensors: {_IDS}; draft_vocab_size asks for it")
    info = files.tensors[_IDS]
    if info.shape != (size,) or info.dtype not in ("I64", "I32"):
        given = f"{info.dtype} {list(info.shape)}"
        raise CheckpointError(f"{files.path}: {info.file}: tensor {_IDS}: got {given}, supported: I64 [{size}]")
    ids = own + files.read(_IDS)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) < size:
        message = f"some of its ids are not below {vocab_size}, or there twice; supported: target id - draft id"
        raise CheckpointError(f"{files.path}: {info.file}: tensor {_IDS}: {message}")
    return ids


def _check_target(path: Path, config: Eagle3Config, target: Path) -> None:
    asked, given = config.target_hidden_size, ModelConfig.from_directory(target).hidden_size
    if asked != given:
        raise CheckpointError(f"{path}: the head is for a target of hidden size {asked}, that of {target} is {given}")


def _copy_target_embedding(embedding: torch.Tensor, path: Path, target: Path | None) -> None:
    if target is None:
        raise CheckpointError(f"{path}: missing tensors: {_EMBEDDING}; it can be the target's, if that is named")
    with WeightFiles(target) as files:
        num_rows = ModelConfig.from_directory(target).vocab_size
        slots = {_TARGET_EMBEDDING: Slot("embedding", 0, (num_rows, embedding.shape[1]))}
        check_tensors(files, slots, "the target", lambda name: name != _TARGET_EMBEDDING)
        # The two may be padded differently.
        copy_finite(embedding[:num_rows], files, _TARGET_EMBEDDING)
        embedding[num_rows:].zero_()
