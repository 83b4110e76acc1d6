"""Outputs with a constraint are those of transformers with the same masks, beside bias and penalties, too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from slipstream import bundled
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.grammars import new_matcher
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.worker.config import WorkerConfig
from tests.harness.constraint_corpus import EOS_ID, bundled_tokenizer, cases
from tests.harness.local_grammar import LocalGrammar
from tests.harness.scheduler_server import Gateway, served_scheduler
from tests.harness.transformers_checkpoints import load_reference
from tests.scheduler.test_constraint_corpus import SETTINGS, specs_of

pytestmark = pytest.mark.timeout(180)

CASES = cases()[4::15]
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(logit_bias=tuple((token, 4.0 - token % 9) for token in range(20, 120))),
)
MAX_NEW_TOKENS = 30


class Masks(LogitsProcessor):
    """Leaves the tokens that a grammar allows after an output, found anew by all of it; after all other processors."""

    def __init__(self, spec: SequenceSpec) -> None:
        self._spec = spec

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher, output = new_matcher(bundled_tokenizer(), self._spec.grammar), input_ids[0, len(self._spec.prompt) :]
        assert matcher.try_consume_tokens(output.tolist()) == len(output)
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        is_allowed = np.unpackbits(words, bitorder="little", count=scores.shape[1]).astype(bool)
        return scores.masked_fill(torch.from_numpy(~is_allowed), float("-inf"))


def by_transformers(model: Any, spec: SequenceSpec) -> list[int]:
    """The output of a sequence."""
    bias = {(token,): value for token, value in spec.sampling.logit_bias}
    prompt = torch.tensor([spec.prompt])
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        logits_processor=LogitsProcessorList([Masks(spec)]),
        sequence_bias=bias or None,
        repetition_penalty=spec.sampling.repetition_penalty,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    return [int(token) for token in generated[0, len(spec.prompt) :]]


@cache
def expected() -> list[list[int]]:
    """The outputs of all sequences by transformers."""
    model = load_reference(bundled.target_dir())
    return [by_transformers(model, spec) for spec in make_specs()]


def make_specs() -> list[SequenceSpec]:
    """A greedy sequence of each case by each way to adjust logits."""
    plain = specs_of(CASES)[: 2 * len(CASES) : 2]
    return [
        replace(spec, job_id=f"{spec.job_id}-{number}", sampling=sampling, max_new_tokens=MAX_NEW_TOKENS)
        for spec in plain
        for number, sampling in enumerate(SAMPLINGS)
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("has_draft", [False, True])
async def test_tokens_are_those_of_transformers_with_the_same_masks(tmp_path: Path, *, has_draft: bool) -> None:
    specs = make_specs()
    roles = [make_verify(WorkerConfig(model=bundled.target_dir(), dtype="float32"), HostDevice(), 0)]
    if has_draft:
        roles.append(make_draft(WorkerConfig(model=bundled.standalone_dir(), dtype="float32"), HostDevice(), 0))
    serving = served_scheduler(tmp_path, *roles, grammars=LocalGrammar(), **SETTINGS)
    async with serving as scheduler, Gateway(scheduler) as gateway:
        await gateway.attached()
        outputs = await gateway.run(*specs)
    for spec, output, reference in zip(specs, outputs, expected(), strict=True):
        assert output == reference, spec
    changed = {tuple(map(tuple, outputs[number :: len(SAMPLINGS)])) for number in range(len(SAMPLINGS))}
    assert len(changed) == len(SAMPLINGS), "each adjustment says something"
