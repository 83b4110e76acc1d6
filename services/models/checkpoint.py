"""Loads a Hugging Face checkpoint into a decoder."""

from __future__ import annotations

import enum
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import CheckpointError
from slipstream.services.models.config import FAMILIES, ModelConfig
from slipstream.services.models.decoder import Decoder, DecoderLayer
from slipstream.services.models.quantization import FP8, dequantised
from slipstream.services.models.rope import paired_dimensions
from slipstream.services.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from slipstream.services.models.fp8_config import Fp8Weights

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
