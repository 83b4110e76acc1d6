"""The shapes of draft heads, as read from a checkpoint's `config.json` and the headers of its tensors (`heads.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream.common.errors import CheckpointError
from slipstream.common.wire.step import FINAL_NORM
from slipstream.services.models.config import MAX_HIDDEN_SIZE, MAX_LAYERS, ModelConfig
from slipstream.services.models.json_files import ConfigFields, is_integer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

EAGLE3, EAGLE, MTP, DFLASH = "eagle3", "eagle", "mtp", "dflash"
"""Algorithms that draft by a head."""
EMBEDDING, OUTPUT = "embedding", "head.weight"
"""Parameters of a head for which the target's may serve."""
NUM_FUSED = 3
"""Hidden states of the target that are fused into one."""
FC, FC_BIAS, OUTPUT_TENSOR = "fc.weight", "fc.bias", "lm_head.weight"
"""Names of tensors."""

_LAYER_ARCHITECTURE = "LlamaForCausalLM"
_HIDDEN_NORM = ".hidden_norm.weight"
_CONTEXT_NORM = "hidden_norm.weight"
_AUTHORS_LAYER, _PACKAGES_LAYER = "midlayer", "layers.0"
_REFUSED = ("norm_before_fc", "fc_norm", "norm_output")
"""Variants of the head that some packages can write."""
_BLOCK_FIELDS = "dflash_config"
_BLOCK_LAYERS = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
"""The architecture of a block drafter's layers, by `model_type`."""
_BLOCK_VALUES: dict[str, object] = {
    "causal": False,
    "is_causal": False,
    "sample_from_anchor": False,
    "use_swa": False,
    "projector_type": "dflash",
    "input_embedding_scale": 1,
    "output_multiplier": 1,
    "final_logit_softcapping": 0,
    "conv_kernel_size": 0,
    "selector_rank": 0,
    "markov_rank": 0,
}
"""Fields of later variants, each with the value that changes nothing."""
_LARGEST_BLOCK = 64


def algorithm_of_head(tensors: Iterable[str]) -> str | None:
    """Returns EAGLE3, EAGLE or DFLASH for the names of such a head's tensors. None: no such head.

    Names of `architectures` say less: `LlamaForCausalLM` is published for both, and for models.
    """
    names = set(tensors)
    if FC not in names:
        return None
    if _CONTEXT_NORM in names:
        return DFLASH
    return EAGLE3 if any(name.endswith(_HIDDEN_NORM) for name in names) else EAGLE


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """The shape of a head."""

    layer: ModelConfig
    """Its layer, `num_layers` of them where it has modules; `vocab_size` is the target's."""
    draft_vocab_size: int
    target_hidden_size: int
    hidden_layers: tuple[int, ...]
    """The target's layers whose inputs it reads, or FINAL_NORM; empty for those of EAGLE-3's paper."""
    borrowed: tuple[str, ...] = ()
    """Parameters that verify lends (`DraftHead.borrow`), so that the head takes no memory for them."""

    @property
    def hidden_width(self) -> int:
        """Width of what the head reads of the target at each position."""
        return (len(self.hidden_layers) or NUM_FUSED) * self.target_hidden_size

    @property
    def tokens_ahead(self) -> int:
        """Tokens after a position that the head's keys and values there depend on; 0 counts as 1."""
        return self.layer.num_layers

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens that it drafts in a step; 0: any number."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """The shape of an EAGLE-3 head."""

    layer_name: str
    """Prefix of the layer's tensors: `midlayer` or `layers.0`."""
    has_normed_residual: bool
    """Whether the layer adds to the fused state after its norm (`norm_before_residual`)."""

    @classmethod
    def from_directory(cls, path: Path) -> Eagle3Config:
        """Takes the layout, and the sizes that `config.json` does not have, from the tensors, where there are any.

        Raises `CheckpointError` when the directory is no head of a supported layout.
        """
        fields, shapes = _fields(path, "an EAGLE-3 head"), _shapes(path, EAGLE3)
        is_speculators = fields.get("speculators_model_type") is not None
        if is_speculators:
            if fields.get("speculators_model_type") != "eagle3":
                raise fields.error("speculators_model_type", "'eagle3'")
            if not isinstance(fields.get("transformer_layer_config"), dict):
                raise fields.error("transformer_layer_config", "the layer's fields")
        for name in _REFUSED:
            if fields.get(name):
                raise fields.error(name, "none, or false")
        layer = _layer(fields.sub("transformer_layer_config") if is_speculators else fields)
        is_packages = f"{_PACKAGES_LAYER}{_HIDDEN_NORM}" in shapes if shapes else is_speculators
        vocab_size, hidden_size = layer.vocab_size, layer.hidden_size
        draft_vocab_size = min(shapes.get(OUTPUT_TENSOR, (vocab_size,))[0], vocab_size)
        target_hidden_size = shapes.get(FC, (hidden_size, NUM_FUSED * hidden_size))[-1] // NUM_FUSED
        return cls(
            layer=layer,
            layer_name=_PACKAGES_LAYER if is_packages else _AUTHORS_LAYER,
            draft_vocab_size=fields.count("draft_vocab_size", draft_vocab_size, high=vocab_size),
            target_hidden_size=fields.count("target_hidden_size", target_hidden_size, high=MAX_HIDDEN_SIZE),
            hidden_layers=_fused_layers(fields),
            has_normed_residual=bool(fields.get("norm_before_residual")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(HeadConfig):
    """The shape of an EAGLE head."""

    has_fc_bias: bool = False
    has_norms: bool = False
    """Whether embedding, state, attention's input and the output are normed; EAGLE norms none of them."""

    @classmethod
    def from_directory(cls, path: Path) -> EagleConfig:
        """Raises `CheckpointError` when the directory is no head of a supported layout."""
        fields, shapes = _fields(path, "an EAGLE head"), _shapes(path, EAGLE)
        layer = _layer(fields)
        return cls(
            layer=layer,
            draft_vocab_size=layer.vocab_size,
            target_hidden_size=layer.hidden_size,
            hidden_layers=(FINAL_NORM,),
            has_fc_bias=FC_BIAS in shapes if shapes else bool(fields.get("bias")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(EagleConfig):
    """The shape of modules for multi-token prediction."""

    first_layer: int
    """Number of the first module among the target's layers, in the names of tensors."""

    @classmethod
    def from_directory(cls, path: Path) -> MtpConfig:
        """Raises `CheckpointError` when the directory has no modules, or some of an unsupported kind."""
        fields = _fields(path, "a model with multi-token prediction modules")
        num_modules = fields.count("num_nextn_predict_layers", high=MAX_LAYERS)
        config = ModelConfig.from_directory(path)
        for name, is_supported, accepted in (
            ("quantization_config", config.fp8 is None and config.packed is None, "none"),
            ("architectures", config.has_llama_layers and not config.layer_ropes, "layers as Llama's"),
            ("partial_rotary_factor", not config.rope.reorders(config.head_dim), "1"),
            ("layer_types", len(set(config.sliding_windows)) <= 1, "the same for all layers"),
        ):
            if not is_supported:
                raise fields.error(name, f"{accepted}, with multi-token prediction modules")
        windows = config.sliding_windows[:1] * num_modules
        return cls(
            layer=replace(config, num_layers=num_modules, sliding_windows=windows),
            draft_vocab_size=config.vocab_size,
            target_hidden_size=config.hidden_size,
            hidden_layers=(FINAL_NORM,),
            has_norms=True,
            first_layer=config.num_layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """The shape of a DFlash drafter, `layer.num_layers` of whose layers draft a block in one forward."""

    block_size: int
    """Tokens of a block: the bonus token, and those that are drafted."""
    mask_token_id: int
    """The input where a token is drafted."""

    @property
    def tokens_ahead(self) -> int:
        return 0

    @property
    def max_draft_tokens(self) -> int:
        return self.block_size - 1

    @classmethod
    def from_directory(cls, path: Path) -> DFlashConfig:
        """Raises `CheckpointError` when the directory is no drafter of a supported layout."""
        fields = _fields(path, "a DFlash drafter")
        _shapes(path, DFLASH)
        if not isinstance(fields.get(_BLOCK_FIELDS), dict):
            raise fields.error(_BLOCK_FIELDS, "an object with target_layer_ids and mask_token_id")
        own = fields.sub(_BLOCK_FIELDS)
        _check_block(fields, own)
        layer = _unquantised(fields, ModelConfig.from_fields(fields, _BLOCK_LAYERS[fields.get("model_type")]))
        if any(layer.sliding_windows):
            raise fields.error("layer_types", "full_attention, the same for all layers")
        layers, mask = own.get("target_layer_ids"), own.get("mask_token_id")
        are_layers = isinstance(layers, list) and all(
            is_integer(number) and 0 <= number < MAX_LAYERS for number in layers
        )
        if not layers or not are_layers:
            raise own.error("target_layer_ids", "a list of numbers of layers")
        if not is_integer(mask) or not 0 <= mask < layer.vocab_size:
            raise own.error("mask_token_id", f"a token id below vocab_size = {layer.vocab_size}")
        num_layers = fields.get("num_target_layers")
        where = own if fields.get("block_size") is None else fields
        if not is_integer(block_size := where.get("block_size")) or not 2 <= block_size <= _LARGEST_BLOCK:
            raise where.error("block_size", f"an integer from 2 to {_LARGEST_BLOCK}")
        return cls(
            layer=layer,
            draft_vocab_size=layer.vocab_size,
            target_hidden_size=layer.hidden_size,
            # They are numbered by their outputs, of which the last layer's is meant after the final norm.
            hidden_layers=tuple(FINAL_NORM if number + 1 == num_layers else number + 1 for number in layers),
            block_size=block_size,
            mask_token_id=mask,
        )


def _check_block(fields: ConfigFields, own: ConfigFields) -> None:
    """Raises `CheckpointError` for variants of a block drafter. `own`: the fields that are only a block drafter's."""
    if fields.get("speculators_model_type") is not None:
        raise fields.error("speculators_model_type", "none: the layout of DFlash's authors")
    for name, accepted in _BLOCK_VALUES.items():
        for given in (fields, own):
            if given.get(name) not in (None, accepted):
                raise given.error(name, f"none, or {accepted}")
    if fields.get("model_type") not in _BLOCK_LAYERS:
        raise fields.error("model_type", ", ".join(_BLOCK_LAYERS))


def _fields(path: Path, what: str) -> ConfigFields:
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: config.json is missing; supported: {what}'s directory")
    return ConfigFields.of_file(path / "config.json")


def _shapes(path: Path, algorithm: str) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of a head's tensors, by their names; empty for a directory without weights.

    Raises `CheckpointError` where they are those of another kind of head, or cannot be read.
    """
    # Imported here: the gateway's image has the command line, and not safetensors.
    from slipstream.services.models.weight_files import WeightFiles, has_weights

    if not has_weights(path):
        return {}
    with WeightFiles(path, framework="numpy") as files:  # which is imported sooner than PyTorch
        shapes = {name: info.shape or (1,) for name, info in files.tensors.items()}
    found = algorithm_of_head(shapes)
    if found not in (None, algorithm):
        raise CheckpointError(f"{path}: its tensors are those of algorithm {found}, supported: {algorithm}")
    return shapes


def _layer(fields: ConfigFields) -> ModelConfig:
    """The one layer; `num_hidden_layers` is the target's in some heads, and another layer's tensors are refused."""
    layer = ModelConfig.from_fields(fields, _LAYER_ARCHITECTURE)
    return _unquantised(fields, replace(layer, num_layers=1, sliding_windows=layer.sliding_windows[:1]))


def _unquantised(fields: ConfigFields, layer: ModelConfig) -> ModelConfig:
    if layer.fp8 is not None or layer.packed is not None:
        raise fields.error("quantization_config", "none, with a draft head")
    return layer


def _fused_layers(fields: ConfigFields) -> tuple[int, ...]:
    """Layers by their input, as vLLM and `speculators` number them; `eagle_config` numbers outputs, as SGLang does.

    An empty list is as none.
    """
    name, first = "eagle_aux_hidden_state_layer_ids", 0
    if fields.get(name) in (None, []):
        fields, first = fields.sub("eagle_config"), 1
    given = fields.get(name)
    if given in (None, []):
        return ()
    is_list = isinstance(given, list) and len(given) == NUM_FUSED
    if not is_list or any(not is_integer(layer) or not 0 <= layer <= MAX_LAYERS for layer in given):
        raise fields.error(name, f"{NUM_FUSED} numbers of layers")
    return tuple(layer + first for layer in given)


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of heads."""

    name: str
    """In messages."""
    config: Callable[[Path], HeadConfig]
    """Reads a directory's `config.json`. Raises `CheckpointError`."""
    optional: tuple[str, ...]
    """Parameters for which the target's serve where a checkpoint has none of its own."""


HEADS = {
    EAGLE3: HeadKind("an EAGLE-3 head", Eagle3Config.from_directory, (EMBEDDING,)),
    EAGLE: HeadKind("an EAGLE head", EagleConfig.from_directory, (EMBEDDING, OUTPUT)),
    MTP: HeadKind("multi-token prediction modules", MtpConfig.from_directory, (EMBEDDING, OUTPUT)),
    DFLASH: HeadKind("a DFlash drafter", DFlashConfig.from_directory, (EMBEDDING, OUTPUT)),
}
"""The kinds of heads by their algorithms."""


def check_target(path: Path, config: HeadConfig, target: Path) -> None:
    """Raises `CheckpointError` if a head is not for the target in the directory `target`."""
    asked, given = config.target_hidden_size, ModelConfig.from_directory(target)
    if asked != given.hidden_size:
        message = f"the head is for a target of hidden size {asked}, that of {target} is {given.hidden_size}"
        raise CheckpointError(f"{path}: {message}")
    last = max((layer for layer in config.hidden_layers if layer != FINAL_NORM), default=0)
    # Without num_target_layers a block drafter does not say that the last layer's output is meant after the norm.
    if last > given.num_layers - isinstance(config, DFlashConfig):
        message = f"the head reads layer {last} of its target, {target} has {given.num_layers}"
        raise CheckpointError(f"{path}: {message}")
