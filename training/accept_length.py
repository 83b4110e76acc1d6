"""Accept length of a draft, measured offline on the target's own samples.

The target's token at a position is argmax(logits / T + g), the draft's the same with its own logits and the
same noise g. Whether they agree does not depend on how the tokens were batched into steps, so the target's text
is sampled once, the draft is run over it once, and the steps are walked afterwards.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from slipstream.services.models.sampler import gumbel_noise

# An output counts as varied below this repeated share; held-out code itself has 0.38 on average.
VARIED_BELOW = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Chains of ``num_draft_tokens``; greedy where ``temperature`` is 0; ``num_tokens`` after each prompt."""

    num_draft_tokens: int = 4
    temperature: float = 0.8
    num_tokens: int = 128
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Verify steps, and accepted draft tokens by their place in the chain (first place first)."""

    steps: int
    accepted: tuple[int, ...]


def walk(matches: Sequence[bool], setting: Setting) -> Walk:
    """Walk one output. ``matches[i]``: whether the draft agrees on output token i.

    Token 0 comes from prefill and belongs to no step. A step that begins within the output counts whole, even if
    it reaches past the end: ``matches`` covers ``num_tokens + num_draft_tokens`` tokens.
    """
    steps = 0
    accepted = [0] * setting.num_draft_tokens
    bonus = 0
    while bonus + 1 < setting.num_tokens:
        depth = 0
        while depth < setting.num_draft_tokens and matches[bonus + 1 + depth]:
            accepted[depth] += 1
            depth += 1
        steps += 1
        bonus += depth + 1
    return Walk(steps=steps, accepted=tuple(accepted))


def repeated_share(tokens: Sequence[int], n: int = 5) -> float:
    """Share of ``tokens`` that lie in an n-gram that occurs more than once in them."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    counts = Counter(grams)
    repeated = {i + j for i, gram in enumerate(grams) if counts[gram] > 1 for j in range(n)}
    return len(repeated) / len(tokens)


def _choose(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float) -> Tensor:
    """The tokens [rows] at ``positions`` given ``logits`` [rows, vocabulary], float32."""
    if temperature == 0.0:
        return logits.argmax(-1)
    return (logits / temperature + gumbel_noise(seeds, positions, logits.shape[-1])).argmax(-1)


@torch.inference_mode()
def generate(model: LlamaForCausalLM, prompts: list[list[int]], seed: int, setting: Setting) -> Tensor:
    """Sample the target's text after each prompt, past end-of-text tokens.

    Returns int64 [prompts, longest prompt + num_tokens + num_draft_tokens]; row i holds prompt i, then its
    output. Column and absolute position are the same, so that no row is padded: all rows advance together, and
    those still inside their prompt take the prompt's token.
    """
    lengths = [len(prompt) for prompt in prompts]
    count = max(lengths) + setting.num_tokens + setting.num_draft_tokens
    given = torch.full((len(prompts), count), -1, dtype=torch.int64)
    for row, prompt in zip(given, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    given = given.to(model.device)
    seeds = torch.full_like(given[:, 0], seed)
    rows = given.clone()
    cache = DynamicCache()
    begin = 0
    for column in range(min(lengths), count):
        step = model(rows[:, begin:column], past_key_values=cache, use_cache=True, logits_to_keep=1)
        chosen = _choose(step.logits[:, -1].float(), seeds, torch.full_like(seeds, column), setting.temperature)
        rows[:, column] = torch.where(given[:, column] >= 0, given[:, column], chosen)
        begin = column
    return rows


@torch.inference_mode()
def matches(draft: LlamaForCausalLM, rows: Tensor, lengths: list[int], seed: int, setting: Setting) -> Tensor:
    """Return for each output token whether the draft agrees: bool [rows, num_tokens + num_draft_tokens]."""
    hidden = draft.model(rows, use_cache=False).last_hidden_state
    index = torch.arange(len(rows), device=rows.device)
    seeds = torch.full_like(index, seed)
    columns = []
    for offset in range(setting.num_tokens + setting.num_draft_tokens):
        positions = torch.tensor(lengths, device=rows.device) + offset
        logits = draft.lm_head(hidden[index, positions - 1]).float()
        columns.append(_choose(logits, seeds, positions, setting.temperature) == rows[index, positions])
    return torch.stack(columns, dim=1)


def measure(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: list[list[int]], setting: Setting
) -> dict[str, object]:
    """Mean accept length over all prompts and seeds, per seed, and the share of repeated text."""
    lengths = [len(prompt) for prompt in prompts]
    walks: list[list[Walk]] = []
    outputs: list[list[int]] = []
    for seed in setting.seeds:
        rows = generate(target, prompts, seed, setting)
        agreed = matches(draft, rows, lengths, seed, setting).tolist()
        walks.append([walk(row, setting) for row in agreed])
        outputs += [row[n : n + setting.num_tokens] for row, n in zip(rows.tolist(), lengths, strict=True)]
    everything = [one for seed_walks in walks for one in seed_walks]
    shares = [repeated_share(output) for output in outputs]
    varied = [one for one, share in zip(everything, shares, strict=True) if share < VARIED_BELOW]
    steps = sum(one.steps for one in everything)
    places = [sum(one.accepted[k] for one in everything) for k in range(setting.num_draft_tokens)]
    return {
        "num_draft_tokens": setting.num_draft_tokens,
        "temperature": setting.temperature,
        "num_tokens": setting.num_tokens,
        "seeds": list(setting.seeds),
        "prompts": len(prompts),
        "mean_accept_length": _mean(everything),
        "mean_accept_length_per_seed": [_mean(seed_walks) for seed_walks in walks],
        "accepted_per_position": [place / steps for place in places],
        "verify_steps": steps,
        "repeated_5gram_share": sum(shares) / len(shares),
        "varied_outputs": len(varied),
        "varied_mean_accept_length": _mean(varied) if varied else None,
        "distinct_tokens": len({token for output in outputs for token in output}),
    }


def _mean(walks: list[Walk]) -> float:
    """1 + accepted draft tokens / verify steps."""
    return 1.0 + sum(sum(one.accepted) for one in walks) / sum(one.steps for one in walks)
