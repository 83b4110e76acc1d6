"""Loads the checkpoint of a draft head, in the layout of the papers' authors or of other packages."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import CheckpointError
from slipstream.services.models.checkpoint import (
    LoadFormat,
    Slot,
    check_tensors,
    copy_finite,
    fill,
    fill_with_noise,
    layer_slots,
)
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.head_config import (
    EMBEDDING,
    FC,
    FC_BIAS,
    HEADS,
    OUTPUT,
    OUTPUT_TENSOR,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    MtpConfig,
    check_target,
)
from slipstream.services.models.heads import DraftHead, Eagle3Head, EagleHead
from slipstream.services.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

_EMBEDDING = "embed_tokens.weight"
_TARGET_EMBEDDING = "model.embed_tokens.weight"
_MODULE_HEAD = "shared_head.head.weight"
_LAYER_NAME = re.compile(r"model\.layers\.(\d{1,9})\.", re.ASCII)
_IDS = "d2t"
_TABLES = (_IDS, "t2d")


def load_head(
    algorithm: str,
    path: str | Path,
    *,
    target: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat = LoadFormat.AUTO,
    borrows: bool = False,
) -> DraftHead:
    """Reads a head that computes in `dtype`, whatever the files hold.

    `target` is the target's directory: its embedding and output serve a head that has none of its own. With `borrows`
    they are not read, where their sizes are the head's: verify lends them. Raises `CheckpointError` when the directory
    is not a whole head, or not one for this target.
    """
    path, kind = Path(path), HEADS[algorithm]
    config = kind.config(path)
    if target is not None:
        check_target(path, config, target)
    borrows = borrows and (target is None or config.layer.vocab_size == ModelConfig.from_directory(target).vocab_size)
    if load_format is LoadFormat.DUMMY:
        if borrows:
            config = replace(config, borrowed=kind.optional)
        head = empty_head(config, device=device, dtype=dtype)
        fill_with_noise(head)
        head.token_ids.mul_(config.layer.vocab_size // config.draft_vocab_size)  # spread evenly over the target's
    else:
        with WeightFiles(path) as files:
            slots = dict(_slots(config))
            absent = [name for name, slot in slots.items() if slot.parameter in kind.optional]
            borrowed = {name: slots.pop(name) for name in absent if name not in files.tensors}
            if borrows:
                config = replace(config, borrowed=tuple(slot.parameter for slot in borrowed.values()))
                borrowed = {}
            check_tensors(files, slots, kind.name, partial(_is_ignored, config))
            _check_copies(files, config)
            token_ids = _token_ids(files, config)
            head = empty_head(config, device=device, dtype=dtype)
            head.token_ids.copy_(token_ids)
            fill(head, slots, files)
        for name, slot in borrowed.items():
            _copy_from_target(head, slot.parameter, name, path, target)
    head.pack()
    return head.eval()


def empty_head(config: HeadConfig, *, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """Makes a head without its weights."""
    if device.type == "cuda":
        # Imported here, as there is no triton where there is no GPU.
        from slipstream.services.models.fused import fused_head

        return fused_head(config, device=device, dtype=dtype)
    if isinstance(config, EagleConfig):
        return EagleHead(config, device=device, dtype=dtype)
    assert isinstance(config, Eagle3Config), "there are two kinds"
    return Eagle3Head(config, device=device, dtype=dtype)


def _slots(config: HeadConfig) -> Iterator[tuple[str, Slot]]:
    layer = config.layer
    hidden = layer.hidden_size
    if isinstance(config, MtpConfig):
        yield from _slots_of_modules(config)
        return
    yield _EMBEDDING, Slot(EMBEDDING, 0, (layer.vocab_size, hidden))
    yield OUTPUT_TENSOR, Slot(OUTPUT, 0, (config.draft_vocab_size, hidden))
    if isinstance(config, EagleConfig):
        yield FC, Slot("steps.0.fc.weight", 0, (hidden, 2 * hidden))
        if config.has_fc_bias:
            yield FC_BIAS, Slot("steps.0.fc.bias", 0, (hidden,))
        yield from layer_slots(layer, "layers.0", "steps.0.layer", input_size=hidden)
        return
    assert isinstance(config, Eagle3Config), "there are two kinds"
    name = config.layer_name
    yield FC, Slot("fc.weight", 0, (hidden, config.hidden_width))
    yield f"{name}.hidden_norm.weight", Slot("hidden_norm.weight", 0, (hidden,))
    yield f"{name}.input_layernorm.weight", Slot("layer.attention_norm.weight", 0, (hidden,))
    yield from layer_slots(layer, name, "layer", input_size=2 * hidden)
    yield "norm.weight", Slot("norm.weight", 0, (hidden,))


def _slots_of_modules(config: MtpConfig) -> Iterator[tuple[str, Slot]]:
    layer = config.layer
    hidden = layer.hidden_size
    first = _module_name(config, 0)
    yield f"{first}.{_EMBEDDING}", Slot(EMBEDDING, 0, (layer.vocab_size, hidden))
    yield f"{first}.{_MODULE_HEAD}", Slot(OUTPUT, 0, (layer.vocab_size, hidden))
    for number in range(layer.num_layers):
        theirs, ours = _module_name(config, number), f"steps.{number}"
        yield f"{theirs}.enorm.weight", Slot(f"{ours}.embedding_norm.weight", 0, (hidden,))
        yield f"{theirs}.hnorm.weight", Slot(f"{ours}.state_norm.weight", 0, (hidden,))
        yield f"{theirs}.eh_proj.weight", Slot(f"{ours}.fc.weight", 0, (hidden, 2 * hidden))
        yield f"{theirs}.input_layernorm.weight", Slot(f"{ours}.layer.attention_norm.weight", 0, (hidden,))
        yield from layer_slots(layer, theirs, f"{ours}.layer", input_size=hidden)
        yield f"{theirs}.shared_head.norm.weight", Slot(f"{ours}.norm.weight", 0, (hidden,))


def _module_name(config: MtpConfig, number: int) -> str:
    return f"model.layers.{config.first_layer + number}"


def _is_ignored(config: HeadConfig, name: str) -> bool:
    if isinstance(config, MtpConfig):
        # The modules may lie in the target's own checkpoint, and each may have its copy of what they share.
        layer = _LAYER_NAME.match(name)
        if layer is None or int(layer[1]) < config.first_layer:
            return name.startswith("model.") or name == OUTPUT_TENSOR
        return name.endswith((f".{_EMBEDDING}", f".{_MODULE_HEAD}", ".rotary_emb.inv_freq"))
    # Older checkpoints hold RoPE's frequencies, which are computed here.
    return name in _TABLES or name.endswith(".rotary_emb.inv_freq")


def _check_copies(files: WeightFiles, config: HeadConfig) -> None:
    """Raises `CheckpointError` unless all modules share one embedding and one output."""
    if not isinstance(config, MtpConfig):
        return
    for part in (_EMBEDDING, _MODULE_HEAD):
        names = [f"{_module_name(config, number)}.{part}" for number in range(config.layer.num_layers)]
        there = [name for name in names if name in files.tensors]
        for name in there[1:]:
            if not torch.equal(files.read(there[0]), files.read(name)):
                message = f"it differs from {there[0]}; supported: modules that share them"
                raise CheckpointError(f"{files.path}: {files.tensors[name].file}: tensor {name}: {message}")
        if there and there[0] != names[0]:
            raise CheckpointError(f"{files.path}: missing tensors: {names[0]}; another module has one")


def _token_ids(files: WeightFiles, config: HeadConfig) -> torch.Tensor:
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


def _copy_from_target(head: DraftHead, which: str, name: str, path: Path, target: Path | None) -> None:
    """Fills in the target's embedding or output, parameter `which`, that a head's checkpoint would have as `name`."""
    parameter = head.get_parameter(which)
    if target is None:
        raise CheckpointError(f"{path}: missing tensors: {name}; it can be the target's, if that is named")
    config = ModelConfig.from_directory(target)
    theirs = OUTPUT_TENSOR if which == OUTPUT and not config.tie_word_embeddings else _TARGET_EMBEDDING
    with WeightFiles(target) as files:
        slots = {theirs: Slot("", 0, (config.vocab_size, parameter.shape[1]))}
        check_tensors(files, slots, "the target", lambda name: name != theirs)
        # The two may be padded differently.
        copy_finite(parameter[: config.vocab_size], files, theirs)
        parameter[config.vocab_size :].zero_()
