"""Outputs of the corpus's constraints: valid, and the same tokens for every drafter, alone and in a batch of 16."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from slipstream import bundled
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.grammars import new_matcher
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.worker.config import DFLASH, EAGLE3, MTP, NGRAM, WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from tests.harness.constraint_corpus import EOS_ID, Case, bundled_tokenizer, cases
from tests.harness.local_grammar import LocalGrammar
from tests.harness.scheduler_server import Gateway, served_scheduler

pytestmark = pytest.mark.timeout(300)

CASES = cases()
IN_GROUP = 7
"""Cases of a batch: each greedy and sampled, with two outputs beside them that have no constraint."""
GROUPS = [CASES[begin : begin + IN_GROUP] for begin in range(0, len(CASES), IN_GROUP)]
TARGET = {"target": bundled.target_dir()}
DRAFTS = {
    "standalone": WorkerConfig(model=bundled.standalone_dir()),
    "eagle3": WorkerConfig(model=bundled.eagle3_dir(), algorithm=EAGLE3, **TARGET),
    "mtp": WorkerConfig(model=bundled.mtp_dir(), algorithm=MTP, **TARGET),
    "dflash": WorkerConfig(model=bundled.dflash_dir(), algorithm=DFLASH, **TARGET),
    "ngram": WorkerConfig(algorithm=NGRAM, **TARGET),
}
SIZES: dict[str, Any] = {"context_tokens": 96, "slots": 16, "page_tokens": 16, "grammar": "unix:/none"}
SETTINGS = SIZES | {"grammar_timeout_ms": 60_000}


@cache
def target() -> RoleEngine:
    return make_verify(WorkerConfig(model=bundled.target_dir()), HostDevice(), 0)


def specs_of(group: list[Case]) -> list[SequenceSpec]:
    """The sequences of a batch."""
    tokenizer = Tokenizer.from_file(str(bundled.target_dir() / "tokenizer.json"))
    grammars = [grammar for case in group for grammar in (case.grammar,) * 2]
    return [
        SequenceSpec(
            job_id=f"{number}",
            prompt=tuple(tokenizer.encode(f"value_{number} = ").ids),
            max_new_tokens=60,
            sampling=SamplingParams(temperature=0.9 * (number % 2), seed=number),
            stop_token_ids=frozenset({EOS_ID}),
            grammar=grammar,
        )
        for number, grammar in enumerate([*grammars, "", ""])
    ]


def check(case: Case, grammar: str, tokens: list[int]) -> None:
    """Raises for an output that does not keep to its constraint; one that is cut is the beginning of one that does."""
    if tokens[-1] == EOS_ID:
        case.check(bundled_tokenizer().decode_bytes(tokens[:-1]).decode())
    else:
        assert new_matcher(bundled_tokenizer(), grammar).try_consume_tokens(tokens) == len(tokens) == 60


async def run(folder: Path, draft: str | None, specs: list[SequenceSpec], num_alone: int = 0) -> list[list[int]]:
    """The outputs of sequences at once. The first `num_alone` have the same by themselves."""
    roles = [target()] if draft is None else [target(), make_draft(DRAFTS[draft], HostDevice(), 0)]
    serving = served_scheduler(folder, *roles, grammars=LocalGrammar(), **SETTINGS)
    async with serving as scheduler, Gateway(scheduler) as gateway:
        await gateway.attached()
        outputs = await gateway.run(*specs)
        assert [(await gateway.run(spec))[0] for spec in specs[:num_alone]] == outputs[:num_alone]
        return outputs


PLAIN: dict[int, list[list[int]]] = {}
"""By group, the outputs without a draft."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("number", range(len(GROUPS)))
async def test_outputs_keep_to_their_constraints_with_every_draft(
    tmp_path: Path, number: int, draft: str | None
) -> None:
    group, specs = GROUPS[number], specs_of(GROUPS[number])
    if number not in PLAIN:
        PLAIN[number] = await run(tmp_path, None, specs, num_alone=3)
        for index, case in enumerate([case for case in group for _ in range(2)]):
            check(case, specs[index].grammar, PLAIN[number][index])
    assert await run(tmp_path, draft, specs) == PLAIN[number]


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("number", range(len(GROUPS)))
async def test_each_output_is_the_same_by_itself_with_every_draft(tmp_path: Path, number: int, draft: str) -> None:
    specs = specs_of(GROUPS[number])
    await run(tmp_path, draft, specs, num_alone=len(specs))
