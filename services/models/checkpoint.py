"""Loads a Hugging Face checkpoint into a decoder, or that of a draft head into a head."""

from __future__ import annotations

import enum
import logging
import math
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import CheckpointError
from slipstream.services.models.config import FAMILIES, ModelConfig
from slipstream.services.models.decoder import Decoder, DecoderLayer, paired_dimensions
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
from slipstream.services.models.linear import FP8
from slipstream.services.models.quantization import dequantised
from slipstream.services.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from slipstream.services.models.quantization import Fp8Weights


logger = logging.getLogger(__name__)

PROGRESS = "loading: %.0f %%"
_DTYPES = ("F32", "F16", "BF16")
_FP8_DTYPES = ("F8_E4M3",)
_SHOWN = 3
"""Tensor names that an error lists."""


class LoadFormat(enum.Enum):
    """The source of the weights, named as in vLLM and SGLang."""

    AUTO = "auto"
    """The directory's safetensors."""
    DUMMY = "dummy"
    """Random weights for measurements; the directory needs no more than config.json."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a checkpoint's tensor: rows `[start, start + shape[0])` of a parameter."""

    parameter: str
    start: int
    shape: tuple[int, ...]
    fp8: Fp8Weights | None = None
    """Set for a weight of FP8 numbers, and for its scales."""
    num_rows: int = 0
    """Rows that the tensor has scales for; 0 if it has no scales."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the tensor may have."""
        return _FP8_DTYPES if self.fp8 is not None and not self.num_rows else _DTYPES


def load_decoder(
    path: str | Path, *, device: torch.device, dtype: torch.dtype, load_format: LoadFormat = LoadFormat.AUTO
) -> Decoder:
    """Reads a checkpoint directory into a decoder that computes in `dtype`, whatever the files hold.

    Everything is checked against `config.json` before memory is taken. On a GPU the decoder works by kernels of its
    own. Raises `CheckpointError` when the directory is not a whole checkpoint of a supported decoder.
    """
    path = Path(path)
    config = ModelConfig.from_directory(path)
    if load_format is LoadFormat.DUMMY:
        decoder = _empty_decoder(config, device, dtype)
        fill_with_noise(decoder)
    else:
        slots = dict(_slots(config))
        with WeightFiles(path) as files:
            check_tensors(files, slots, config.architecture, lambda name: _is_ignored(name, config))
            decoder = _empty_decoder(config, device, dtype)
            fill(decoder, slots, files)
            _pair_dimensions(decoder)
            if config.tie_word_embeddings:
                _check_tied_head(files)
    decoder.pack()
    return decoder.eval()


def _empty_decoder(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    if device.type == "cuda":
        # Imported here, as there is no triton where there is no GPU.
        from slipstream.services.models.fused import FusedDecoder

        return FusedDecoder(config, device=device, dtype=dtype)
    return Decoder(config, device=device, dtype=dtype)


def _slots(config: ModelConfig) -> Iterator[tuple[str, Slot]]:
    """The tensors that a checkpoint must have, by name."""
    hidden = config.hidden_size
    vocab = (config.vocab_size, hidden)
    yield "model.embed_tokens.weight", Slot("embedding", 0, vocab)
    yield "model.norm.weight", Slot("norm.weight", 0, (hidden,))
    if not config.tie_word_embeddings:
        yield "lm_head.weight", Slot("head.weight", 0, vocab)
    for index in range(config.num_layers):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        yield f"{theirs}.input_layernorm.weight", Slot(f"{ours}.attention_norm.weight", 0, (hidden,))
        yield from layer_slots(config, theirs, ours, input_size=hidden)


def layer_slots(config: ModelConfig, theirs: str, ours: str, *, input_size: int) -> Iterator[tuple[str, Slot]]:
    """The tensors of a layer, `theirs` in the checkpoint and `ours` in the model, except the norms of its input."""
    hidden, mlp, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    has_qkv_bias, has_mlp_bias, fp8 = config.has_qkv_bias, config.has_mlp_bias, config.fp8
    # name in the checkpoint, ours, first row, rows, columns, bias
    fused = (
        ("self_attn.qkv_proj", "qkv", 0, q + 2 * kv, input_size, has_qkv_bias),
        ("mlp.gate_up_proj", "gate_up", 0, 2 * mlp, hidden, has_mlp_bias),
    )
    separate = (
        ("self_attn.q_proj", "qkv", 0, q, input_size, has_qkv_bias),
        ("self_attn.k_proj", "qkv", q, kv, input_size, has_qkv_bias),
        ("self_attn.v_proj", "qkv", q + kv, kv, input_size, has_qkv_bias),
        ("mlp.gate_proj", "gate_up", 0, mlp, hidden, has_mlp_bias),
        ("mlp.up_proj", "gate_up", mlp, mlp, hidden, has_mlp_bias),
    )
    projections = (
        *(fused if FAMILIES[config.architecture].has_fused_projections else separate),
        ("self_attn.o_proj", "output", 0, hidden, q, config.has_output_bias),
        ("mlp.down_proj", "down", 0, hidden, mlp, has_mlp_bias),
    )
    yield f"{theirs}.post_attention_layernorm.weight", Slot(f"{ours}.mlp_norm.weight", 0, (hidden,))
    if config.has_qk_norms:
        yield f"{theirs}.self_attn.q_norm.weight", Slot(f"{ours}.query_norm.weight", 0, (config.head_dim,))
        yield f"{theirs}.self_attn.k_norm.weight", Slot(f"{ours}.key_norm.weight", 0, (config.head_dim,))
    for name, parameter, start, rows, columns, has_bias in projections:
        yield f"{theirs}.{name}.weight", Slot(f"{ours}.{parameter}.weight", start, (rows, columns), fp8)
        if fp8 is not None:
            shape, first = fp8.shape(rows, columns), start // config.rows_per_scale
            yield f"{theirs}.{name}.{fp8.scale_name}", Slot(f"{ours}.{parameter}.scales", first, shape, fp8, rows)
        if has_bias:
            yield f"{theirs}.{name}.bias", Slot(f"{ours}.{parameter}.bias", start, (rows,))


def fill(module: nn.Module, slots: dict[str, Slot], files: WeightFiles) -> None:
    """Copies the tensors into the module's parameters; their shapes were checked before. Raises as `copy_finite`."""
    total, done = sum(math.prod(slot.shape) for slot in slots.values()), 0
    for name in files.tensors:
        if name not in slots:
            continue
        slot = slots[name]
        if slot.fp8 is None:
            target = module.get_parameter(slot.parameter)[slot.start : slot.start + slot.shape[0]]
            copy_finite(target, files, name)
        else:
            _fill_fp8(module, slot, files, name)
        done += math.prod(slot.shape)
        logger.debug(PROGRESS, 100 * done / total)


def _fill_fp8(module: nn.Module, slot: Slot, files: WeightFiles, name: str) -> None:
    """Copies FP8 numbers and scales where the module keeps both, else their product; raises as `copy_finite`."""
    assert slot.fp8 is not None, "the tensor is FP8, or scales FP8"
    weight, values = module.get_parameter(slot.parameter.replace(".scales", ".weight")), files.read(name)
    is_kept = weight.dtype == FP8
    if not slot.num_rows:
        if not is_kept:
            scales = files.read(f"{name.removesuffix('weight')}{slot.fp8.scale_name}")
            values = dequantised(values, slot.fp8.by_row(scales, slot.shape[0]))
        copy_finite(weight[slot.start : slot.start + slot.shape[0]], files, name, values)
    elif is_kept:
        scales = module.get_parameter(slot.parameter)
        group = len(weight) // len(scales)
        values = slot.fp8.by_row(values, slot.num_rows)[::group]
        copy_finite(scales[slot.start : slot.start + len(values)], files, name, values)


def _pair_dimensions(decoder: Decoder) -> None:
    """Reorders the dimensions of queries and keys where only some of them are rotated; see `paired_dimensions`."""
    config = decoder.config
    if config.rope.rotary_dim(config.head_dim) == config.head_dim:
        return
    order = paired_dimensions(config.rope, config.head_dim).to(decoder.embedding.device)
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer), "a decoder consists of its own layers"
        assert layer.head_norms is None, "the norms of heads would have to be reordered, too"
        for parameter in layer.qkv.parameters():
            num_heads = config.num_heads + config.num_kv_heads
            heads = parameter[: config.q_size + config.kv_size].view(num_heads, config.head_dim, *parameter.shape[1:])
            heads.copy_(heads[:, order])


def copy_finite(target: torch.Tensor, files: WeightFiles, name: str, values: torch.Tensor | None = None) -> None:
    """Copies a tensor of a checkpoint, as many rows as `target` has, or `values`, which were made of it.

    Raises `CheckpointError` where a value is NaN or infinite in `target`'s dtype: with such a weight every logit is
    NaN, and the output means nothing.
    """
    target.copy_(files.read(name)[: len(target)] if values is None else values)
    values = target.to(torch.bfloat16) if target.dtype == FP8 else target
    least, greatest = (bound.item() for bound in values.aminmax())  # NaN if any value is
    if not (math.isfinite(least) and math.isfinite(greatest)):
        dtype = str(target.dtype).removeprefix("torch.")
        message = f"got values from {least} to {greatest} in {dtype}, supported: finite weights"
        raise CheckpointError(f"{files.path}: {files.tensors[name].file}: tensor {name}: {message}")


def check_tensors(files: WeightFiles, slots: dict[str, Slot], what: str, is_ignored: Callable[[str], bool]) -> None:
    """Raises `CheckpointError` unless the files hold these tensors and no others; `what` is what they make."""
    for name, info in files.tensors.items():
        accepted = slots[name].dtypes if name in slots else _DTYPES
        if info.dtype not in accepted and not is_ignored(name):
            reason = "no quantised weights" if accepted == _DTYPES else "quantization_config of config.json"
            message = f"got dtype {info.dtype}, supported: {', '.join(accepted)} ({reason})"
            raise CheckpointError(f"{files.path}: {info.file}: tensor {name}: {message}")
    if missing := [name for name in slots if name not in files.tensors]:
        raise CheckpointError(f"{files.path}: missing tensors: {_some(missing)}; config.json asks for them")
    if extra := [name for name in files.tensors if name not in slots and not is_ignored(name)]:
        message = f"the tensors of {what} by config.json"
        raise CheckpointError(f"{files.path}: unknown tensors: {_some(extra)}; supported: {message}")
    for name, slot in slots.items():
        info = files.tensors[name]
        if (info.shape or (1,)) != slot.shape:
            message = f"got shape {list(info.shape)}, config.json asks for {list(slot.shape)}"
            raise CheckpointError(f"{files.path}: {info.file}: tensor {name}: {message}")


def _is_ignored(name: str, config: ModelConfig) -> bool:
    # Older checkpoints hold RoPE's frequencies, which are computed here; a tied head is compared, not loaded.
    first = config.num_layers
    is_nextn = any(name.startswith(f"model.layers.{first + number}.") for number in range(config.num_nextn_layers))
    is_tied = name == "lm_head.weight" and config.tie_word_embeddings
    is_activations_scale = config.fp8 is not None and name.endswith(".input_scale")
    return is_nextn or is_tied or is_activations_scale or name.endswith(".rotary_emb.inv_freq")


def _check_tied_head(files: WeightFiles) -> None:
    if "lm_head.weight" not in files.tensors:
        return
    if not torch.equal(files.read("lm_head.weight"), files.read("model.embed_tokens.weight")):
        message = (
            "config.json: tie_word_embeddings: got true, but lm_head.weight differs from model.embed_tokens.weight"
        )
        raise CheckpointError(f"{files.path}: {message}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def fill_with_noise(module: nn.Module) -> None:
    """Fills a model's parameters where they are, in place, with the same values each time.

    Matrices ([out_features, in_features]) get a standard deviation of 1 / sqrt(in_features), so that activations keep
    their size from layer to layer; norms and the scales of FP8 weights are ones, and biases zeros.
    """
    generator = torch.Generator(next(module.parameters()).device).manual_seed(0)
    total, done = sum(parameter.numel() for parameter in module.parameters()), 0
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2 and not name.endswith("scales"):
                noise = torch.empty_like(parameter, dtype=torch.bfloat16) if parameter.dtype == FP8 else parameter
                parameter.copy_(noise.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            done += parameter.numel()
            logger.debug(PROGRESS, 100 * done / total)


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
            slots = dict(_head_slots(config))
            absent = [name for name, slot in slots.items() if slot.parameter in kind.optional]
            borrowed = {name: slots.pop(name) for name in absent if name not in files.tensors}
            if borrows:
                config = replace(config, borrowed=tuple(slot.parameter for slot in borrowed.values()))
                borrowed = {}
            check_tensors(files, slots, kind.name, partial(_is_ignored_in_head, config))
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


def _head_slots(config: HeadConfig) -> Iterator[tuple[str, Slot]]:
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


def _is_ignored_in_head(config: HeadConfig, name: str) -> bool:
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
