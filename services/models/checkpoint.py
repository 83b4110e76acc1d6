"""Loads a Hugging Face checkpoint into a decoder, or that of a draft head into a head.

A head's layout is that of the papers' authors or of other packages. Nothing takes memory before names, shapes and
dtypes of all tensors were compared with `config.json`.
"""

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
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.decoder import Decoder, DecoderLayer, RMSNorm, paired_dimensions
from slipstream.services.models.families import FAMILIES, HeadNorms
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
from slipstream.services.models.heads import DraftHead, make_head
from slipstream.services.models.linear import FP8, dequantised
from slipstream.services.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from slipstream.services.models.config import Fp8Weights

logger = logging.getLogger(__name__)

PROGRESS = "loading: %.0f %%"
_DTYPES = ("F32", "F16", "BF16")
_FP8_DTYPES = ("F8_E4M3",)
_SHOWN = 3
"""Tensor names that an error lists at most."""
_EMBEDDING = "embed_tokens.weight"
_TARGET_EMBEDDING = f"model.{_EMBEDDING}"
_MODULE_OUTPUT = "shared_head.head.weight"
_LAYER_NAME = re.compile(r"model\.layers\.(\d{1,9})\.", re.ASCII)
_IDS = "d2t"
_TABLES = (_IDS, "t2d")
_FREQUENCIES = ".rotary_emb.inv_freq"
"""End of the names of RoPE's frequencies, which older checkpoints hold and which are computed here."""


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
    shape: tuple[int, ...]
    start: int = 0
    fp8: Fp8Weights | None = None
    """Set for a weight of FP8 numbers, and for its scales."""
    num_rows: int = 0
    """Rows that the tensor has scales for; 0 if it has no scales."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the tensor may have."""
        return _FP8_DTYPES if self.fp8 is not None and not self.num_rows else _DTYPES


Slots = dict[str, Slot]
"""The tensors that a checkpoint must have, by name."""
_Projections = tuple[tuple[str, str, int, int, int, bool], ...]
"""Name in the checkpoint, ours, first row, rows, columns, whether there is a bias."""


def load_decoder(
    path: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat = LoadFormat.AUTO,
    decoder_class: type[Decoder] = Decoder,
) -> Decoder:
    """Reads a checkpoint directory into a decoder that computes in `dtype`, whatever the files hold.

    `decoder_class`: `FusedDecoder` on a GPU, which works by kernels. Raises `CheckpointError` when the directory is not
    a whole checkpoint of a supported decoder.
    """
    path = Path(path)
    config = ModelConfig.from_directory(path)
    if load_format is LoadFormat.DUMMY:
        decoder = decoder_class(config, device=device, dtype=dtype)
        fill_with_noise(decoder)
    else:
        slots = _decoder_slots(config)
        with weight_files(path, config) as files:
            _check_tensors(files, slots, config.architecture, partial(_is_ignored, config))
            decoder = decoder_class(config, device=device, dtype=dtype)
            _fill(decoder, slots, files)
            _pair_dimensions(decoder)
            if config.has_offset_norms:
                _complete_norms(decoder)
            if config.tie_word_embeddings:
                _check_tied_output(files)
    decoder.pack()
    return decoder.eval()


def load_head(
    algorithm: str,
    path: str | Path,
    *,
    target: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat = LoadFormat.AUTO,
    borrows: bool = False,
    make: Callable[..., DraftHead] = make_head,
) -> DraftHead:
    """Reads a head that computes in `dtype`, whatever the files hold.

    `target` is the target's directory: its embedding and output serve a head that has none of its own. With `borrows`
    they are not read, where their sizes are the head's: verify lends them. `make`: `make_fused_head` on a GPU. Raises
    `CheckpointError` when the directory is not a whole head, or not one for this target.
    """
    path, kind = Path(path), HEADS[algorithm]
    config = kind.config(path)
    if target is not None:
        check_target(path, config, target)
    borrows = borrows and (target is None or config.layer.vocab_size == ModelConfig.from_directory(target).vocab_size)
    if load_format is LoadFormat.DUMMY:
        if borrows:
            config = replace(config, borrowed=kind.optional)
        head = make(config, device=device, dtype=dtype)
        fill_with_noise(head)
        head.token_ids.mul_(config.layer.vocab_size // config.draft_vocab_size)  # spread evenly over the target's
    else:
        with WeightFiles(path) as files:
            slots = _head_slots(config)
            absent = [name for name, slot in slots.items() if slot.parameter in kind.optional]
            borrowed = {name: slots.pop(name) for name in absent if name not in files.tensors}
            if borrows:
                config = replace(config, borrowed=tuple(slot.parameter for slot in borrowed.values()))
                borrowed = {}
            _check_tensors(files, slots, kind.name, partial(_is_ignored_in_head, config))
            _check_copies(files, config)
            token_ids = _token_ids(files, config)
            head = make(config, device=device, dtype=dtype)
            head.token_ids.copy_(token_ids)
            _fill(head, slots, files)
        for name, slot in borrowed.items():
            _copy_from_target(head, slot.parameter, name, path, target)
    head.pack()
    return head.eval()


def weight_files(path: Path, config: ModelConfig) -> WeightFiles:
    """Opens a decoder's files; of a multimodal model's, its text part's tensors, by the names that a decoder has."""
    if config.text_of is None:
        return WeightFiles(path)
    logger.info("of %s only the text part is loaded: requests have no images", config.text_of)
    return WeightFiles(path, name_of=_name_in_text_part)


def _name_in_text_part(name: str) -> str | None:
    for prefix, ours in (("language_model.", ""), ("model.language_model.", "model."), ("lm_head.", "lm_head.")):
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return None


def _decoder_slots(config: ModelConfig) -> Slots:
    vocab = (config.vocab_size, config.hidden_size)
    slots = {_TARGET_EMBEDDING: Slot("embedding", vocab), "model.norm.weight": Slot("norm.weight", vocab[1:])}
    if not config.tie_word_embeddings:
        slots[OUTPUT_TENSOR] = Slot("head.weight", vocab)
    for index in range(config.num_layers):
        slots |= _layer_slots(config, f"model.layers.{index}", f"layers.{index}")
    return slots


def _head_slots(config: HeadConfig) -> Slots:
    layer = config.layer
    hidden = layer.hidden_size
    if isinstance(config, MtpConfig):
        return _module_slots(config)
    slots = {
        _EMBEDDING: Slot(EMBEDDING, (layer.vocab_size, hidden)),
        OUTPUT_TENSOR: Slot(OUTPUT, (config.draft_vocab_size, hidden)),
    }
    if isinstance(config, EagleConfig):
        bias = {FC_BIAS: Slot("steps.0.fc.bias", (hidden,))} if config.has_fc_bias else {}
        slots |= {FC: Slot("steps.0.fc.weight", (hidden, 2 * hidden))} | bias
        return slots | _layer_slots(layer, "layers.0", "steps.0.layer", has_input_norm=False)
    assert isinstance(config, Eagle3Config), "there are two kinds"
    name = config.layer_name
    slots |= {
        FC: Slot("fc.weight", (hidden, config.hidden_width)),
        f"{name}.hidden_norm.weight": Slot("hidden_norm.weight", (hidden,)),
        "norm.weight": Slot("norm.weight", (hidden,)),
    }
    return slots | _layer_slots(layer, name, "layer", input_size=2 * hidden)


def _module_slots(config: MtpConfig) -> Slots:
    """Embedding and output are those of the first module."""
    layer, first = config.layer, _module_name(config, 0)
    hidden, vocab = layer.hidden_size, (layer.vocab_size, layer.hidden_size)
    slots = {f"{first}.{_EMBEDDING}": Slot(EMBEDDING, vocab), f"{first}.{_MODULE_OUTPUT}": Slot(OUTPUT, vocab)}
    for number in range(layer.num_layers):
        theirs, ours = _module_name(config, number), f"steps.{number}"
        slots |= {
            f"{theirs}.enorm.weight": Slot(f"{ours}.embedding_norm.weight", (hidden,)),
            f"{theirs}.hnorm.weight": Slot(f"{ours}.state_norm.weight", (hidden,)),
            f"{theirs}.eh_proj.weight": Slot(f"{ours}.fc.weight", (hidden, 2 * hidden)),
            f"{theirs}.shared_head.norm.weight": Slot(f"{ours}.norm.weight", (hidden,)),
        }
        slots |= _layer_slots(layer, theirs, f"{ours}.layer")
    return slots


def _module_name(config: MtpConfig, number: int) -> str:
    return f"model.layers.{config.first_layer + number}"


def _layer_slots(
    config: ModelConfig, theirs: str, ours: str, *, input_size: int | None = None, has_input_norm: bool = True
) -> Slots:
    """The tensors of a layer, `theirs` in the checkpoint and `ours` in the model.

    `input_size`: width of attention's input; None for the hidden size.
    """
    hidden, mlp, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    width = hidden if input_size is None else input_size
    slots: Slots = {}
    family = FAMILIES[config.architecture]
    for name, theirs_name in family.norms.items():
        if has_input_norm or name != "attention_norm":
            slots[f"{theirs}.{theirs_name}.weight"] = Slot(f"{ours}.{name}.weight", (hidden,))
    if config.head_norms is not HeadNorms.NONE:
        sizes = (config.head_dim, config.head_dim) if config.head_norms is HeadNorms.EACH else (q, kv)
        slots[f"{theirs}.self_attn.q_norm.weight"] = Slot(f"{ours}.query_norm.weight", sizes[:1])
        slots[f"{theirs}.self_attn.k_norm.weight"] = Slot(f"{ours}.key_norm.weight", sizes[1:])
    has_qkv_bias, has_mlp_bias, fp8 = config.has_qkv_bias, config.has_mlp_bias, config.fp8
    qkv: _Projections = (
        ("self_attn.q_proj", "qkv", 0, q, width, has_qkv_bias),
        ("self_attn.k_proj", "qkv", q, kv, width, has_qkv_bias),
        ("self_attn.v_proj", "qkv", q + kv, kv, width, has_qkv_bias),
    )
    gate_up: _Projections = (
        ("mlp.gate_proj", "gate_up", 0, mlp, hidden, has_mlp_bias),
        ("mlp.up_proj", "gate_up", mlp, mlp, hidden, has_mlp_bias),
    )
    if family.has_fused_qkv:
        qkv = (("self_attn.qkv_proj", "qkv", 0, q + 2 * kv, width, has_qkv_bias),)
    if family.has_fused_mlp:
        gate_up = (("mlp.gate_up_proj", "gate_up", 0, 2 * mlp, hidden, has_mlp_bias),)
    for name, parameter, start, rows, columns, has_bias in (
        *qkv,
        *gate_up,
        ("self_attn.o_proj", "output", 0, hidden, q, config.has_output_bias),
        ("mlp.down_proj", "down", 0, hidden, mlp, has_mlp_bias),
    ):
        slots[f"{theirs}.{name}.weight"] = Slot(f"{ours}.{parameter}.weight", (rows, columns), start, fp8)
        if fp8 is not None:
            scales = Slot(
                f"{ours}.{parameter}.scales", fp8.shape(rows, columns), start // config.rows_per_scale, fp8, rows
            )
            slots[f"{theirs}.{name}.{fp8.scale_name}"] = scales
        if has_bias:
            slots[f"{theirs}.{name}.bias"] = Slot(f"{ours}.{parameter}.bias", (rows,), start)
    return slots


def _fill(module: nn.Module, slots: Slots, files: WeightFiles) -> None:
    """Copies the tensors into the module's parameters; their shapes were checked before. Raises as `_copy_finite`."""
    total, done = sum(math.prod(slot.shape) for slot in slots.values()), 0
    for name in files.tensors:
        if name not in slots:
            continue
        slot = slots[name]
        if slot.fp8 is None:
            target = module.get_parameter(slot.parameter)[slot.start : slot.start + slot.shape[0]]
            _copy_finite(target, files, name)
        else:
            _fill_fp8(module, slot, files, name)
        done += math.prod(slot.shape)
        logger.debug(PROGRESS, 100 * done / total)


def _fill_fp8(module: nn.Module, slot: Slot, files: WeightFiles, name: str) -> None:
    """Copies FP8 numbers and scales where the module keeps both, else their product; raises as `_copy_finite`."""
    assert slot.fp8 is not None, "the tensor is FP8, or scales FP8"
    weight, values = module.get_parameter(slot.parameter.replace(".scales", ".weight")), files.read(name)
    is_kept = weight.dtype == FP8
    if not slot.num_rows:
        if not is_kept:
            scales = files.read(f"{name.removesuffix('weight')}{slot.fp8.scale_name}")
            values = dequantised(values, slot.fp8.by_row(scales, slot.shape[0]))
        _copy_finite(weight[slot.start : slot.start + slot.shape[0]], files, name, values)
    elif is_kept:
        scales = module.get_parameter(slot.parameter)
        group = len(weight) // len(scales)
        values = slot.fp8.by_row(values, slot.num_rows)[::group]
        _copy_finite(scales[slot.start : slot.start + len(values)], files, name, values)


def _pair_dimensions(decoder: Decoder) -> None:
    """Reorders the dimensions of queries and keys where the checkpoint pairs others; see `paired_dimensions`."""
    config = decoder.config
    if not config.rope.reorders(config.head_dim):
        return
    order = paired_dimensions(config.rope, config.head_dim).to(decoder.embedding.device)
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer), "a decoder consists of its own layers"
        assert config.head_norms is HeadNorms.NONE, "the norms of heads would have to be reordered, too"
        for parameter in layer.qkv.parameters():
            num_heads = config.num_heads + config.num_kv_heads
            heads = parameter[: config.q_size + config.kv_size].view(num_heads, config.head_dim, *parameter.shape[1:])
            heads.copy_(heads[:, order])


def _complete_norms(decoder: Decoder) -> None:
    """Adds 1 to the weights of all norms, which the checkpoint leaves out."""
    for module in decoder.modules():
        if isinstance(module, RMSNorm):
            module.weight.add_(1.0)


def _copy_finite(target: torch.Tensor, files: WeightFiles, name: str, values: torch.Tensor | None = None) -> None:
    """Copies a tensor of a checkpoint, as many rows as `target` has, or `values`, which were made of it.

    Raises `CheckpointError` where a value is NaN or infinite in `target`'s dtype: with such a weight every logit is
    NaN, and the output means nothing.
    """
    target.copy_(files.read(name)[: len(target)] if values is None else values)
    values = target.to(torch.bfloat16) if target.dtype == FP8 else target
    least, greatest = (bound.item() for bound in values.aminmax())  # NaN if any value is
    if not (math.isfinite(least) and math.isfinite(greatest)):
        dtype = str(target.dtype).removeprefix("torch.")
        raise files.error(name, f"got values from {least} to {greatest} in {dtype}, supported: finite weights")


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


def _check_tensors(files: WeightFiles, slots: Slots, what: str, is_ignored: Callable[[str], bool]) -> None:
    """Raises `CheckpointError` unless the files hold these tensors and no others; `what` is what they make."""
    for name, info in files.tensors.items():
        accepted = slots[name].dtypes if name in slots else _DTYPES
        if info.dtype not in accepted and not is_ignored(name):
            reason = "no quantised weights" if accepted == _DTYPES else "quantization_config of config.json"
            raise files.error(name, f"got dtype {info.dtype}, supported: {', '.join(accepted)} ({reason})")
    if missing := [name for name in slots if name not in files.tensors]:
        raise CheckpointError(f"{files.path}: missing tensors: {_some(missing)}; config.json asks for them")
    if extra := [name for name in files.tensors if name not in slots and not is_ignored(name)]:
        message = f"the tensors of {what} by config.json"
        raise CheckpointError(f"{files.path}: unknown tensors: {_some(extra)}; supported: {message}")
    for name, slot in slots.items():
        shape = files.tensors[name].shape
        if (shape or (1,)) != slot.shape:
            raise files.error(name, f"got shape {list(shape)}, config.json asks for {list(slot.shape)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _is_ignored(config: ModelConfig, name: str) -> bool:
    layers = range(config.num_layers, config.num_layers + config.num_nextn_layers)
    is_of_module = name.startswith(tuple(f"model.layers.{number}." for number in layers))
    is_tied = name == OUTPUT_TENSOR and config.tie_word_embeddings  # compared, not loaded
    is_activations_scale = config.fp8 is not None and name.endswith(".input_scale")
    return is_of_module or is_tied or is_activations_scale or name.endswith(_FREQUENCIES)


def _is_ignored_in_head(config: HeadConfig, name: str) -> bool:
    if not isinstance(config, MtpConfig):
        return name in _TABLES or name.endswith(_FREQUENCIES)
    # The modules may lie in the target's own checkpoint, and each may have its copy of what they share.
    layer = _LAYER_NAME.match(name)
    if layer is None or int(layer[1]) < config.first_layer:
        return name.startswith("model.") or name == OUTPUT_TENSOR
    return name.endswith((f".{_EMBEDDING}", f".{_MODULE_OUTPUT}", _FREQUENCIES))


def _check_tied_output(files: WeightFiles) -> None:
    if OUTPUT_TENSOR in files.tensors and not torch.equal(files.read(OUTPUT_TENSOR), files.read(_TARGET_EMBEDDING)):
        reason = f"got true, but {OUTPUT_TENSOR} differs from {_TARGET_EMBEDDING}"
        raise CheckpointError(f"{files.path}: config.json: tie_word_embeddings: {reason}")


def _check_copies(files: WeightFiles, config: HeadConfig) -> None:
    """Raises `CheckpointError` unless all modules share one embedding and one output."""
    if not isinstance(config, MtpConfig):
        return
    for part in (_EMBEDDING, _MODULE_OUTPUT):
        names = [f"{_module_name(config, number)}.{part}" for number in range(config.layer.num_layers)]
        there = [name for name in names if name in files.tensors]
        for name in there[1:]:
            if not torch.equal(files.read(there[0]), files.read(name)):
                raise files.error(name, f"it differs from {there[0]}; supported: modules that share them")
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
        raise files.error(_IDS, f"got {info.dtype} {list(info.shape)}, supported: I64 [{size}]")
    ids = own + files.read(_IDS)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) < size:
        accepted = "supported: target id - draft id"
        raise files.error(_IDS, f"some of its ids are not below {vocab_size}, or there twice; {accepted}")
    return ids


def _copy_from_target(head: DraftHead, which: str, name: str, path: Path, target: Path | None) -> None:
    """Fills in the target's embedding or output, parameter `which`, that a head's checkpoint would have as `name`."""
    parameter = head.get_parameter(which)
    if target is None:
        raise CheckpointError(f"{path}: missing tensors: {name}; it can be the target's, if that is named")
    config = ModelConfig.from_directory(target)
    theirs = OUTPUT_TENSOR if which == OUTPUT and not config.tie_word_embeddings else _TARGET_EMBEDDING
    with weight_files(target, config) as files:
        slots = {theirs: Slot("", (config.vocab_size, parameter.shape[1]))}
        _check_tensors(files, slots, "the target", lambda name: name != theirs)
        # The two may be padded differently.
        _copy_finite(parameter[: config.vocab_size], files, theirs)
        parameter[config.vocab_size :].zero_()
