"""An EAGLE-3 head for training (Li et al., 2025): one layer over the target's fused states, rolled out as in use.

Entry p pairs the target's state at position p with the token at p + 1 and predicts the token at p + 2. Behind the
last entry whose state is known, the head goes on with its own states; training rolls out that chain from every
position at once. ``state_dict()`` has the names of the paper's checkpoints.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.training.llama import MLP, LlamaShape, Projections, RMSNorm, RopeModule, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """``layer``: the head's own, with the target's width, heads, vocabulary and RoPE."""

    layer: LlamaShape
    draft_vocab_size: int
    fused_layers: tuple[int, ...]
    """The target's layers whose inputs are fused."""


class ChainAttention(Projections):
    """Grouped-query attention along the chain of each position."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """``x``: [batch, length, input_size], the entries of one depth; ``cache`` has those of the depths before.

        Index i of depth j stands at position i + j. It sees depth 0 up to i, and its own chain.
        """
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cache.append((rotate(key, cos, sin), value))
        first_keys, first_values = cache[0]
        # [batch, kv heads, query heads of each, length, head_dim]
        query = (
            rotate(query, cos, sin).view(batch, first_keys.shape[1], -1, length, self.head_dim) * self.head_dim**-0.5
        )
        scores = query @ first_keys[:, :, None].transpose(-1, -2)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        chain = [(query * keys[:, :, None]).sum(-1, keepdim=True) for keys, _ in cache[1:]]
        weights = torch.cat((scores, *(score.to(scores.dtype) for score in chain)), dim=-1).float().softmax(-1)
        weights = weights.to(value.dtype)
        mixed = weights[..., :length] @ first_values[:, :, None]
        for depth, (_, values) in enumerate(cache[1:]):
            mixed = mixed + weights[..., length + depth, None] * values[:, :, None]
        out: Tensor = self.o_proj(mixed.flatten(1, 2).transpose(1, 2).flatten(2))
        return out


class MidLayer(nn.Module):
    """The one layer: embedding and state are normed apart, and the branches add to the state."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = ChainAttention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self, embedded: Tensor, state: Tensor, cos: Tensor, sin: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), dim=-1)
        x = state + self.self_attn(both, cos, sin, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Head(RopeModule):
    """The head, without an embedding: it uses the target's."""

    vocabulary: Tensor

    def __init__(
        self, shape: HeadShape, vocabulary: Tensor, norm: Tensor, output: Tensor, *, num_positions: int
    ) -> None:
        """``vocabulary``: int64 [draft_vocab_size], the target's ids of the draft's, ascending.

        Norm, output and fusion begin as the target's own last step, ``norm`` [width] and ``output``
        [draft_vocab_size, width]: what its last state says already. ``num_positions``: of the texts to train with.
        """
        layer, width = shape.layer, shape.layer.hidden_size
        super().__init__(num_positions, layer.head_dim, layer.rope_theta)
        self.shape = shape
        self.fc = nn.Linear(len(shape.fused_layers) * width, width, bias=False)
        self.midlayer = MidLayer(layer)
        self.norm = RMSNorm(width, layer.rms_norm_eps)
        self.lm_head = nn.Linear(width, shape.draft_vocab_size, bias=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)
        with torch.no_grad():
            self.fc.weight[:, -width:] += torch.eye(width)
            self.norm.weight.copy_(norm)
            self.lm_head.weight.copy_(output)

    def forward(self, embedded: Tensor, fused: Tensor, depth: int) -> list[Tensor]:
        """Logits over the draft's vocabulary, [batch, length - depth, draft_vocab_size] for each depth.

        ``embedded``: the tokens' embeddings, [batch, length, width]. ``fused``: [batch, length, 3 * width]. Those of
        depth j at index i are for the token at i + j + 2, as the target's at i + j + 1.
        """
        length = embedded.shape[1] - depth
        state = self.fc(fused[:, :length])
        cache: list[tuple[Tensor, Tensor]] = []
        logits = []
        for step in range(depth):
            places = slice(step, step + length)
            following = embedded[:, step + 1 : step + 1 + length]
            state = self.midlayer(following, state, self.cos[places], self.sin[places], cache)
            logits.append(self.lm_head(self.norm(state)))
        return logits
