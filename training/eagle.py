"""An EAGLE head for training (Li et al., 2024): one layer over the target's last states, rolled out as in use.

Entry p pairs the output of the target's last norm at position p with the token at p + 1, and predicts that output at
p + 1. Behind the last entry whose state is known, the head goes on with its own. ``state_dict()`` has the names of the
paper's checkpoints.
"""

import torch
from torch import Tensor, nn

from slipstream.training.eagle3 import ChainAttention
from slipstream.training.llama import MLP, Layer, Llama, LlamaShape, RMSNorm, RopeModule
from slipstream.training.mtp import fitted_map


class EagleLayer(nn.Module):
    """A decoder layer without a norm of attention's input."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = ChainAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = x + self.self_attn(x, cos, sin, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class EagleHead(RopeModule):
    """The head; embedding and output are the target's."""

    def __init__(self, target: Llama, tokens: Tensor) -> None:
        """Begins as the target's last layer and norm, after the linear map that predicts that layer's input best.

        The norms that it does not have are put into the weights beside them, as their means over ``tokens``, int64
        [rows, length]; the map is fitted to the same text.
        """
        shape = target.shape
        super().__init__(shape.max_position_embeddings, shape.head_dim, shape.rope_theta)
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size)
        layer = EagleLayer(shape)
        self.layers = nn.ModuleList([layer])
        self.to(tokens.device)
        self._begin(layer, target, tokens)

    @torch.no_grad()
    def _begin(self, layer: EagleLayer, target: Llama, tokens: Tensor) -> None:
        last = target.model.layers[-1]
        assert isinstance(last, Layer), "the target consists of its own layers"
        layer.load_state_dict(last.state_dict(), strict=False)
        states = target.states(tokens)
        scale = target.model.norm.weight / _size(states[-1])  # of the head's states, by those of the layers
        inside = states[-2] + last.self_attn(
            last.input_layernorm(states[-2]), target.cos[: tokens.shape[1]], target.sin[: tokens.shape[1]]
        )
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight.mul_(last.input_layernorm.weight / (_size(states[-2]) * scale))
        layer.post_attention_layernorm.weight.mul_(_size(inside * scale) / (_size(inside) * scale))
        for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
            output.weight.mul_(scale[:, None])
        hidden, embedded = target.model.norm(states[-1]), target.model.embed_tokens(tokens)
        inputs = torch.cat((embedded[:, 1:], hidden[:, :-1]), dim=-1).flatten(0, 1)
        self.fc.weight.copy_(fitted_map(inputs, (states[-2][:, 1:] * scale).flatten(0, 1)))
        self.fc.bias.zero_()

    def forward(self, embedded: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
        """States for each depth, [batch, length - depth, width].

        ``embedded``: the tokens' embeddings, ``hidden``: the output of the target's last norm, [batch, length, width].
        Those of depth j at index i are for the token at i + j + 2, as the target's at i + j + 1.
        """
        length = embedded.shape[1] - depth
        states, cache = [hidden[:, :length]], list[tuple[Tensor, Tensor]]()
        for step in range(depth):
            places = slice(step, step + length)
            x = self.fc(torch.cat((embedded[:, step + 1 : step + 1 + length], states[-1]), dim=-1))
            states.append(self.layers[0](x, self.cos[places], self.sin[places], cache))
        return states[1:]


def _size(states: Tensor) -> Tensor:
    """Mean over the places of the root mean square."""
    return states.square().mean(-1).sqrt().mean()
