"""Draft heads: a layer, or one for each draft token, over the target's hidden states.

Entry p pairs a state at position p with the token at p + 1, and predicts the token at p + 2. The state is the target's
where that is known, and after it what the head left for the entry before.

An EAGLE-3 head (Li et al., "EAGLE-3: Scaling up inference acceleration", 2025) fuses the inputs of three layers; its
`config.json` has the layout of the paper's authors, or of the `speculators` package. An EAGLE head ("EAGLE: Speculative
sampling requires rethinking feature uncertainty", 2024, and EAGLE-2) reads the output of the target's final norm.
So do modules for multi-token prediction ("DeepSeek-V3 technical report", 2024), each of which has keys and values of
its own: entry p of module i pairs what module i - 1 says of position p, for i = 1 the target's state, with the token at
p + i, and predicts the token at p + i + 1.

A DFlash drafter (Chen et al., "DFlash: Block diffusion for flash speculative decoding", 2026) has no entries: each of
its layers has keys and values of the target's states, at their positions. After them comes a block, the bonus token and
mask tokens, whose tokens all see one another: one forward predicts the token at each mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.common.errors import MismatchError
from slipstream.common.wire.layout import BufferName
from slipstream.services.models.attention import ContextAttention, Rotation, TorchAttention
from slipstream.services.models.decoder import DecoderLayer, RMSNorm, rotation_table
from slipstream.services.models.head_config import EMBEDDING, OUTPUT, DFlashConfig, Eagle3Config, EagleConfig
from slipstream.services.models.linear import Linear, empty_parameter, pack_linears

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slipstream.services.models.attention import Attention, ForwardBatch
    from slipstream.services.models.head_config import HeadConfig
    from slipstream.services.models.paged_kv import PagedKV


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
        embedded, attend = F.embedding(tokens, self.embedding), TorchAttention(layer, batch, cache)
        output = self._mix(module, x, embedded, rotation, attend)
        return output.view_as(states) if batch.outputs is None else output

    def _mix(
        self, module: int, states: torch.Tensor, embedded: torch.Tensor, rotation: Rotation, attend: TorchAttention
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
        self, module: int, states: torch.Tensor, embedded: torch.Tensor, rotation: Rotation, attend: TorchAttention
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

    def forward(
        self, states: torch.Tensor, embedded: torch.Tensor, rotation: Rotation, attend: TorchAttention
    ) -> torch.Tensor:
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
        self, module: int, states: torch.Tensor, embedded: torch.Tensor, rotation: Rotation, attend: TorchAttention
    ) -> torch.Tensor:
        output: torch.Tensor = self.steps[module](states, embedded, rotation, attend)
        return output


class DFlashHead(DraftHead):
    """A DFlash drafter: call `keep` and `draft` in place of a forward."""

    config: DFlashConfig

    def __init__(self, config: DFlashConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.fc = Linear(self._parameter(config.layer.hidden_size, config.hidden_width))
        self.hidden_norm = self._norm()
        self.layers = nn.ModuleList(
            DecoderLayer(config.layer, index, device=device, dtype=dtype) for index in range(config.layer.num_layers)
        )
        self.norm = self._norm()

    @torch.inference_mode()
    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self.hidden_norm(self.fc(hidden))
        return fused

    @torch.inference_mode()
    def keep(self, context: ForwardBatch, states: torch.Tensor, cache: PagedKV) -> None:
        """Keeps keys and values of the target's states at a batch's positions. `states`: [N, hidden_size]."""
        rotation, attend = self._prepared(context, cache)
        for layer in self._stack:
            attend.keep(layer.index, self._qkv(layer, states), rotation, layer.head_norms)

    @torch.inference_mode()
    def draft(self, block: ForwardBatch, context: ForwardBatch, states: torch.Tensor, cache: PagedKV) -> torch.Tensor:
        """Keeps a context as `keep` does, and runs blocks of W tokens: [B, W, hidden_size], after the norm."""
        (context_rotation, keeping), (rotation, attend) = (self._prepared(batch, cache) for batch in (context, block))
        states, rotations = states.reshape(-1, states.shape[-1]), (context_rotation, rotation)
        x = F.embedding(block.tokens.flatten().clamp(0, len(self.embedding) - 1), self.embedding)
        output = self._run_layers(x, states, rotations, ContextAttention(keeping, attend, len(states)))
        return output.view(*block.tokens.shape, -1)

    @property
    def _stack(self) -> list[DecoderLayer]:
        return cast("list[DecoderLayer]", list(self.layers))

    def _prepared(self, batch: ForwardBatch, cache: PagedKV) -> tuple[Any, Any]:
        """Makes what layers share: the rotation, and attention."""
        positions = batch.positions.flatten().clamp(0, self.config.layer.max_position_embeddings - 1)
        return Rotation(self._rotation_table, positions), TorchAttention(self.config.layer, batch, cache)

    def _qkv(self, layer: DecoderLayer, states: torch.Tensor) -> torch.Tensor:
        qkv: torch.Tensor = layer.qkv(states)
        return qkv

    def _run_layers(
        self, x: torch.Tensor, states: torch.Tensor, rotations: tuple[Any, Any], attend: Attention[Any]
    ) -> torch.Tensor:
        """Runs all layers on a block's N tokens, [N, hidden_size]. `states`: of the context, an input of each layer."""
        for layer in self._stack:
            x = layer.mix(x, torch.cat((states, layer.attention_norm(x))), rotations, attend)
        normed: torch.Tensor = self.norm(x)
        return normed


def make_head(config: HeadConfig, *, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """Makes a head without its weights."""
    if isinstance(config, DFlashConfig):
        return DFlashHead(config, device=device, dtype=dtype)
    head_class: type[DraftHead] = EagleHead if isinstance(config, EagleConfig) else Eagle3Head
    return head_class(config, device=device, dtype=dtype)
