"""The tensors that a checkpoint must have, each with its place in the model."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from slipstream.common.errors import CheckpointError
from slipstream.services.models.families import FAMILIES, HeadNorms
from slipstream.services.models.head_config import (
    EMBEDDING,
    FC,
    FC_BIAS,
    OUTPUT,
    OUTPUT_TENSOR,
    DFlashConfig,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    HeadKind,
    MtpConfig,
)
from slipstream.services.models.quantization import FLOATS, Packing
from slipstream.services.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.experts_config import ExpertsConfig
    from slipstream.services.models.quantization import Fp8Weights, PackedWeights

logger = logging.getLogger(__name__)

_FP8_DTYPES = ("F8_E4M3",)
EMBEDDING_TENSOR = "embed_tokens.weight"
TARGET_EMBEDDING = f"model.{EMBEDDING_TENSOR}"
MODULE_OUTPUT = "shared_head.head.weight"
IDS_TENSOR = "d2t"
_TABLES = (IDS_TENSOR, "t2d")
_LAYER_NAME = re.compile(r"model\.layers\.(\d{1,9})\.", re.ASCII)
_FREQUENCIES = ".rotary_emb.inv_freq"
"""End of the names of RoPE's frequencies, which older checkpoints hold and which are computed here."""
_SHOWN = 3
"""Tensor names that an error lists at most."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a checkpoint's tensor: rows `[start, start + shape[0])` of a parameter."""

    parameter: str
    shape: tuple[int, ...]
    start: int = 0
    fp8: Fp8Weights | None = None
    """Set for a weight of FP8 numbers, and for its scales."""
    num_rows: int = 0
    """Rows that the tensor has FP8 scales for, or packed numbers; 0 if it has neither."""
    num_columns: int = 0
    """Columns of the packed weight that the tensor belongs to; else 0."""
    packed: PackedWeights | None = None
    """Set for a tensor of a packed weight; `is_part`: one that is read with the numbers."""
    is_part: bool = False
    expert: int | None = None
    """The expert of a stacked parameter."""
    is_stacked: bool = False
    """The tensor is one of all experts, [experts, in, out], gates and ups in turns; or of their biases."""
    dtypes: tuple[str, ...] = FLOATS
    """The dtypes that the tensor may have."""
    rows: tuple[tuple[int, int], ...] | None = None
    """The rows that a rank takes, from each of several ranges: of a weight, also where the tensor has its scales, or of
    each of the parts of a stacked one. None: all."""
    columns: tuple[int, int] | None = None
    """The columns of a weight that a rank takes. None: all."""

    @property
    def is_whole(self) -> bool:
        """True if the whole tensor is taken."""
        return self.rows is None and self.columns is None

    @property
    def num_taken(self) -> int:
        """Rows of the parameter that the tensor fills."""
        return self.num_rows or self.shape[0] if self.rows is None else sum(end - begin for begin, end in self.rows)


Slots = dict[str, Slot]
"""The tensors that a checkpoint must have, by name."""
_Projections = tuple[tuple[str, str, int, int, int, bool], ...]
"""Name in the checkpoint, ours, first row, rows, columns, whether there is a bias."""


def decoder_slots(config: ModelConfig, names: Collection[str]) -> Slots:
    """The tensors of a decoder. `names`: of those that there are, as some of packed weights may be plain."""
    vocab = (config.vocab_size, config.hidden_size)
    slots = {TARGET_EMBEDDING: Slot("embedding", vocab), "model.norm.weight": Slot("norm.weight", vocab[1:])}
    if not config.tie_word_embeddings:
        slots[OUTPUT_TENSOR] = Slot("head.weight", vocab)
    for index in range(config.num_layers):
        theirs, ours, experts = f"model.layers.{index}", f"layers.{index}", config.experts_of(index)
        slots |= _layer_slots(config, theirs, ours, experts, names=names)
        if experts is not None:
            slots |= _expert_slots(config, experts, theirs, ours, names)
    return slots


def head_slots(config: HeadConfig) -> Slots:
    """The tensors of a draft head."""
    layer = config.layer
    hidden = layer.hidden_size
    if isinstance(config, MtpConfig):
        return _module_slots(config)
    slots = {
        EMBEDDING_TENSOR: Slot(EMBEDDING, (layer.vocab_size, hidden)),
        OUTPUT_TENSOR: Slot(OUTPUT, (config.draft_vocab_size, hidden)),
    }
    if isinstance(config, EagleConfig):
        bias = {FC_BIAS: Slot("steps.0.fc.bias", (hidden,))} if config.has_fc_bias else {}
        slots |= {FC: Slot("steps.0.fc.weight", (hidden, 2 * hidden))} | bias
        return slots | _layer_slots(layer, "layers.0", "steps.0.layer", has_input_norm=False)
    slots |= {FC: Slot("fc.weight", (hidden, config.hidden_width)), "norm.weight": Slot("norm.weight", (hidden,))}
    if isinstance(config, DFlashConfig):
        slots["hidden_norm.weight"] = Slot("hidden_norm.weight", (hidden,))
        for name in (f"layers.{index}" for index in range(layer.num_layers)):
            slots |= _layer_slots(layer, name, name)
        return slots
    assert isinstance(config, Eagle3Config), "there are no other kinds"
    name = config.layer_name
    slots[f"{name}.hidden_norm.weight"] = Slot("hidden_norm.weight", (hidden,))
    return slots | _layer_slots(layer, name, "layer", input_size=2 * hidden)


def _module_slots(config: MtpConfig) -> Slots:
    """Embedding and output are those of the first module."""
    layer, first = config.layer, module_name(config, 0)
    hidden, vocab = layer.hidden_size, (layer.vocab_size, layer.hidden_size)
    slots = {f"{first}.{EMBEDDING_TENSOR}": Slot(EMBEDDING, vocab), f"{first}.{MODULE_OUTPUT}": Slot(OUTPUT, vocab)}
    for number in range(layer.num_layers):
        theirs, ours = module_name(config, number), f"steps.{number}"
        slots |= {
            f"{theirs}.enorm.weight": Slot(f"{ours}.embedding_norm.weight", (hidden,)),
            f"{theirs}.hnorm.weight": Slot(f"{ours}.state_norm.weight", (hidden,)),
            f"{theirs}.eh_proj.weight": Slot(f"{ours}.fc.weight", (hidden, 2 * hidden)),
            f"{theirs}.shared_head.norm.weight": Slot(f"{ours}.norm.weight", (hidden,)),
        }
        slots |= _layer_slots(layer, theirs, f"{ours}.layer")
    return slots


def module_name(config: MtpConfig, number: int) -> str:
    """Prefix of a module's tensors."""
    return f"model.layers.{config.first_layer + number}"


def _layer_slots(
    config: ModelConfig,
    theirs: str,
    ours: str,
    experts: ExpertsConfig | None = None,
    *,
    names: Collection[str] = (),
    input_size: int | None = None,
    has_input_norm: bool = True,
) -> Slots:
    """The tensors of a layer, `theirs` in the checkpoint and `ours` in the model, without experts but the shared one.

    `input_size`: width of attention's input; None for the hidden size.
    """
    hidden, mlp, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    width = hidden if input_size is None else input_size
    slots: Slots = {}
    family, mlp_name = FAMILIES[config.architecture], "mlp"
    if experts is not None:
        mlp, mlp_name = experts.shared_width, f"{experts.mixture.block}.{experts.mixture.shared}"
    for name, theirs_name in family.norms.items():
        if has_input_norm or name != "attention_norm":
            slots[f"{theirs}.{theirs_name}.weight"] = Slot(f"{ours}.{name}.weight", (hidden,))
    if config.head_norms is not HeadNorms.NONE:
        sizes = (config.head_dim, config.head_dim) if config.head_norms is HeadNorms.EACH else (q, kv)
        slots[f"{theirs}.self_attn.q_norm.weight"] = Slot(f"{ours}.query_norm.weight", sizes[:1])
        slots[f"{theirs}.self_attn.k_norm.weight"] = Slot(f"{ours}.key_norm.weight", sizes[1:])
    if config.has_sinks:
        slots[f"{theirs}.self_attn.sinks"] = Slot(f"{ours}.sinks", (config.num_heads,))
    has_qkv_bias, has_mlp_bias = config.has_qkv_bias, config.has_mlp_bias
    qkv: _Projections = (
        ("self_attn.q_proj", "qkv", 0, q, width, has_qkv_bias),
        ("self_attn.k_proj", "qkv", q, kv, width, has_qkv_bias),
        ("self_attn.v_proj", "qkv", q + kv, kv, width, has_qkv_bias),
    )
    gated: _Projections = (
        (f"{mlp_name}.gate_proj", "gate_up", 0, mlp, hidden, has_mlp_bias),
        (f"{mlp_name}.up_proj", "gate_up", mlp, mlp, hidden, has_mlp_bias),
        (f"{mlp_name}.down_proj", "down", 0, hidden, mlp, has_mlp_bias),
    )
    if family.has_fused_qkv:
        qkv = (("self_attn.qkv_proj", "qkv", 0, q + 2 * kv, width, has_qkv_bias),)
    if family.has_fused_mlp:
        gated = (("mlp.gate_up_proj", "gate_up", 0, 2 * mlp, hidden, has_mlp_bias), gated[-1])
    output = ("self_attn.o_proj", "output", 0, hidden, q, config.has_output_bias)
    for name, parameter, start, rows, columns, has_bias in (*qkv, output, *(gated if mlp else ())):
        weight = Slot(f"{ours}.{parameter}.weight", (rows, columns), start)
        slots |= _weight_slots(config, f"{theirs}.{name}", weight, names)
        if has_bias:
            slots[f"{theirs}.{name}.bias"] = Slot(f"{ours}.{parameter}.bias", (rows,), start)
    return slots


def _expert_slots(config: ModelConfig, experts: ExpertsConfig, theirs: str, ours: str, names: Collection[str]) -> Slots:
    """The tensors of a layer's experts and its router."""
    mixture, hidden, width, number = experts.mixture, config.hidden_size, experts.width, experts.num_experts
    block, ours_all = f"{theirs}.{mixture.block}", f"{ours}.experts"
    slots = {f"{block}.{mixture.router}.weight": Slot(f"{ours_all}.router.weight", (number, hidden))}
    if mixture.choice_bias is not None:
        slots[f"{block}.{mixture.choice_bias}"] = Slot(f"{ours_all}.choice_bias", (number,))
    if mixture.has_shared_gate:
        slots[f"{block}.{mixture.shared}_gate.weight"] = Slot(f"{ours}.shared_gate.weight", (1, hidden))
    if mixture.is_stacked:
        slots[f"{block}.{mixture.router}.bias"] = Slot(f"{ours_all}.router.bias", (number,))
        packed = None if config.packed is None or config.packed.is_of_ints else config.packed
        for name, ours_name, *shape in (
            ("gate_up_proj", "gate_up", hidden, 2 * width),
            ("gate_up_proj_bias", "gate_up_bias", 2 * width),
            ("down_proj", "down", width, hidden),
            ("down_proj_bias", "down_bias", hidden),
        ):
            slot, full = Slot(f"{ours_all}.{ours_name}", (number, *shape), is_stacked=True), f"{block}.experts.{name}"
            if len(shape) == 1 or packed is None or full in names:
                slots[full] = slot
            else:
                slots |= _packed_slots(packed, full, slot, (shape[1], shape[0]))
        return slots
    gate, up, down = mixture.projections
    for expert in range(number):
        for name, ours_name, start, rows, columns in (
            (gate, "gate_up", 0, width, hidden),
            (up, "gate_up", width, width, hidden),
            (down, "down", 0, hidden, width),
        ):
            weight = Slot(f"{ours_all}.{ours_name}", (rows, columns), start, expert=expert)
            slots |= _weight_slots(config, f"{block}.experts.{expert}.{name}", weight, names)
    return slots


def _weight_slots(config: ModelConfig, name: str, weight: Slot, names: Collection[str]) -> Slots:
    """The tensors of a weight: one, or those of a quantised one."""
    fp8, packed, (rows, columns) = config.fp8, config.packed, weight.shape
    if packed is not None and packed.is_of_ints and f"{name}.weight" not in names:
        return _packed_slots(packed, f"{name}.", weight, (rows, columns))
    if fp8 is None:
        return {f"{name}.weight": weight}
    scales = replace(
        weight,
        parameter=weight.parameter.replace(".weight", ".scales"),
        shape=fp8.shape(rows, columns),
        start=weight.start // config.rows_per_scale,
        fp8=fp8,
        num_rows=rows,
    )
    return {f"{name}.weight": replace(weight, fp8=fp8, dtypes=_FP8_DTYPES), f"{name}.{fp8.scale_name}": scales}


def _packed_slots(packed: PackedWeights, name: str, weight: Slot, size: tuple[int, int]) -> Slots:
    """The tensors of a packed weight, [rows, columns]; of all experts where these are stacked."""
    rows, columns = size
    before = weight.shape[:-2]
    return {
        f"{name}{end}": replace(
            weight,
            shape=(*before, *shape),
            dtypes=dtypes,
            num_rows=rows,
            num_columns=columns,
            packed=packed,
            is_part=end != packed.name,
        )
        for end, (shape, dtypes) in packed.parts(rows, columns).items()
    }


def checked_decoder_slots(files: WeightFiles, config: ModelConfig) -> Slots:
    """Returns `decoder_slots`. Raises `CheckpointError` unless the files have these tensors and no others."""
    slots = decoder_slots(config, files.tensors)
    check_tensors(files, slots, config.architecture, partial(_is_ignored, config))
    return slots


def checked_head_slots(files: WeightFiles, config: HeadConfig, kind: HeadKind) -> tuple[Slots, Slots]:
    """Returns the tensors that a head has, and those that the target's serve for; raises as `checked_decoder_slots`."""
    slots = head_slots(config)
    absent = [name for name, slot in slots.items() if slot.parameter in kind.optional]
    borrowed = {name: slots.pop(name) for name in absent if name not in files.tensors}
    check_tensors(files, slots, kind.name, partial(_is_ignored_in_head, config))
    return slots, borrowed


def weight_files(path: Path, config: ModelConfig, *, framework: str = "pt") -> WeightFiles:
    """Opens a decoder's files; of a multimodal model's, its text part's tensors, by the names that a decoder has."""
    if config.text_of is None:
        return WeightFiles(path, framework=framework)
    logger.info("of %s only the text part is loaded: requests have no images", config.text_of)
    return WeightFiles(path, framework=framework, name_of=_name_in_text_part)


def _name_in_text_part(name: str) -> str | None:
    for prefix, ours in (("language_model.", ""), ("model.language_model.", "model."), ("lm_head.", "lm_head.")):
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return None


def check_tensors(files: WeightFiles, slots: Slots, what: str, is_ignored: Callable[[str], bool]) -> None:
    """Raises `CheckpointError` unless the files hold these tensors and no others; `what` is what they make."""
    for name, info in files.tensors.items():
        accepted = slots[name].dtypes if name in slots else FLOATS
        if info.dtype not in accepted and not is_ignored(name):
            reason = "no quantised weights" if accepted == FLOATS else "quantization_config of config.json"
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
    is_empty_bias = is_gptq_bias(config, name)  # compared, not loaded
    return is_of_module or is_tied or is_activations_scale or is_empty_bias or name.endswith(_FREQUENCIES)


def is_gptq_bias(config: ModelConfig, name: str) -> bool:
    """True for the name of a bias; GPTQ's older checkpoints have zeros where the model has none."""
    return config.packed is not None and config.packed.packing is Packing.GPTQ and name.endswith(".bias")


def _is_ignored_in_head(config: HeadConfig, name: str) -> bool:
    if not isinstance(config, MtpConfig):
        return name in _TABLES or name.endswith(_FREQUENCIES)
    # The modules may lie in the target's own checkpoint, and each may have its copy of what they share.
    layer = _LAYER_NAME.match(name)
    if layer is None or int(layer[1]) < config.first_layer:
        return name.startswith("model.") or name == OUTPUT_TENSOR
    return name.endswith((f".{EMBEDDING_TENSOR}", f".{MODULE_OUTPUT}", _FREQUENCIES))
