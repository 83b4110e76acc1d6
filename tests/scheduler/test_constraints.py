"""Outputs that keep to a grammar: real engines, streams and masks, in every way that steps can go."""

from __future__ import annotations

import asyncio
import enum
import json
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from slipstream import bundled
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import DeadlineExceededError, InternalError, InvalidArgumentError, SlipstreamError
from slipstream.common.wire.events import EventLog, StreamName
from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.sequence import MAX_GRAMMAR_CHARACTERS, SamplingParams, SequenceSpec, grammar_digest
from slipstream.common.wire.step import GRAMMAR_PROTOCOL_VERSION, PROTOCOL_VERSION, FenceName, StepCommand
from slipstream.protos import worker_pb2 as pb
from slipstream.scheduler.constraints import Compilation, GrammarWorker
from slipstream.scheduler.grammar_session import GrammarSession
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.grammar.epoch import GrammarEpoch
from slipstream.services.worker import epoch as worker_epoch
from slipstream.services.worker.config import DFLASH, EAGLE3, MTP, NGRAM, WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from slipstream.services.worker.fused_future_map import FusedMasks
from slipstream.services.worker.future_map import FutureMap, Region
from slipstream.services.worker.masks import GrammarMasks
from tests.harness.inline_device import InlineDevice
from tests.harness.local_grammar import LocalGrammar
from tests.harness.scheduler_server import Gateway, served_scheduler
from tests.harness.waiting import until
from tests.ordering.replay import Replay, read_log
from tests.scheduler.test_ragged_drafts import chosen_at_random

pytestmark = pytest.mark.timeout(120)

TOKENIZER = Tokenizer.from_file(str(bundled.target_dir() / "tokenizer.json"))
EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "ids": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ids"],
    "additionalProperties": False,
}
IS_JSON, IS_DATE, IS_WORD = (
    LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False}),
    LLMatcher.grammar_from_regex(r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"),
    LLMatcher.grammar_from_lark('start: "def " NAME "(self):"\nNAME: /[a-z_]{3,9}/'),
)


def spec(prompt: str, grammar: str = "", **changes: Any) -> SequenceSpec:
    sampling = SamplingParams(temperature=changes.pop("temperature", 0.0), seed=changes.pop("seed", 7))
    made = SequenceSpec(
        job_id=prompt,
        prompt=tuple(TOKENIZER.encode(prompt).ids),
        max_new_tokens=40,
        sampling=sampling,
        stop_token_ids=frozenset({EOS}),
        grammar=grammar,
    )
    return replace(made, **changes)


SPECS = (
    spec("class Queue:", IS_JSON),
    spec("import os", IS_DATE, temperature=0.9, seed=3),
    spec("def main():\n", temperature=0.7),
    spec("class Stack:\n    ", IS_WORD, temperature=0.8, seed=11),
    spec("# a list of ids\n", IS_JSON, temperature=1.0, seed=5),
    spec("for x in range(", max_draft_tokens=0),
)


def text_of(tokens: list[int]) -> str:
    assert tokens[-1] == EOS, "it ends where the grammar does"
    return str(TOKENIZER.decode(tokens[:-1]))


def check(outputs: list[list[int]]) -> None:
    """Each of SPECS keeps to its grammar."""
    for one in (outputs[0], outputs[4]):
        if len(one) < 40:
            found = json.loads(text_of(one))
            assert found["name"] in ("Ada", "Grace")
            assert all(isinstance(number, int) for number in found["ids"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", text_of(outputs[1]))
    assert re.fullmatch(r"def [a-z_]{3,9}\(self\):", text_of(outputs[3]))


@pytest.fixture(scope="module")
def target() -> RoleEngine:
    return make_verify(WorkerConfig(model=bundled.target_dir()), HostDevice(), 0)


DRAFTS = {
    "standalone": WorkerConfig(model=bundled.standalone_dir()),
    "eagle3": WorkerConfig(model=bundled.eagle3_dir(), target=bundled.target_dir(), algorithm=EAGLE3),
    "mtp": WorkerConfig(model=bundled.mtp_dir(), target=bundled.target_dir(), algorithm=MTP),
    "dflash": WorkerConfig(model=bundled.dflash_dir(), target=bundled.target_dir(), algorithm=DFLASH),
    "ngram": WorkerConfig(target=bundled.target_dir(), algorithm=NGRAM),
}


@asynccontextmanager
async def served(
    folder: Path, *roles: RoleEngine, grammar: LocalGrammar | None = None, **settings: Any
) -> AsyncIterator[Gateway]:
    sizes = {"context_tokens": 128, "slots": 8, "page_tokens": 16, "grammar": "unix:/none", "grammar_timeout_ms": 2e4}
    serving = served_scheduler(folder, *roles, grammars=grammar or LocalGrammar(), **{**sizes, **settings})
    async with serving as scheduler, Gateway(scheduler) as gateway:
        await gateway.attached()
        yield gateway


@pytest.fixture(scope="module")
def plain(target: RoleEngine, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The outputs of SPECS, each by itself, without a draft."""

    async def run() -> list[list[int]]:
        async with served(tmp_path_factory.mktemp("plain"), target, run_ahead=0) as gateway:
            return [(await gateway.run(one))[0] for one in SPECS]

    outputs = asyncio.run(run())
    check(outputs)
    return outputs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("draft", [None, *DRAFTS])
async def test_outputs_do_not_depend_on_the_draft_or_the_batch(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path, draft: str | None, run_ahead: int
) -> None:
    roles = [target] if draft is None else [target, make_draft(DRAFTS[draft], HostDevice(), 0)]
    async with served(tmp_path, *roles, run_ahead=run_ahead) as gateway:
        assert await gateway.run(*SPECS) == plain
        if draft is not None:
            assert sum(sum(step.num_accepted) for step in gateway.steps) > 0, "drafts are accepted under masks, too"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("draft", DRAFTS)
async def test_outputs_do_not_depend_on_how_many_tokens_each_sequence_drafts_in_each_step(
    target: RoleEngine,
    plain: list[list[int]],
    tmp_path: Path,
    draft: str,
    run_ahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drawn anew for each sequence in each step, with a constraint or without; and the draft rests at times."""
    chosen, role = chosen_at_random(monkeypatch, rests=0.05), make_draft(DRAFTS[draft], HostDevice(), 0)
    settings = {"fixed_draft_tokens": None, "run_ahead": run_ahead}
    twice = [*SPECS, *(replace(one, job_id=f"again {one.job_id}") for one in SPECS)]
    async with served(tmp_path, target, role, **settings) as gateway:
        assert await gateway.run(*twice) == 2 * plain
    assert len(chosen[0].counts) > 2


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    """A grammar worker's, among the others' logs."""
    made = EventLog(StreamName.GRAMMAR, log_path(tmp_path))
    yield made
    made.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
async def test_the_grammar_workers_accesses_are_in_order(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path, log: EventLog, run_ahead: int, *, is_lost: bool
) -> None:
    grammar, draft = LocalGrammar(log), make_draft(DRAFTS["standalone"], HostDevice(), 0)
    if is_lost:
        misbehave(grammar, Loss.DIES, 4)
    settings = {"run_ahead": run_ahead, "log_dir": tmp_path}
    async with served(tmp_path, target, draft, grammar=grammar, **settings) as gateway:
        assert await gateway.run(*SPECS) == plain
    log.close()
    report = Replay(tmp_path).report()
    assert not report.races, report
    assert not report.stuck, report
    assert is_lost or not report.num_excused
    by_grammar = Counter(one.buffer for one in read_log(log_path(tmp_path)) if one.buffer is not None)
    names = (BufferName.MASKS, BufferName.MASK_STAMPS, BufferName.COPIED_TOKENS)
    # Commands bring the tokens of all steps that were consumed: without running ahead, those of all steps before.
    results = (BufferName.NUM_ACCEPTED, BufferName.OUTPUT_TOKENS) if run_ahead else ()
    assert set(by_grammar) == {*names, *results}


async def test_a_wait_for_masks_that_is_left_out_is_found(
    target: RoleEngine, tmp_path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.scheduler.grammar_session.LONGEST_AFTER_LOSS_S", 0.2)

    def hasty(command: StepCommand) -> StepCommand:
        return replace(command, ops=command.ops.without(FenceName.GRAMMAR_READY))

    settings = {"log_dir": tmp_path, "before_send": hasty}
    async with served(tmp_path, target, grammar=LocalGrammar(log), **settings) as gateway:
        await gateway.submit(SPECS[0])
        await gateway.until(lambda: bool(gateway.ends or gateway.refused))
    log.close()
    report = Replay(tmp_path).report()
    # Masks that are missing cost the worker, whose races are excused.
    assert report.races or report.num_excused


def log_path(folder: Path) -> Path:
    """The grammar worker's log."""
    return folder / "grammar.jsonl"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("masks", [GrammarMasks, FusedMasks])
@pytest.mark.parametrize("draft", [None, *DRAFTS])
async def test_steps_that_are_graphs_give_the_same_tokens(
    plain: list[list[int]],
    tmp_path: Path,
    draft: str | None,
    masks: type[GrammarMasks],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU that enqueues as a GPU does, which copies draft tokens out before the graph that copies them in."""
    device = InlineDevice()
    monkeypatch.setattr(worker_epoch, "_classes", lambda device: (FutureMap, Region, masks))
    roles = [make_verify(WorkerConfig(model=bundled.target_dir()), device, 0)]
    roles += [] if draft is None else [make_draft(DRAFTS[draft], device, 0)]
    async with served(tmp_path, *roles, device=device) as gateway:
        assert await gateway.run(*SPECS) == plain
        if draft is not None:
            assert sum(sum(step.num_accepted) for step in gateway.steps) > 0


async def test_preempted_and_resumed_outputs_go_on(target: RoleEngine, plain: list[list[int]], tmp_path: Path) -> None:
    resumed = [replace(one, output=tuple(before[:3])) for one, before in zip(SPECS, plain, strict=True)]
    draft = make_draft(DRAFTS["standalone"], HostDevice(), 0)
    async with served(tmp_path, target, draft, slots=3) as gateway:
        assert await gateway.run(*resumed) == [before[3:] for before in plain]


async def test_a_grammar_worker_has_time_for_the_output_of_sequences_that_go_on(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They all begin anew after a loss, and must not be the next one."""
    monkeypatch.setattr("slipstream.scheduler.constraints.TOKEN_S", 2.0)
    grammar = LocalGrammar()

    def on_step(epoch: GrammarEpoch, command: pb.StepCommand) -> bool:
        num_tokens = sum(len(row.tokens) for row in command.grammar_rows if row.digest)
        time.sleep(4.0 * (num_tokens >= 10))
        return True

    grammar.on_step = on_step
    async with served(tmp_path, target, grammar=grammar, grammar_timeout_ms=3500.0) as gateway:
        assert await gateway.run(replace(SPECS[0], output=tuple(plain[0][:10]))) == [plain[0][10:]]
    assert grammar.num_attached == 1


class Loss(enum.Enum):
    """What a grammar worker may do instead of its work."""

    DIES = "dies"
    STOPS = "stops"
    IS_LATE = "is late"
    LIES = "signals without masks"
    TEARS = "signals after some masks"


def misbehave(grammar: LocalGrammar, loss: Loss, at_step: int) -> None:
    """Has each of the first two attachments of a worker misbehave from its command number `at_step` on."""
    num_steps: Counter[int] = Counter()

    def on_step(epoch: GrammarEpoch, command: pb.StepCommand) -> bool:
        num_steps[epoch.number] += 1
        if len(num_steps) > 2 or num_steps[epoch.number] < at_step:
            return True
        match loss:
            case Loss.DIES:
                grammar.links[-1].die()
            case Loss.LIES:
                epoch._ready.store(command.step)
            case Loss.TEARS:
                del command.grammar_rows[1:]
                return True
            case Loss.IS_LATE:
                # Its masks then are of a step that nobody waits for.
                time.sleep(1.0)
                return True
        return False

    grammar.on_step = on_step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("at_step", [1, 4])
async def test_another_grammar_worker_goes_on(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path, loss: Loss, at_step: int
) -> None:
    grammar, draft = LocalGrammar(), make_draft(DRAFTS["standalone"], HostDevice(), 0)
    misbehave(grammar, loss, at_step)
    async with served(tmp_path, target, draft, grammar=grammar, grammar_timeout_ms=600.0) as gateway:
        assert await gateway.run(*SPECS) == plain
    assert grammar.num_attached >= 3


async def test_commands_do_not_grow_with_grammars(target: RoleEngine, plain: list[list[int]], tmp_path: Path) -> None:
    """After a loss one brings those of all sequences."""
    word = 'start: "def " NAME "(self):"\nNAME: /[a-z_]{3,9}/\n// '
    long = LLMatcher.grammar_from_lark(word + "x" * (MAX_GRAMMAR_CHARACTERS - 200))
    grammar, sizes = LocalGrammar(), list[int]()
    misbehave(grammar, Loss.DIES, 4)
    on_step = grammar.on_step

    def watch(epoch: GrammarEpoch, command: pb.StepCommand) -> bool:
        sizes.append(command.ByteSize())
        return on_step(epoch, command)

    grammar.on_step = watch
    async with served(tmp_path, target, grammar=grammar) as gateway:
        assert await gateway.run(*8 * [replace(SPECS[3], grammar=long)]) == 8 * [plain[3]]
    assert max(sizes) < 2000


async def test_a_grammar_that_the_worker_has_not_kept_costs_that_worker(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path
) -> None:
    grammar, forgotten = LocalGrammar(), list[int]()

    def on_step(epoch: GrammarEpoch, command: pb.StepCommand) -> bool:
        if epoch.number not in forgotten and len(forgotten) < 2:
            forgotten.append(epoch.number)
            epoch._masks._grammars._compiled.clear()
        return True

    grammar.on_step = on_step
    async with served(tmp_path, target, grammar=grammar) as gateway:
        assert await gateway.run(*SPECS) == plain
    assert grammar.num_attached == 3


async def test_what_is_cancelled_before_its_turn_is_not_compiled(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, may_go_on, asked = LocalGrammar(), threading.Event(), list[str]()
    compilations: list[Compilation] = []
    wants = GrammarSession.wants

    def record(session: GrammarSession, worker: GrammarWorker, compilation: Compilation) -> None:
        compilations.append(compilation)
        wants(session, worker, compilation)

    monkeypatch.setattr(GrammarSession, "wants", record)

    def on_prepare(grammar: str) -> None:
        asked.append(grammar)
        assert may_go_on.wait(60)

    grammar.on_prepare = on_prepare
    async with served(tmp_path, target, grammar=grammar, slots=2) as gateway:
        (first,) = await gateway.submit(SPECS[3])
        await until(lambda: asked == [IS_WORD])
        grammars = [LLMatcher.grammar_from_regex(f"a{{{number}}}") for number in range(1, 101)]
        cancelled = await gateway.submit(*(replace(SPECS[1], grammar=one) for one in grammars))
        again, kept = await gateway.submit(replace(SPECS[1], grammar=grammars[0]), SPECS[1])
        await until(lambda: len(compilations) > 3)
        await gateway.cancel(*cancelled)
        await gateway.until(lambda: {*cancelled} <= {*gateway.ends})
        may_go_on.set()
        await gateway.until(lambda: {first, again, kept} <= {*gateway.ends})
        assert [gateway.outputs[first], gateway.outputs[kept]] == [plain[3], plain[1]]
        assert text_of(gateway.outputs[again]) == "a"
    assert asked == [IS_WORD, grammars[0], IS_DATE]
    assert not any(one.waiting for one in compilations), "sequences that are over need not be remembered"


async def test_a_grammar_worker_that_is_lost_while_nothing_runs_is_replaced(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path
) -> None:
    grammar = LocalGrammar()
    async with served(tmp_path, target, grammar=grammar) as gateway:
        for _ in range(3):
            assert await gateway.run(SPECS[1]) == [plain[1]]
            grammar.links[-1].die()
    assert grammar.num_attached >= 3


async def test_without_a_grammar_worker_the_others_go_on(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path
) -> None:
    grammar = LocalGrammar()
    grammar.max_attachments = 0
    async with served(tmp_path, target, grammar=grammar, slots=2) as gateway:
        waiting = await gateway.submit(*5 * [SPECS[1]])
        free = [one for one in SPECS if not one.grammar] * 2
        assert await gateway.run(*free) == [plain[2], plain[5]] * 2
        assert not {*waiting} & {*gateway.ends, *gateway.refused}
        grammar.max_attachments = 1
        await gateway.until(lambda: {*waiting} <= {*gateway.ends})
        assert all(gateway.outputs[number] == plain[1] for number in waiting)


async def test_an_older_grammar_worker_is_refused_by_its_version_until_a_newer_one_is_there(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path
) -> None:
    grammar = LocalGrammar()
    grammar.protocol_version = PROTOCOL_VERSION
    async with served(tmp_path, target, grammar=grammar) as gateway:
        (wrong,) = await gateway.submit(SPECS[1])
        await gateway.until(lambda: wrong in gateway.refused)
        assert "protocol version: grammar speaks 4, this scheduler 5" in str(gateway.refused[wrong].error)
        assert await gateway.run(SPECS[2]) == [plain[2]]
        grammar.protocol_version, right = GRAMMAR_PROTOCOL_VERSION, 0
        while right not in gateway.ends:
            (right,) = await gateway.submit(SPECS[1])
            await gateway.until(lambda number=right: number in gateway.ends or number in gateway.refused)
        assert gateway.outputs[right] == plain[1]


async def test_a_grammar_that_makes_no_sense_is_refused_and_others_run(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path
) -> None:
    async with served(tmp_path, target) as gateway:
        wrong, right = await gateway.submit(replace(SPECS[0], grammar="start: nothing"), SPECS[1])
        await gateway.until(lambda: right in gateway.ends and wrong in gateway.refused)
        assert isinstance(gateway.refused[wrong].error, InvalidArgumentError)
        assert "nothing" in str(gateway.refused[wrong].error)
        assert gateway.outputs[right] == plain[1]


@pytest.mark.parametrize("error", [InternalError("it is broken"), DeadlineExceededError("after 60 s")])
async def test_a_grammar_worker_that_cannot_say_whether_a_grammar_makes_sense_holds_no_sequence(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path, error: SlipstreamError
) -> None:
    grammar = LocalGrammar()

    def on_prepare(grammar: str) -> None:
        if grammar == IS_WORD:
            raise error

    grammar.on_prepare = on_prepare
    async with served(tmp_path, target, grammar=grammar) as gateway:
        wrong, right = await gateway.submit(SPECS[3], SPECS[1])
        await gateway.until(lambda: right in gateway.ends and wrong in gateway.refused)
        assert str(error) in str(gateway.refused[wrong].error)
        assert gateway.outputs[right] == plain[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", [Loss.DIES, Loss.IS_LATE, Loss.LIES])
async def test_a_sequence_that_loses_worker_after_worker_fails_and_others_run(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path, loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.scheduler.grammar_session.LONGEST_AFTER_LOSS_S", 0.2)
    grammar = LocalGrammar()

    def on_step(epoch: GrammarEpoch, command: pb.StepCommand) -> bool:
        if any(row.digest == grammar_digest(IS_WORD) for row in command.grammar_rows):
            if loss is Loss.DIES:
                grammar.links[-1].die()
            elif loss is Loss.LIES:
                epoch._ready.store(command.step)
            return False
        return True

    grammar.on_step = on_step
    async with served(tmp_path, target, grammar=grammar, grammar_timeout_ms=400.0) as gateway:
        (wrong,) = await gateway.submit(SPECS[3])
        await gateway.until(lambda: wrong in gateway.refused)
        assert "6 grammar workers were lost" in str(gateway.refused[wrong].error)
        assert await gateway.run(SPECS[1]) == [plain[1]]


async def test_a_matcher_that_fails_ends_its_sequence_and_no_other(
    target: RoleEngine, plain: list[list[int]], tmp_path: Path
) -> None:
    grammar, words = LocalGrammar(), set[int]()

    def on_step(epoch: GrammarEpoch, command: pb.StepCommand) -> bool:
        for row in command.grammar_rows:
            if row.digest == grammar_digest(IS_WORD):
                words.add(row.slot)
            elif row.slot in words:
                words.remove(row.slot)
                assert not epoch._masks.slots[row.slot].matcher.consume_token(EOS), "an output cannot end there"
        return True

    grammar.on_step = on_step
    async with served(tmp_path, target, grammar=grammar) as gateway:
        wrong, *right = await gateway.submit(SPECS[3], SPECS[0], SPECS[1])
        await gateway.until(lambda: {*right} <= {*gateway.ends} and wrong in gateway.refused)
        assert "exceeds its limits" in str(gateway.refused[wrong].error)
        assert [gateway.outputs[number] for number in right] == plain[:2]
    assert grammar.num_attached == 1


async def test_a_length_that_a_grammar_does_not_fit_ends_an_output(target: RoleEngine, tmp_path: Path) -> None:
    async with served(tmp_path, target) as gateway:
        (number,) = await gateway.submit(replace(SPECS[0], max_new_tokens=4))
        await gateway.until(lambda: number in gateway.ends)
        assert gateway.ends[number] is FinishReason.LENGTH
