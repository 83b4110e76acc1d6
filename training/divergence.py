"""Losses of a draft: how far its distributions are from the target's, and how much of them overlaps."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.training.llama import Llama

TEMPERATURE = 0.8
"""Temperature of the distributions that are compared: drafts are used at about that."""
DEPTH_WEIGHT = 0.9
"""Weight of each depth's loss, relative to the depth before: a token counts only if those before are accepted."""
LOGIT_ROWS = {"cpu": 64, "cuda": 8192}
"""Rows whose logits are in memory together."""

LossAndOverlap = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps tokens, int64 [batch, length], to the loss, a scalar, and the overlap sum of min(p, q), a scalar or [depth]."""


def divergence(log_q: Tensor, log_p: Tensor, overlap_weight: float) -> tuple[Tensor, Tensor]:
    """Loss and mean overlap of a draft's distributions and the target's, by their logarithms [..., vocabulary].

    The overlap, sum of min(p, q), is the chance that rejection sampling accepts a token; KL alone would spend a small
    draft on the target's tail.
    """
    p = log_p.exp()
    overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
    kl = (p * (log_p - log_q)).sum(-1).mean()
    return kl + overlap_weight * (1.0 - overlap), overlap


def log_distribution(logits: Tensor) -> Tensor:
    """The logarithm of the distribution at the temperature that drafts are used at."""
    return (logits.float() / TEMPERATURE).log_softmax(-1)


class SharedOutputLoss(torch.autograd.Function):
    """KL and overlap of two distributions that one output makes of two states, some rows at a time.

    Logits of all rows are never in memory together; the gradient is computed with the loss.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        student: Tensor,
        teacher: Tensor,
        output: Tensor,
        temperature: float,
        overlap_weight: float,
        num_rows: int,
    ) -> tuple[Tensor, Tensor]:
        """``student``, ``teacher``: [rows, width], ``output``: [vocabulary, width]. Returns loss and overlap, means."""
        loss, overlap = student.new_zeros(2, dtype=torch.float32)
        gradient = torch.empty_like(student)
        for start in range(0, len(student), num_rows):
            places = slice(start, start + num_rows)
            log_p = (F.linear(teacher[places], output).float() / temperature).log_softmax(-1)
            log_q = (F.linear(student[places], output).float() / temperature).log_softmax(-1)
            p, q = log_p.exp(), log_q.exp()
            common = torch.minimum(p, q).sum()
            loss += (p * (log_p - log_q)).sum() + overlap_weight * (len(p) - common)
            overlap += common
            is_less = (q < p).to(q.dtype)
            slope = q - p - overlap_weight * q * (is_less - (is_less * q).sum(-1, keepdim=True))
            gradient[places] = F.linear((slope / (temperature * len(student))).to(output.dtype), output.T)
        ctx.save_for_backward(gradient)
        return loss / len(student), overlap / len(student)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return slope * gradient, None, None, None, None, None


def compare_states(
    pairs: Iterable[tuple[Tensor, Tensor]], output: Tensor, overlap_weight: float, depth_weight: float
) -> tuple[Tensor, Tensor]:
    """The loss, and each depth's overlap: [depth]. ``output``: the target's, bfloat16 [vocabulary, width].

    ``pairs``: for each depth the draft's states and the target's for the same tokens, [..., width].
    """
    loss, overlaps = torch.zeros((), device=output.device), []
    for depth, pair in enumerate(pairs):
        rows = [states.to(torch.bfloat16).flatten(0, -2).contiguous() for states in pair]
        settings = TEMPERATURE, overlap_weight, LOGIT_ROWS[output.device.type]
        part, overlap = SharedOutputLoss.apply(*rows, output, *settings)  # type: ignore[no-untyped-call]
        loss = loss + depth_weight**depth * part
        overlaps.append(overlap.detach())
    return loss / len(overlaps), torch.stack(overlaps)


def head_loss(head: Callable[[Tensor, Tensor], list[Tensor]], teacher: Llama, overlap_weight: float) -> LossAndOverlap:
    """Compares with the target what a head says at each depth, which reads embeddings and the target's states."""
    output = teacher.model.embed_tokens.weight.to(torch.bfloat16)

    def compare(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            with torch.no_grad():
                hidden, embedded = teacher.hidden(tokens), teacher.model.embed_tokens(tokens)
            found = head(embedded, hidden)
        pairs = ((states, hidden[:, depth : depth + states.shape[1]]) for depth, states in enumerate(found, start=1))
        return compare_states(pairs, output, overlap_weight, DEPTH_WEIGHT)

    return compare
