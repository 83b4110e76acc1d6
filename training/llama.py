"""A Llama decoder for training: plain PyTorch, with dropout, under the names of Hugging Face's weights."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The shape of a decoder, under the names of Hugging Face's ``LlamaConfig``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 32
    vocab_size: int = 4096
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    """Root mean square layer norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class RopeModule(nn.Module):
    """A module with RoPE's tables, which no checkpoint has."""

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, head_dim: int, theta: float) -> None:
        """Cosines and sines, float32 [length, head_dim], the two halves alike (rotate-half RoPE)."""
        super().__init__()
        inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to ``x`` [batch, heads, length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Projections(nn.Module):
    """The matrices of grouped-query attention."""

    def __init__(self, shape: LlamaShape, input_size: int | None = None) -> None:
        """``input_size``: that of the layer unless it is given."""
        super().__init__()
        self.head_dim = shape.head_dim
        query_width = shape.num_attention_heads * self.head_dim
        kv_width = shape.num_key_value_heads * self.head_dim
        input_size = input_size or shape.hidden_size
        self.q_proj = nn.Linear(input_size, query_width, bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)


class Attention(Projections):
    """Causal grouped-query attention."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.head_dim).transpose(1, 2)

        query = rotate(heads(self.q_proj(x)), cos, sin)
        key = rotate(heads(self.k_proj(x)), cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, heads(self.v_proj(x)), is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each after a norm and added back after dropout."""

    def __init__(self, shape: LlamaShape, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class Trunk(nn.Module):
    """Embedding, layers and the last norm (the part that checkpoints call ``model``)."""

    def __init__(self, shape: LlamaShape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)


class Llama(RopeModule):
    """Llama with tied embeddings. ``state_dict()`` has the names of ``LlamaForCausalLM``."""

    def __init__(self, shape: LlamaShape, dropout: float = 0.0) -> None:
        super().__init__(shape.max_position_embeddings, shape.head_dim, shape.rope_theta)
        self.shape = shape
        self.model = Trunk(shape, dropout)
        self._initialise()

    def _initialise(self) -> None:
        depth = 2 * self.shape.num_hidden_layers
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / depth**0.5 if residual else 0.02)

    def states(self, tokens: Tensor) -> list[Tensor]:
        """Return the input of each layer and the output of the last one: [batch, length, width] each."""
        x = self.model.dropout(self.model.embed_tokens(tokens))
        length = tokens.shape[1]
        # RoPE in the activations' own dtype would lose whole positions in bfloat16: the tables stay float32.
        cos, sin = self.cos[:length], self.sin[:length]
        states = [x]
        for layer in self.model.layers:
            states.append(layer(states[-1], cos, sin))
        return states

    def hidden(self, tokens: Tensor) -> Tensor:
        """The last norm's output [batch, length, width] for ``tokens`` int64 [batch, length]."""
        out: Tensor = self.model.norm(self.states(tokens)[-1])
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] for ``tokens`` int64 [batch, length]."""
        return F.linear(self.hidden(tokens), self.model.embed_tokens.weight)
