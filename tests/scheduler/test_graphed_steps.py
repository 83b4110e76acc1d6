"""Steps as they are on a GPU, staged and replayed, on a CPU: the tokens are those of steps that are not."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.interface import Device
from slipstream.common.errors import MismatchError
from slipstream.common.wire.sequence import SamplingParams
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.link import Link
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.attention import ForwardBatch
from slipstream.services.models.decoder import Decoder, DecoderOutput
from slipstream.services.models.head_config import DFLASH, EAGLE3, MTP
from slipstream.services.verify import graphs as verify_graphs
from slipstream.services.verify.engine import VerifyEngine
from slipstream.services.worker.config import NGRAM, WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from slipstream.services.worker.language_model import LanguageModel, RaggedGraphs
from tests.harness import seeded_jobs
from tests.harness.checkpoints import write_checkpoint, write_guesser
from tests.harness.counted_jobs import Job
from tests.harness.eagle3_checkpoints import BLOCKS, MODULES, make_head, write_head
from tests.harness.inline_device import InlineDevice
from tests.harness.leaks import nothing_left
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import local_workers
from tests.ordering.replay import Replay

pytestmark = pytest.mark.sampled_module(5)

SEED = 5
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=1.1, top_p=0.9, seed=3),
    SamplingParams(temperature=0.8, top_k=30, presence_penalty=0.7, repetition_penalty=1.3, seed=4),
    SamplingParams(frequency_penalty=0.5, logit_bias=((65, 5.0),)),
)
DRAFTS = ("none", "standalone", "eagle3", "mtp", "dflash", "ngram")


@dataclass(frozen=True)
class Checkpoints:
    """Directories: a random target, and drafts for it."""

    target: Path
    standalone: Path
    heads: dict[str, Path]
    """By algorithm."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The standalone draft guesses right now and then."""
    folder = tmp_path_factory.mktemp("models")
    target = write_checkpoint(folder / "target", seed=SEED)
    guesser = write_guesser(folder / "standalone", target, seed=SEED)
    make_head(folder / MTP, target, MODULES)
    heads = {EAGLE3: write_head(folder / EAGLE3), MTP: folder / MTP}
    heads[DFLASH] = write_head(folder / DFLASH, layout=BLOCKS, has_tokenizer=False)
    return Checkpoints(target, guesser, heads)


def roles(
    checkpoints: Checkpoints, draft: str, device: Device, width: int | None, kv_dtype: str = "auto"
) -> list[RoleEngine]:
    """Verify, and a draft if there is one."""
    of_target = WorkerConfig(model=checkpoints.target, deterministic_width=width, kv_dtype=kv_dtype)
    made = [make_verify(of_target, device, 0)]
    if draft == "standalone":
        made.append(make_draft(WorkerConfig(model=checkpoints.standalone, kv_dtype=kv_dtype), device, 0))
    if draft in checkpoints.heads:
        head, target = checkpoints.heads[draft], checkpoints.target
        config = WorkerConfig(model=head, algorithm=draft, target=target, kv_dtype=kv_dtype)
        made.append(make_draft(config, device, 0))
    if draft == NGRAM:
        config = WorkerConfig(algorithm=NGRAM, target=checkpoints.target, prompt_lookup_min=1, suffix_cache_tokens=64)
        made.append(make_draft(config, device, 0))
    return made


def make_jobs() -> list[Job]:
    """Prompts of 1 to 40 tokens; one of each kind of sampling, twice; every third asks for logprobs."""
    return seeded_jobs.make_jobs(2 * len(SAMPLINGS), top_logprobs=(None, None, 3), samplings=SAMPLINGS, seed=SEED)


def make_config(**changes: Any) -> SchedulerConfig:
    """Four slots, small pages and chunks."""
    sizes = {"fixed_draft_tokens": 3, "slots": 4, "context_tokens": 96, "max_batched_tokens": 16, "page_tokens": 4}
    return SchedulerConfig(verify="unix:/none", **{**sizes, **changes})


def serve(
    checkpoints: Checkpoints,
    draft: str,
    device: Device,
    *,
    log_dir: Path | None = None,
    run_ahead: int = 1,
    width: int | None = None,
    repeats: int = 1,
    kv_dtype: str = "auto",
) -> list[list[int]]:
    """The tokens of each job, four at a time, all of them `repeats` times, one after the other."""
    config = make_config(run_ahead=run_ahead, access_log_dir=log_dir)
    with local_workers(*roles(checkpoints, draft, device, width, kv_dtype), log_dir=log_dir, device=device) as workers:
        waves = [make_jobs() for _ in range(repeats)]
        outputs = LocalEpoch(1, config, workers).run(*waves)
    jobs = [job for wave in waves for job in wave]
    assert any(job.stats.cached_tokens for job in jobs) is (repeats > 1)
    if draft != "none":
        assert sum(job.stats.total_accepted_tokens for job in jobs) > 0
    return [outputs[job] for job in jobs]


@pytest.fixture(scope="module")
def reference(checkpoints: Checkpoints) -> list[list[int]]:
    """Plain decoding, without graphs."""
    return serve(checkpoints, "none", HostDevice())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_replayed_steps_give_the_same_tokens(
    checkpoints: Checkpoints, reference: list[list[int]], draft: str, run_ahead: int
) -> None:
    with nothing_left():
        assert serve(checkpoints, draft, InlineDevice(), run_ahead=run_ahead) == reference


def test_prompts_are_taken_in_by_graphs(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify's and the draft's, all of them."""
    found, run = [], RaggedGraphs.run

    def noted(self: RaggedGraphs, *arguments: Any) -> DecoderOutput | None:
        found.append(run(self, *arguments))
        return found[-1]

    monkeypatch.setattr(RaggedGraphs, "run", noted)
    assert all(serve(checkpoints, "standalone", InlineDevice()))
    assert len(found) > len(make_jobs())
    assert None not in found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("draft", DRAFTS)
def test_prompts_behind_pages_of_others_give_the_same_tokens(
    checkpoints: Checkpoints, reference: list[list[int]], draft: str
) -> None:
    assert serve(checkpoints, draft, InlineDevice(), repeats=2) == 2 * reference


@pytest.mark.sampled(2)
@pytest.mark.parametrize("draft", DRAFTS)
def test_with_fp8_keys_and_values_the_tokens_depend_on_no_draft_batch_or_cached_page(
    checkpoints: Checkpoints, reference: list[list[int]], draft: str
) -> None:
    """They are other tokens than with keys and values in float32: the numbers are rounded."""
    plain = serve(checkpoints, "none", HostDevice(), kv_dtype="fp8")
    assert plain != reference
    assert serve(checkpoints, draft, InlineDevice(), repeats=2, kv_dtype="fp8") == 2 * plain


@pytest.mark.sampled(1)
@pytest.mark.parametrize("draft", ["none", "standalone"])
def test_one_size_for_all_steps(
    checkpoints: Checkpoints, reference: list[list[int]], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of one size make a token independent of the batch, the draft and the prompts beside its own."""
    sizes, forward = set(), Decoder.forward

    def watched(self: Decoder, batch: ForwardBatch, *arguments: Any, **others: Any) -> Any:
        if self is decoder:
            sizes.add(tuple(batch.tokens.shape))
        return forward(self, batch, *arguments, **others)

    monkeypatch.setattr(Decoder, "forward", watched)
    loaded: list[Decoder] = []
    monkeypatch.setattr("slipstream.services.factory.LanguageModel", lambda *args, **_: _noted(loaded, *args))
    decoder: Any = None
    opened = VerifyEngine.phases

    def first_loaded(self: VerifyEngine, *arguments: Any) -> Any:
        nonlocal decoder
        if decoder is None:
            decoder = loaded[0]  # verify's: what comes before are the steps that warm it up
        return opened(self, *arguments)

    monkeypatch.setattr(VerifyEngine, "phases", first_loaded)
    assert serve(checkpoints, draft, InlineDevice(), width=5) == reference
    assert sizes == {(4, 5), (16,)}, "all slots by the width, and as many tokens as a step of prompts may have"


def _noted(loaded: list[Decoder], decoder: Decoder, *arguments: Any) -> LanguageModel:
    loaded.append(decoder)
    return LanguageModel(decoder, *arguments)


def test_a_width_that_a_draft_does_not_fit_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(MismatchError, match=r"deterministic width: verify has 3, but .* 3 draft tokens has 4"):
        serve(checkpoints, "standalone", InlineDevice(), width=3)


@pytest.mark.parametrize("draft", DRAFTS[1:])
def test_a_draft_whose_graphs_are_made_beside_running_sequences_changes_none(
    checkpoints: Checkpoints, reference: list[list[int]], draft: str
) -> None:
    """Verify is opened without knowing of it."""
    device = InlineDevice()
    with local_workers(*roles(checkpoints, draft, device, None), device=device) as (verify, drafting):
        epoch = LocalEpoch(1, make_config(), [verify])
        jobs = make_jobs()

        def attach(job: Job, row: object) -> None:
            if job is jobs[2] and job.stats.num_output_tokens > 2 and not epoch.attachments:
                epoch.epoch.speculation.offer(epoch.attach(cast("Link", drafting)))

        epoch.on_progress = attach
        outputs = epoch.run(jobs)
    assert [outputs[job] for job in jobs] == reference
    assert sum(job.stats.total_accepted_tokens for job in jobs) > 0


class SameMemory:
    """In place of `Latest`: the first value stays, and takes over what later ones have, as in a graph's memory."""

    def __init__(self) -> None:
        self._value: Any = None

    def __class_getitem__(cls, _: object) -> type[SameMemory]:
        return cls

    @property
    def value(self) -> Any:
        """The first value, with the latest tensors."""
        return self._value

    @value.setter
    def value(self, latest: Any) -> None:
        if self._value is None:
            self._value = latest
            return
        for field in fields(latest):
            tensor = getattr(latest, field.name)
            if isinstance(tensor, torch.Tensor):
                with torch.inference_mode():
                    getattr(self._value, field.name).copy_(tensor)


def test_parts_of_a_step_share_no_more_than_memory(
    checkpoints: Checkpoints, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph knows nothing of what the one before it left in Python's objects."""
    monkeypatch.setattr(verify_graphs, "Latest", SameMemory)
    assert serve(checkpoints, "standalone", InlineDevice()) == reference


@pytest.mark.sampled(1)
@pytest.mark.parametrize("draft", DRAFTS[1:])
def test_what_replays_access_is_in_order(checkpoints: Checkpoints, draft: str, tmp_path: Path) -> None:
    outputs = serve(checkpoints, draft, InlineDevice(), log_dir=tmp_path)
    assert all(outputs)
    report = Replay(tmp_path).report()
    assert not report.races, report
    assert not report.stuck, report
    assert report.num_accesses > 500
    assert report.num_ordered > 100
