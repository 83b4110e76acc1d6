"""Multi-token prediction modules for training (DeepSeek-V3, 2024): a decoder layer for each draft token.

Module i combines what module i - 1 says of position p, the target for i = 1, with the token at p + i, and predicts the
token at p + i + 1. If all drafts before are accepted, these tokens are the real ones: training on text is what happens
in use. ``state_dict()`` has DeepSeek's names but for the number of the layer.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

from slipstream.training.llama import Layer, Llama, LlamaShape, RMSNorm, RopeModule

_RIDGE = 1e-3
"""Regularisation of the fit, relative to the mean square of what it is fitted to."""


def fitted_map(inputs: Tensor, outputs: Tensor) -> Tensor:
    """The matrix [output size, input size] that maps rows of inputs to rows of outputs best."""
    gram = inputs.T @ inputs
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
    found: Tensor = torch.linalg.solve(gram, inputs.T @ outputs)
    return found.T


class MtpModule(Layer):
    """One module: embedding and state, each normed, are projected to the input of a decoder layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape, dropout=0.0)
        width = shape.hidden_size
        self.enorm = RMSNorm(width, shape.rms_norm_eps)
        self.hnorm = RMSNorm(width, shape.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(width, shape.rms_norm_eps)})

    def read(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Embeddings and states, normed and side by side: [batch, length, 2 * width]."""
        return torch.cat((self.enorm(embedded), self.hnorm(state)), dim=-1)

    def combine(self, embedded: Tensor, state: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """States after the last norm, [batch, length, width], from embeddings and states of the same shape."""
        layer_input = self.eh_proj(self.read(embedded, state))
        out: Tensor = self.shared_head["norm"](super().forward(layer_input, cos, sin))
        return out


class MtpHead(RopeModule):
    """The modules; embedding and output are the target's. At first one module serves all draft tokens."""

    def __init__(self, target: Llama, num_modules: int, tokens: Tensor) -> None:
        """Begins as the target's last layer and norm, after the linear map that predicts that layer's input best.

        ``tokens``: int64 [rows, length], text that the map is fitted to.
        """
        shape = target.shape
        super().__init__(shape.max_position_embeddings, shape.head_dim, shape.rope_theta)
        module = MtpModule(shape)
        module.load_state_dict(target.model.layers[-1].state_dict(), strict=False)
        module.shared_head["norm"].load_state_dict(target.model.norm.state_dict())
        with torch.no_grad():
            states = target.states(tokens)
            hidden, embedded = target.model.norm(states[-1]), target.model.embed_tokens(tokens)
            inputs = module.to(tokens.device).read(embedded[:, 1:], hidden[:, :-1]).flatten(0, 1).double()
            module.eh_proj.weight.copy_(fitted_map(inputs, states[-2][:, 1:].flatten(0, 1).double()))
        self.shape = shape
        self.steps = nn.ModuleList([module] * num_modules)

    def separate(self) -> None:
        """Gives each draft token a module of its own, a copy of the one that served it."""
        self.steps = nn.ModuleList(deepcopy(module) for module in self.steps)

    def forward(self, embedded: Tensor, hidden: Tensor) -> list[Tensor]:
        """States for each module, [batch, length - number of modules, width].

        ``embedded``: the tokens' embeddings, ``hidden``: the target's states after its last norm,
        [batch, length, width]. With those of module number j, from 0, at index i the target's output gives the
        distribution of the token at i + j + 2, as it does with the target's own at i + j + 1.
        """
        length = embedded.shape[1] - len(self.steps)
        states = [hidden[:, :length]]
        for number, module in enumerate(self.steps):
            assert isinstance(module, MtpModule), "the head consists of its own modules"
            following = embedded[:, number + 1 : number + 1 + length]
            states.append(module.combine(following, states[-1], self.cos[:length], self.sin[:length]))
        return states[1:]
