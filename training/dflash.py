"""A DFlash drafter for training (Chen et al., 2026): layers over the target's states, which draft a block at once.

A block begins with a known token, its anchor, and has mask tokens after it; all of them see one another and the
target's states of the positions before the anchor. ``state_dict()`` has the names of published checkpoints.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.training.llama import MLP, Llama, LlamaShape, Projections, RMSNorm, RopeModule, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """``target`` gives the layers their shape."""

    target: LlamaShape
    mask_token_id: int
    """A token that text does not have."""
    num_layers: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    """Layers whose outputs are read, that of the last one after the final norm."""


class BlockAttention(Projections):
    """Attention of blocks to the states before them and to themselves."""

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x``: [batch, blocks, size, width]; ``context``: [batch, length, width], of the positions from 0 on.

        ``anchors``: int64 [batch, blocks], the position of each block's first token.
        """
        (batch, blocks, size, _), length = x.shape, context.shape[1]
        places = (anchors[..., None] + torch.arange(size, device=x.device)).flatten(1)
        block_cos, block_sin = cos[places][:, None], sin[places][:, None]

        def heads(projected: Tensor) -> Tensor:  # [batch, heads, tokens, head_dim]
            flat = projected.flatten(1, -2)
            return flat.view(batch, flat.shape[1], -1, self.head_dim).transpose(1, 2)

        keys = rotate(heads(self.k_proj(context)), cos[:length], sin[:length])
        values = heads(self.v_proj(context))
        own_keys = rotate(heads(self.k_proj(x)), block_cos, block_sin)
        own_values = heads(self.v_proj(x))
        query = rotate(heads(self.q_proj(x)), block_cos, block_sin) * self.head_dim**-0.5
        # [batch, kv heads, query heads of each, blocks, size, ...]
        query = query.reshape(batch, keys.shape[1], -1, blocks, size, self.head_dim)
        by_query = (*query.shape[:-1], length)
        scores = (query.flatten(3, 4) @ keys[:, :, None].transpose(-1, -2)).view(by_query)
        is_after = torch.arange(length, device=x.device) >= anchors[..., None]
        scores = scores.masked_fill(is_after[:, None, None, :, None], float("-inf"))
        by_block = (*keys.shape[:2], 1, blocks, size, self.head_dim)
        own_keys, own_values = own_keys.reshape(by_block), own_values.reshape(by_block)
        own_scores = query @ own_keys.transpose(-1, -2)
        weights = torch.cat((scores, own_scores.to(scores.dtype)), dim=-1).float().softmax(-1).to(values.dtype)
        mixed = (weights[..., :length].flatten(3, 4) @ values[:, :, None]).view(query.shape)
        mixed = mixed + weights[..., length:] @ own_values
        out: Tensor = self.o_proj(mixed.flatten(1, 2).permute(0, 2, 3, 1, 4).flatten(3))
        return out


class BlockLayer(nn.Module):
    """Attention and MLP, each after a norm of the block's own tokens."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = BlockAttention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, anchors, cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class BlockDrafter(RopeModule):
    """The drafter; embedding and output are the target's."""

    def __init__(self, shape: BlockShape, target: Llama) -> None:
        """Layers and norm begin as the target's last ones, the context as what the target says last."""
        layer, width = shape.target, shape.target.hidden_size
        super().__init__(layer.max_position_embeddings + shape.block_size, layer.head_dim, layer.rope_theta)
        self.shape = shape
        self.fc = nn.Linear(len(shape.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, layer.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(layer) for _ in range(shape.num_layers))
        self.norm = RMSNorm(width, layer.rms_norm_eps)
        with torch.no_grad():
            for own, theirs in zip(self.layers, target.model.layers[-shape.num_layers :], strict=True):
                own.load_state_dict(theirs.state_dict())
            self.norm.load_state_dict(target.model.norm.state_dict())
            nn.init.normal_(self.fc.weight, std=0.01)
            self.fc.weight[:, -width:] += torch.eye(width)

    def forward(self, tokens: Tensor, states: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
        """States after the norm, [batch, blocks, size - 1, width]: index j is for the token at anchor + j + 1.

        ``tokens``: int64 [batch, length]; ``states``: [batch, length, layers * width], the target's; ``embedding``:
        [vocabulary, width].
        """
        context = self.hidden_norm(self.fc(states))
        masks = anchors.new_full((*anchors.shape, self.shape.block_size - 1), self.shape.mask_token_id)
        x = F.embedding(torch.cat((tokens.gather(1, anchors)[..., None], masks), dim=-1), embedding)
        for layer in self.layers:
            x = layer(x, context, anchors, self.cos, self.sin)
        out: Tensor = self.norm(x[:, :, 1:])
        return out
