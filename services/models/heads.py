"""Draft heads: a layer, or one for each draft token, over the target's hidden states.

Entry p pairs a state at position p with the token at p + 1, and predicts the token at p + 2. The state is the target's
where that is known, and behind it what the head left for the entry before.

An EAGLE-3 head (Li et al., "EAGLE-3: Scaling up inference acceleration", 2025) fuses the inputs of three layers; its
`config.json` has the layout of the paper's authors, or of the `speculators` package. An EAGLE head ("EAGLE: Speculative
sampling requires rethinking feature uncertainty", 2024, and EAGLE-2) reads the output of the target's final norm.
So do modules for multi-token prediction ("DeepSeek-V3 technical report", 2024), each of which has keys and values of
its own: entry p of module i pairs what module i - 1 says of position p, for i = 1 the target's state, with the token at
p + i, and predicts the token at p + i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.common.errors import CheckpointError, MismatchError
from slipstream.common.worker.contract import FINAL_NORM
from slipstream.common.worker.layout import BufferName
from slipstream.services.models.attention import torch_attention
from slipstream.services.models.config import MAX_HIDDEN_SIZE, MAX_LAYERS, ModelConfig
from slipstream.services.models.config_fields import ConfigFields, is_integer
from slipstream.services.models.decoder import DecoderLayer, Linear, RMSNorm, empty_parameter, pack_linears
from slipstream.services.models.rope import Rotation, rotation_table
from slipstream.services.models.weight_files import WeightFiles, has_weights
from slipstream.services.worker.config import EAGLE, EAGLE3, algorithm_of_head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slipstream.services.models.attention import ForwardBatch, PagedKV
    from slipstream.services.models.decoder import Attend


EMBEDDING, OUTPUT = "embedding", "head.weight"
"""Parameters of a head for which the target's may serve."""
NUM_FUSED = 3
"""Hidden states of the target that are fused into one."""

_LAYER_ARCHITECTURE = "LlamaForCausalLM"
_AUTHORS_LAYER, _PACKAGES_LAYER = "midlayer", "layers.0"
FC, FC_BIAS, OUTPUT_TENSOR = "fc.weight", "fc.bias", "lm_head.weight"
"""Names of tensors."""
_REFUSED = ("norm_before_fc", "fc_norm", "norm_output")
"""Variants of the head that some packages can write."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """The shape of an EAGLE-3 head."""

    layer_name: str
    """Prefix of the layer's tensors: `midlayer` or `layers.0`."""
    has_normed_residual: bool
    """Whether the layer adds to the fused state after its norm (`norm_before_residual`)."""

    @classmethod
    def from_directory(cls, path: str | Path) -> Eagle3Config:
        """Takes the layout, and the sizes that `config.json` does not have, from the tensors, where there are any.

        Raises `CheckpointError` when the directory is no head of a supported layout.
        """
        fields, shapes = _fields(path, "an EAGLE-3 head"), _shapes(path, EAGLE3)
        is_speculators = fields.get("speculators_model_type") is not None
        _check_layout(fields, is_speculators=is_speculators)
        layer = _layer(fields.sub("transformer_layer_config") if is_speculators else fields)
        is_packages = f"{_PACKAGES_LAYER}.hidden_norm.weight" in shapes if shapes else is_speculators
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
    def from_directory(cls, path: str | Path) -> EagleConfig:
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
    def from_directory(cls, path: str | Path) -> MtpConfig:
        """Raises `CheckpointError` when the directory has no modules, or some of an unsupported kind."""
        fields = _fields(path, "a model with multi-token prediction modules")
        num_modules = fields.count("num_nextn_predict_layers", high=MAX_LAYERS)
        config = ModelConfig.from_directory(path)
        if config.fp8 is not None:
            raise fields.error("quantization_config", "none, with multi-token prediction modules")
        if config.rope.rotary_dim(config.head_dim) != config.head_dim:
            raise fields.error("partial_rotary_factor", "1, with multi-token prediction modules")
        if len(set(config.sliding_windows)) > 1:
            raise fields.error("layer_types", "the same for all layers, with multi-token prediction modules")
        windows = config.sliding_windows[:1] * num_modules
        return cls(
            layer=replace(config, num_layers=num_modules, sliding_windows=windows),
            draft_vocab_size=config.vocab_size,
            target_hidden_size=config.hidden_size,
            hidden_layers=(FINAL_NORM,),
            has_norms=True,
            first_layer=config.num_layers,
        )


def _fields(path: str | Path, what: str) -> ConfigFields:
    path = Path(path)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: config.json is missing; supported: {what}'s directory")
    return ConfigFields.of_file(path / "config.json")


def _shapes(path: str | Path, algorithm: str) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of a head's tensors, by their names; empty for a directory without weights.

    Raises `CheckpointError` where they are those of another kind of head, or cannot be read.
    """
    if not has_weights(Path(path)):
        return {}
    with WeightFiles(Path(path)) as files:
        shapes = {name: info.shape or (1,) for name, info in files.tensors.items()}
    found = algorithm_of_head(shapes)
    if found not in (None, algorithm):
        raise CheckpointError(f"{path}: its tensors are those of algorithm {found}, supported: {algorithm}")
    return shapes


def _layer(fields: ConfigFields) -> ModelConfig:
    """The one layer; `num_hidden_layers` is the target's in some heads, and another layer's tensors are refused."""
    layer = ModelConfig.from_fields(fields, _LAYER_ARCHITECTURE)
    layer = replace(layer, num_layers=1, sliding_windows=layer.sliding_windows[:1])
    if layer.fp8 is not None:
        raise fields.error("quantization_config", "none, with a draft head")
    return layer


def _check_layout(fields: ConfigFields, *, is_speculators: bool) -> None:
    if is_speculators:
        if fields.get("speculators_model_type") != "eagle3":
            raise fields.error("speculators_model_type", "'eagle3'")
        if not isinstance(fields.get("transformer_layer_config"), dict):
            raise fields.error("transformer_layer_config", "the layer's fields")
    for name in _REFUSED:
        if fields.get(name):
            raise fields.error(name, "none, or false")


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


class DraftHead(nn.Module):
    """A head. Its weights are left for a checkpoint to fill in (`load_head`)."""

    _rotation_table: torch.Tensor
    token_ids: torch.Tensor
    """[draft_vocab_size] int64: the target's id of each token of the draft's vocabulary."""
    samples_own_ids = False
    """True if tokens may be sampled from `own_logits`, over the draft's own vocabulary."""

    def __init__(self, config: HeadConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self._made_on, self._dtype = device, dtype
        layer = config.layer
        self.embedding = self._table(EMBEDDING, layer.vocab_size)
        self.head = Linear(self._table(OUTPUT, config.draft_vocab_size))
        table = rotation_table(layer.rope, layer.head_dim).to(device)
        self.register_buffer("_rotation_table", table, persistent=False)
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size, device=device), persistent=False)

    def _parameter(self, *shape: int) -> nn.Parameter:
        return empty_parameter(*shape, device=self._made_on, dtype=self._dtype)

    def _table(self, name: str, num_rows: int) -> nn.Parameter:
        return self._parameter(0 if name in self.config.borrowed else num_rows, self.config.layer.hidden_size)

    def borrow(self, lent: Mapping[BufferName, torch.Tensor]) -> None:
        """Takes the weights that the head has none of from those that verify lends. Raises `MismatchError`."""
        shape = (self.config.layer.vocab_size, self.config.layer.hidden_size)
        for name in self.config.borrowed:
            weight = lent.get(BufferName.OUTPUT if name == OUTPUT else BufferName.EMBEDDING)
            weight = lent.get(BufferName.EMBEDDING) if weight is None else weight  # where the output is tied to it
            if weight is None or (tuple(weight.shape), weight.dtype) != (shape, self._dtype):
                given = "nothing" if weight is None else f"{list(weight.shape)} of {weight.dtype}"
                raise MismatchError([f"{name}: draft borrows {list(shape)} of {self._dtype}, verify lends {given}"])
            self.get_parameter(name).data = weight

    def give_back(self) -> None:
        """Lets the borrowed weights go."""
        for name in self.config.borrowed:
            self.get_parameter(name).data = self._parameter(0, self.config.layer.hidden_size)

    @property
    def num_borrowed_bytes(self) -> int:
        """Bytes of the weights that the head borrows."""
        layer = self.config.layer
        return len(self.config.borrowed) * layer.vocab_size * layer.hidden_size * self._dtype.itemsize

    def _norm(self) -> RMSNorm:
        return RMSNorm(self._parameter(self.config.layer.hidden_size), self.config.layer.rms_norm_eps)

    @torch.inference_mode()
    def own_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Computes logits by the draft's own ids: [..., hidden_size] to [..., draft_vocab_size]."""
        logits: torch.Tensor = self.head(states)
        return logits

    @torch.inference_mode()
    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's states, [..., hidden_width], to states of the head, [..., hidden_size]."""
        return hidden

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, states: torch.Tensor, cache: PagedKV, module: int = 0) -> torch.Tensor:
        """Runs a batch's entries of a module, 0 for the first, and keeps their keys and values.

        `batch` has the position of each entry's state and the token that is paired with it; `states`:
        [B, W, hidden_size], or [N, hidden_size] if it is ragged. Returns the states for the next entries, or the next
        module's, the same shape; [M, hidden_size] of the last module where the batch says which outputs are read.
        """
        layer = self.config.layer
        tokens = batch.tokens.flatten().clamp(0, layer.vocab_size - 1)
        positions = batch.positions.flatten().clamp(0, layer.max_position_embeddings - 1)
        rotation = Rotation(self._rotation_table, positions)
        x = states.reshape(-1, layer.hidden_size)
        embedded, attend = F.embedding(tokens, self.embedding), torch_attention(layer, batch, cache)
        output = self._mix(module, x, embedded, rotation, attend)
        return output.view_as(states) if batch.outputs is None else output

    def _mix(
        self, module: int, states: torch.Tensor, embedded: torch.Tensor, rotation: Rotation, attend: Attend
    ) -> torch.Tensor:
        """Runs the layer on N states and the embeddings of their tokens, both [N, hidden_size], to the same."""
        raise NotImplementedError

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to [..., vocab_size] float32, by the target's ids; -inf where the draft has no token."""
        own = self.own_logits(states)
        logits = own.new_full((*own.shape[:-1], self.config.layer.vocab_size), float("-inf"), dtype=torch.float32)
        logits[..., self.token_ids] = own.to(torch.float32)
        return logits

    def pack(self) -> None:
        """Gives the weights their fastest layout; call it when they are complete."""
        pack_linears(self)


class Eagle3Head(DraftHead):
    """An EAGLE-3 head. It leaves its own layer's output, before the norm, for the next entry."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, device=device, dtype=dtype)
        hidden = config.layer.hidden_size
        self.fc = Linear(self._parameter(hidden, config.hidden_width))
        self.hidden_norm = self._norm()
        self.layer = DecoderLayer(config.layer, 0, device=device, dtype=dtype, input_size=2 * hidden)
        self.norm = self._norm()

    @torch.inference_mode()
    def own_logits(self, states: torch.Tensor) -> torch.Tensor:
        return super().own_logits(self.norm(states))

    @torch.inference_mode()
    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self.fc(hidden)
        return fused

    def _mix(
        self, module: int, states: torch.Tensor, embedded: torch.Tensor, rotation: Rotation, attend: Attend
    ) -> torch.Tensor:
        normed = self.hidden_norm(states)
        both = torch.cat((self.layer.attention_norm(embedded), normed), dim=-1)
        return self.layer.mix(normed if self.config.has_normed_residual else states, both, rotation, attend)


class HeadModule(nn.Module):
    """The part of an EAGLE head for one token: a product makes one state of embedding and state, a layer follows."""

    def __init__(self, config: EagleConfig, index: int, *, device: torch.device, dtype: torch.dtype) -> None:
        """`index`: of its keys and values."""
        super().__init__()
        layer = config.layer
        hidden = layer.hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return empty_parameter(*shape, device=device, dtype=dtype)

        self.fc = Linear(parameter(hidden, 2 * hidden), parameter(hidden) if config.has_fc_bias else None)
        self.layer = DecoderLayer(layer, index, device=device, dtype=dtype)
        self.embedding_norm, self.state_norm, self.norm = (
            RMSNorm(parameter(hidden), layer.rms_norm_eps) if config.has_norms else nn.Identity() for _ in range(3)
        )
        if not config.has_norms:
            self.layer.attention_norm = nn.Identity()  # type: ignore[assignment]

    def forward(self, states: torch.Tensor, embedded: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """See `DraftHead._mix`."""
        both = torch.cat((self.embedding_norm(embedded), self.state_norm(states)), dim=-1)
        output: torch.Tensor = self.norm(self.layer(self.fc(both), rotation, attend))
        return output


class EagleHead(DraftHead):
    """An EAGLE head, which has one module, or modules for multi-token prediction."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.steps = nn.ModuleList(
            HeadModule(config, index, device=device, dtype=dtype) for index in range(config.layer.num_layers)
        )

    def _mix(
        self, module: int, states: torch.Tensor, embedded: torch.Tensor, rotation: Rotation, attend: Attend
    ) -> torch.Tensor:
        output: torch.Tensor = self.steps[module](states, embedded, rotation, attend)
        return output
