"""Accept lengths of JSON by what a draft knows of the constraint: nothing, spans that the grammar forces, or masks.

Along each output of the bundled target under a schema's masks, the draft's choices are those after the tokens before:
where a draft token differs, nothing after it counts. So one forward of each model gives the steps of all ways.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from llguidance import LLTokenizer
from transformers import AutoModelForCausalLM

from slipstream.benchmarks.runner import Row, Table, benchmark, host
from slipstream.bundled import standalone_dir, target_dir
from slipstream.common.grammars import load_grammar_tokenizer, new_matcher
from slipstream.common.settings import Settings, setting
from slipstream.gateway.grammar_compiler import GrammarSource
from slipstream.services.models.sampler import gumbel_noise

SCHEMAS = Path(__file__).resolve().parent.parent / "tests" / "harness" / "corpus" / "schemas.jsonl"
EOS_ID = 0
"""The bundled model's."""
NONE, STANDALONE = DRAFTS = ("none", "standalone")


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """The settings of a measurement."""

    draft_tokens: int = setting(4, help="Draft tokens of a step.", low=1, high=64)
    max_new_tokens: int = setting(60, help="Tokens of an output.", low=1, high=2000)


@dataclass(frozen=True, slots=True)
class Output:
    """An output of the target, and for each of its places what was known before it."""

    tokens: list[int]
    drafted: list[int]
    """The draft's choice after the tokens before."""
    masked: list[int]
    """The draft's choice among the tokens that the mask allows."""
    forced: list[list[int]]
    """The tokens that the grammar forces there."""


class Scores:
    """A model's scores along an output, with a sampling: the greatest is chosen."""

    def __init__(self, model: Any, temperature: float) -> None:
        self._model, self._temperature = model, temperature
        self._known: Any = None
        """Keys and values of the tokens so far."""
        self._num_known = 0

    def after(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab_size]: the scores after each of some more tokens."""
        with torch.inference_mode():
            found = self._model(torch.tensor([tokens]), past_key_values=self._known, use_cache=True)
        self._known = found.past_key_values
        logits: torch.Tensor = found.logits[0]
        places = torch.arange(self._num_known, self._num_known + len(tokens)) + 1
        self._num_known += len(tokens)
        if not self._temperature:
            return logits
        return logits / self._temperature + gumbel_noise(torch.full_like(places, 7), places, logits.shape[1])


class Generator:
    """Makes outputs under the masks of a schema."""

    def __init__(self, plan: Plan) -> None:
        vocab_size = json.loads((target_dir() / "config.json").read_text())["vocab_size"]
        self.tokenizer: LLTokenizer = load_grammar_tokenizer(target_dir(), vocab_size, [EOS_ID])
        self._source = GrammarSource(self.tokenizer)
        made: Any = AutoModelForCausalLM
        self._models = [
            made.from_pretrained(path(), dtype=torch.float32).eval() for path in (target_dir, standalone_dir)
        ]
        self._plan = plan

    def output(self, schema: Any, temperature: float) -> Output:
        """The output that keeps to a schema."""
        answer = self._source.answer({"field": "json_schema", "value": json.dumps(schema), "special_tokens": {}})
        matcher = new_matcher(self.tokenizer, answer["grammar"])
        prompt = self.tokenizer.tokenize_str("value = ")
        target, draft = (Scores(model, temperature) for model in self._models)
        tokens, masks, forced = list[int](), list[np.ndarray](), list[list[int]]()
        while len(tokens) < self._plan.max_new_tokens and EOS_ID not in tokens:
            words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            scores = target.after(tokens[-1:] or prompt)[-1]
            masks.append(np.unpackbits(words, bitorder="little", count=len(scores)).astype(bool))
            forced.append(matcher.compute_ff_tokens())
            tokens.append(int(scores.masked_fill(~torch.from_numpy(masks[-1]), float("-inf")).argmax()))
            assert matcher.consume_token(tokens[-1])
        scores = draft.after([*prompt, *tokens])[len(prompt) - 1 : -1]
        masked = scores.masked_fill(~torch.from_numpy(np.stack(masks)), float("-inf"))
        return Output(tokens, scores.argmax(1).tolist(), masked.argmax(1).tolist(), forced)


Way = Callable[[Output, int, int], bool]
"""Whether the draft token at place `at` of the output is the target's, in a step that begins at place `begin`."""


def _is_drafted(output: Output, begin: int, at: int) -> bool:
    return output.drafted[begin : at + 1] == output.tokens[begin : at + 1]


def _is_forced(output: Output, begin: int, at: int) -> bool:
    span = output.forced[begin]
    return at - begin < len(span) and span[at - begin] == output.tokens[at]


def _is_first(output: Output, begin: int, at: int) -> bool:
    return output.masked[begin] == output.tokens[begin] and (at == begin or output.drafted[at] == output.tokens[at])


def _has_span(output: Output, begin: int, at: int) -> bool:
    return at - begin < len(output.forced[begin])


WAYS: dict[str, dict[str, Way]] = {
    NONE: {"forced spans": _is_forced},
    STANDALONE: {
        "nothing": _is_drafted,
        "forced spans in place of draft tokens": lambda *step: (
            _is_forced(*step) if _has_span(*step) else _is_drafted(*step)
        ),
        "forced spans before it drafts": lambda output, begin, at: (
            _is_forced(output, begin, at) if _has_span(output, begin, at) else output.drafted[at] == output.tokens[at]
        ),
        "the mask of its first token": _is_first,
        "the masks of all its tokens": lambda output, begin, at: output.masked[at] == output.tokens[at],
    },
}
"""By draft, what is known when it drafts."""


def accept_length(output: Output, way: Way, num_draft_tokens: int) -> float:
    """Tokens of a step in the mean."""
    begin = num_steps = 0
    while begin < len(output.tokens):
        end = begin
        while end - begin < num_draft_tokens and end < len(output.tokens) - 1 and way(output, begin, end):
            end += 1
        begin, num_steps = end + 1, num_steps + 1
    return len(output.tokens) / num_steps


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> None:
    """Measures the accept length of JSON by what a draft knows of its schema."""
    generator, table = Generator(plan), Table(file)
    schemas = [json.loads(line)["schema"] for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]
    for temperature in (0.0, 0.9):
        outputs = [generator.output(schema, temperature) for schema in schemas]
        for draft, ways in WAYS.items():
            for name, way in ways.items():
                found = mean(accept_length(output, way, plan.draft_tokens) for output in outputs)
                row: Row = {"draft": draft, "known": name, "temperature": temperature, "accept_length": round(found, 3)}
                spans = [span for output in outputs for span in output.forced]
                table.add(
                    row
                    | {
                        "num_outputs": len(outputs),
                        "num_tokens": sum(len(output.tokens) for output in outputs),
                        "forced_places": round(mean(bool(span) for span in spans), 3),
                        "host": host(),
                    }
                )
