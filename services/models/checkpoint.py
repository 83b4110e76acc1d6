"""Loads a Hugging Face checkpoint into a decoder, or that of a draft head into a head.

A head's layout is that of the papers' authors or of other packages. Nothing takes memory before names, shapes and
dtypes of all tensors were compared with `config.json`.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import CheckpointError
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.decoder import Decoder, DecoderLayer, RMSNorm, paired_dimensions
from slipstream.services.models.families import HeadNorms
from slipstream.services.models.head_config import (
    HEADS,
    OUTPUT,
    OUTPUT_TENSOR,
    HeadConfig,
    MtpConfig,
    check_target,
)
from slipstream.services.models.heads import DraftHead, make_head
from slipstream.services.models.linear import FP8, Linear, dequantised
from slipstream.services.models.packed import check_values, mxfp4, mxfp4_codes, unpacked
from slipstream.services.models.packed_ints import PackedInts
from slipstream.services.models.sharding import sharded, sharded_slots
from slipstream.services.models.slots import (
    EMBEDDING_TENSOR,
    IDS_TENSOR,
    MODULE_OUTPUT,
    TARGET_EMBEDDING,
    Slot,
    Slots,
    check_tensors,
    checked_decoder_slots,
    checked_head_slots,
    is_gptq_bias,
    module_name,
    weight_files,
)
from slipstream.services.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from slipstream.services.models.quantization import PackedWeights
    from slipstream.services.models.ranks import Ranks

logger = logging.getLogger(__name__)

PROGRESS = "loading: %.0f %% of the weights, %.1f GB/s"
PROGRESS_S = 5.0
"""Seconds between two lines that say how far the loading is."""


class LoadFormat(enum.Enum):
    """The source of the weights, named as in vLLM and SGLang."""

    AUTO = "auto"
    """The directory's safetensors."""
    DUMMY = "dummy"
    """Random weights for measurements; the directory needs no more than config.json."""


def load_decoder(
    path: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat = LoadFormat.AUTO,
    decoder_class: type[Decoder] = Decoder,
    ranks: Ranks | None = None,
) -> Decoder:
    """Reads a checkpoint directory into a decoder that computes in `dtype`, whatever the files hold.

    `decoder_class`: `FusedDecoder` on a GPU, which works by kernels. `ranks`: of which this process is one, which reads
    its part only. Raises `CheckpointError` when the directory is not a whole checkpoint of a supported decoder,
    ConfigError where it cannot be split.
    """
    path = Path(path)
    config = ModelConfig.from_directory(path)
    own = config if ranks is None else sharded(config, ranks.rank)
    if load_format is LoadFormat.DUMMY:
        decoder = decoder_class(own, device=device, dtype=dtype)
        fill_with_noise(decoder)
    else:
        with weight_files(path, config) as files:
            slots = checked_decoder_slots(files, config)
            _check_unused_biases(files, slots, config)
            check_values(files, slots)
            if own.packed is not None:
                own = replace(own, packed=replace(own.packed, plain=_plain_weights(files, slots)))
            decoder = decoder_class(own, device=device, dtype=dtype)
            if own.rank.size > 1:  # the vocabulary's padding, and biases that rank 0 adds
                for parameter in decoder.parameters():
                    parameter.zero_()
            _fill(decoder, sharded_slots(slots, config, own.rank), files)
            _pair_dimensions(decoder)
            if config.has_offset_norms:
                _complete_norms(decoder)
            if config.tie_word_embeddings:
                _check_tied_output(files)
    decoder.pack()
    decoder.join(ranks)
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
            slots, borrowed = checked_head_slots(files, config, kind)
            if borrows:
                config = replace(config, borrowed=tuple(slot.parameter for slot in borrowed.values()))
                borrowed = {}
            _check_copies(files, config)
            token_ids = _token_ids(files, config)
            head = make(config, device=device, dtype=dtype)
            head.token_ids.copy_(token_ids)
            _fill(head, slots, files)
        for name, slot in borrowed.items():
            _copy_from_target(head, slot.parameter, name, path, target)
    head.pack()
    return head.eval()


def _fill(module: nn.Module, slots: Slots, files: WeightFiles) -> None:
    """Copies the tensors into the module's parameters; their shapes were checked before. Raises as `_copy_finite`."""
    progress = _Progress(module, sum(math.prod(slot.shape) for slot in slots.values()))
    for name in files.tensors:
        if name not in slots:
            continue
        slot = slots[name]
        if slot.is_part:
            pass  # read with the numbers
        elif slot.is_stacked:
            _fill_stacked(module, slot, files, name)
        elif slot.packed is not None:
            _fill_packed(module, slot, slot.packed, files, name)
        elif slot.fp8 is None:
            place = _place(module.get_parameter(slot.parameter), slot)
            _copy_finite(place, files, name, None if slot.is_whole else _read(files, name, slot))
        else:
            _fill_fp8(module, slot, files, name)
        progress.add(math.prod(slot.shape))


class _Progress:
    """Logs now and then what part of a module's weights is there, and the rate of all until then."""

    def __init__(self, module: nn.Module, num_values: int) -> None:
        self._num_values, self._num_done = num_values, 0
        self._gigabytes = sum(parameter.nbytes for parameter in module.parameters()) / 1e9
        self._began_at = self._said_at = time.monotonic()

    def add(self, num_values: int) -> None:
        """Counts values that were filled."""
        self._num_done += num_values
        now = time.monotonic()
        if now - self._said_at >= PROGRESS_S:
            self._said_at, part = now, self._num_done / self._num_values
            logger.info(PROGRESS, 100 * part, part * self._gigabytes / (now - self._began_at))


def _place(parameter: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The rows of a parameter that the slot is for."""
    return (parameter if slot.expert is None else parameter[slot.expert])[slot.start : slot.start + slot.num_taken]


def _read(files: WeightFiles, name: str, slot: Slot) -> torch.Tensor:
    """Reads the part of a tensor that a rank takes."""
    columns = () if slot.columns is None else (slice(*slot.columns),)
    rows = ((0, slot.shape[0]),) if slot.rows is None else slot.rows
    parts = [files.read(name, slice(*some), *columns) for some in rows]
    return torch.cat(parts) if parts else files.read(name, slice(0, 0), *columns)


def _taken(slot: Slot, values: torch.Tensor) -> torch.Tensor:
    """Selects the part that a rank takes of [rows, ...], perhaps with more rows at the end."""
    values = values if slot.columns is None else values[:, slice(*slot.columns)]
    if slot.rows is None:
        return values
    return torch.cat([values[slice(*some)] for some in slot.rows]) if slot.rows else values[:0]


def _fill_stacked(module: nn.Module, slot: Slot, files: WeightFiles, name: str) -> None:
    """Copies a tensor of all experts, or of their biases; raises as `_copy_finite`."""
    values = files.read(name)
    num_parts = 2 if "gate_up" in slot.parameter else 1
    scales = None if slot.packed is None else files.read(f"{name.removesuffix(slot.packed.name)}_scales")
    if scales is not None and (ints := _ints_of(module, slot)) is not None:
        on_device = (tensor.to(ints.bits.device) for tensor in (values, scales))
        for expert, (blocks, exponents) in enumerate(zip(*on_device, strict=True)):
            for part in range(num_parts):
                start = (expert * num_parts + part) * (ints.rows_per_expert // num_parts)
                ints.fill(start, mxfp4_codes(blocks[part::num_parts], exponents[part::num_parts]))
        return
    for expert, place in enumerate(module.get_parameter(slot.parameter)):
        own = values[expert] if scales is None else mxfp4(values[expert], scales[expert])
        own = own.T if scales is None and own.dim() == 2 else own
        for part, rows in enumerate(place.chunk(num_parts)):
            taken = _taken(slot, own[part::num_parts])
            _copy_finite(rows[: len(taken)], files, name, taken)


def _fill_packed(module: nn.Module, slot: Slot, layout: PackedWeights, files: WeightFiles, name: str) -> None:
    """Copies packed numbers where the module keeps them, else what they are worth; raises as `_copy_finite`."""
    ints = _ints_of(module, slot)
    if ints is not None:
        start = slot.start + (slot.expert or 0) * ints.rows_per_expert
        ints.fill(start, unpacked(layout, files, name, slot.num_rows, slot.num_columns, ints.bits.device))
    else:
        place = _place(module.get_parameter(slot.parameter), slot)
        weight = unpacked(layout, files, name, slot.num_rows, slot.num_columns, place.device)
        _copy_finite(place, files, name, weight.taken(slot).worth())


def _ints_of(module: nn.Module, slot: Slot) -> PackedInts | None:
    """Returns the weight that a tensor belongs to, where the module keeps it packed."""
    path, _, name = slot.parameter.rpartition(".")
    owner = module.get_submodule(path)
    return getattr(owner, "ints" if isinstance(owner, Linear) else f"{name}_ints", None)


def _plain_weights(files: WeightFiles, slots: Slots) -> frozenset[str]:
    """Returns `PackedWeights.plain`."""
    plain, order_of = set[str](), dict[str, torch.Tensor]()
    for name, slot in slots.items():
        layout = slot.packed
        if layout is None:
            plain.add(slot.parameter)
        elif layout.has_order and name.endswith(layout.order_name):
            groups = files.read(name)
            first, size = order_of.setdefault(slot.parameter, groups), layout.group_size or len(groups)
            in_order = torch.arange(len(groups), dtype=groups.dtype) // size
            # Of experts each would have an order of its own.
            has_whole_groups = torch.equal(groups if slot.expert is not None else groups.sort().values, in_order)
            if not has_whole_groups or not torch.equal(groups, first):
                plain.add(slot.parameter)
    return frozenset(plain)


def _fill_fp8(module: nn.Module, slot: Slot, files: WeightFiles, name: str) -> None:
    """Copies FP8 numbers and scales where the module keeps both, else their product; raises as `_copy_finite`."""
    assert slot.fp8 is not None, "the tensor is FP8, or scales FP8"
    weight = module.get_parameter(slot.parameter.replace(".scales", ".weight"))
    is_kept = weight.dtype == FP8
    if not slot.num_rows:
        if is_kept:
            values = _read(files, name, slot)
        else:
            scales = files.read(f"{name.removesuffix('weight')}{slot.fp8.scale_name}")
            values = _taken(slot, dequantised(files.read(name), slot.fp8.by_row(scales, slot.shape[0])))
        _copy_finite(_place(weight, slot), files, name, values)
    elif is_kept:
        scales = module.get_parameter(slot.parameter)
        group = len(weight) // len(scales)
        values = _taken(slot, slot.fp8.by_row(files.read(name), slot.num_rows))[::group]
        _copy_finite(scales[slot.start : slot.start + len(values)], files, name, values)


def _pair_dimensions(decoder: Decoder) -> None:
    """Reorders the dimensions of queries and keys where the checkpoint pairs others; see `paired_dimensions`."""
    config = decoder.config
    if not config.rope.reorders(config.head_dim):
        return
    order = paired_dimensions(config.rope, config.head_dim).to(decoder.embedding.device)
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer), "a decoder consists of its own layers"
        if config.head_norms is HeadNorms.EACH:
            for norm in (layer.query_norm, layer.key_norm):
                assert norm is not None, "the configuration says so"
                norm.weight.copy_(norm.weight[order])
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
    if not target.numel():
        return
    values = target.to(torch.bfloat16) if target.dtype == FP8 else target
    least, greatest = (bound.item() for bound in values.aminmax())  # NaN if any value is
    if not (math.isfinite(least) and math.isfinite(greatest)):
        dtype = str(target.dtype).removeprefix("torch.")
        raise files.error(name, f"got values from {least} to {greatest} in {dtype}, supported: finite weights")


def fill_with_noise(module: nn.Module) -> None:
    """Fills a model's parameters where they are, in place, with the same values each time.

    Matrices ([out_features, in_features], or one for each expert) get a standard deviation of 1 / sqrt(in_features), so
    that activations keep their size from layer to layer; norms and the scales of FP8 weights are ones, and biases
    zeros.
    """
    generator = torch.Generator(next(module.parameters()).device).manual_seed(0)
    progress = _Progress(module, sum(parameter.numel() for parameter in module.parameters()))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "ints." in name:
                pass  # by their module below
            elif name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() >= 2 and not name.endswith("scales"):
                noise = torch.empty_like(parameter, dtype=torch.bfloat16) if parameter.dtype == FP8 else parameter
                parameter.copy_(noise.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator))
            else:
                parameter.fill_(1.0)
            progress.add(parameter.numel())
        for part in module.modules():
            if isinstance(part, PackedInts):
                part.fill_with_noise(generator)


def _check_unused_biases(files: WeightFiles, slots: Slots, config: ModelConfig) -> None:
    for name in files.tensors:
        if name not in slots and is_gptq_bias(config, name) and files.read(name).any():
            raise files.error(name, "got numbers, supported: zeros, as by config.json there is no such bias")


def _check_tied_output(files: WeightFiles) -> None:
    if OUTPUT_TENSOR in files.tensors and not torch.equal(files.read(OUTPUT_TENSOR), files.read(TARGET_EMBEDDING)):
        reason = f"got true, but {OUTPUT_TENSOR} differs from {TARGET_EMBEDDING}"
        raise CheckpointError(f"{files.path}: config.json: tie_word_embeddings: {reason}")


def _check_copies(files: WeightFiles, config: HeadConfig) -> None:
    """Raises `CheckpointError` unless all modules share one embedding and one output."""
    if not isinstance(config, MtpConfig):
        return
    for part in (EMBEDDING_TENSOR, MODULE_OUTPUT):
        names = [f"{module_name(config, number)}.{part}" for number in range(config.layer.num_layers)]
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
    if IDS_TENSOR not in files.tensors:
        if size == vocab_size:
            return own
        raise CheckpointError(f"{files.path}: missing tensors: {IDS_TENSOR}; draft_vocab_size asks for it")
    info = files.tensors[IDS_TENSOR]
    if info.shape != (size,) or info.dtype not in ("I64", "I32"):
        raise files.error(IDS_TENSOR, f"got {info.dtype} {list(info.shape)}, supported: I64 [{size}]")
    ids = own + files.read(IDS_TENSOR)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) < size:
        accepted = "supported: target id - draft id"
        raise files.error(IDS_TENSOR, f"some of its ids are not below {vocab_size}, or there twice; {accepted}")
    return ids


def _copy_from_target(head: DraftHead, which: str, name: str, path: Path, target: Path | None) -> None:
    """Fills in the target's embedding or output, parameter `which`, that a head's checkpoint would have as `name`."""
    parameter = head.get_parameter(which)
    if target is None:
        raise CheckpointError(f"{path}: missing tensors: {name}; it can be the target's, if that is named")
    config = ModelConfig.from_directory(target)
    theirs = OUTPUT_TENSOR if which == OUTPUT and not config.tie_word_embeddings else TARGET_EMBEDDING
    with weight_files(target, config) as files:
        slots = {theirs: Slot("", (config.vocab_size, parameter.shape[1]))}
        check_tensors(files, slots, "the target", lambda name: name != theirs)
        # The two may be padded differently.
        _copy_finite(parameter[: config.vocab_size], files, theirs)
        parameter[config.vocab_size :].zero_()
