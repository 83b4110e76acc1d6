"""Tests of the NumPy drafter's own computations against the project's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.numpy_drafter.arena import Arena, ManifestError
from examples.numpy_drafter.fingerprint import tokenizer_fingerprint
from examples.numpy_drafter.ngram import Continuation, History
from examples.numpy_drafter.noise import choose, gumbel_noise, random_words
from slipstream.bundled import target_dir
from slipstream.common.wire.layout import GIVEN_FENCES, OWN_FENCES, BufferName, DraftShape
from slipstream.common.wire.manifest import lay_out
from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.step import FenceName
from slipstream.protos import worker_pb2 as pb
from slipstream.services.models import json_files as fingerprint
from slipstream.services.models.sampler import SamplingRows, gumbel_noise_of, sample
from tests.harness.checkpoints import write_json, write_tokenizer
from tests.harness.tokenizers_by_kind import KINDS, make_tokenizer
from tests.harness.workers import SHAPE, SharedArenas

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "numpy_drafter"
PAGE = (ROOT / "docs" / "noise.md").read_text(encoding="utf-8")
VECTORS = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| 0x(\w{8}) \| \S+ \| 0x(\w{8}) \|$", PAGE, re.MULTILINE)
SEED = 11


@pytest.mark.parametrize(("seed", "position", "token_id", "word", "bits"), VECTORS)
def test_noise_vector(seed: str, position: str, token_id: str, word: str, bits: str) -> None:
    ids = np.array([int(token_id)])
    assert random_words(int(seed), int(position), ids).tolist() == [int(word, 16)]
    assert gumbel_noise(int(seed), int(position), ids).view(np.uint32).tolist() == [int(bits, 16)]


def test_noise_is_that_of_the_target() -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    ids = rng.integers(0, 2**17, (20, 5000))
    seeds, positions = rng.integers(-(2**63), 2**63, 20), rng.integers(0, 2**32, 20)
    expected = gumbel_noise_of(torch.from_numpy(ids), torch.from_numpy(seeds), torch.from_numpy(positions)).numpy()
    for row in range(20):
        noise = gumbel_noise(int(seeds[row]) % 2**64, int(positions[row]), ids[row])
        assert noise.dtype == np.float32
        np.testing.assert_array_max_ulp(noise, expected[row])


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=0.9, min_p=0.2),
        SamplingParams(temperature=1.1, top_k=20, top_p=0.8, min_p=0.05),
    ],
)
def test_a_choice_is_that_of_the_target(sampling: SamplingParams) -> None:
    """Both choose the same token from the same distribution, over the whole vocabulary."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    names = ("temperature", "top_k", "top_p", "min_p")
    for position in range(200):
        logits = rng.normal(0.0, 2.0, 50).astype(np.float32)
        message = pb.SlotSampling(seed=2**64 - 1 - position, **{name: getattr(sampling, name) for name in names})
        params = SamplingParams(seed=message.seed, **{name: getattr(sampling, name) for name in names})
        expected = sample(torch.from_numpy(logits)[None], SamplingRows.of([params]), torch.tensor([position]))
        probabilities = np.exp(logits.astype(np.float64))
        assert choose(np.arange(50), probabilities, message, position) == expected.item()


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_is_that_of_the_target(kind: str, tmp_path: Path) -> None:
    make_tokenizer(kind).backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_fingerprint(tmp_path) == fingerprint.tokenizer_fingerprint(tmp_path)


def test_fingerprint_of_the_bundled_one_and_of_older_files(tmp_path: Path) -> None:
    assert tokenizer_fingerprint(target_dir()) == fingerprint.tokenizer_fingerprint(target_dir())
    write_tokenizer(tmp_path)
    expected = tokenizer_fingerprint(tmp_path)
    assert expected == fingerprint.tokenizer_fingerprint(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    document["model"]["merges"] = [" ".join(merge) for merge in document["model"]["merges"]]
    write_json(tmp_path / "tokenizer.json", document)
    assert tokenizer_fingerprint(tmp_path) == expected
    write_json(tmp_path / "tokenizer.json", {"model": {"type": "Unigram", "vocab": [["<s>", 0.0], ["é", -1.5]]}})
    assert tokenizer_fingerprint(tmp_path) == fingerprint.tokenizer_fingerprint(tmp_path)


def test_a_history_is_put_together_and_forgets_what_lies_before_a_gap() -> None:
    history = History()
    history.put(0, [1, 2, 3, 4])
    history.put(4, [5])
    assert (history.tokens().tolist(), history.end) == ([1, 2, 3, 4, 5], 5)
    history.put(3, [9, 8])
    assert (history.tokens().tolist(), history.end) == ([1, 2, 3, 9, 8], 5)
    history.put(7, [6, 7])
    assert (history.tokens().tolist(), history.end) == ([6, 7], 9)
    history.put(0, [1])
    assert (history.tokens().tolist(), history.end) == ([1], 1)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([7], [7, 7, 7]),
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1]),
        ([9, 5, 1, 9, 5, 1, 8, 5, 2, 9, 5], [1, 9, 5]),  # the longer match, though 5 is as often before 2
        ([3, 3, 3, 6], [3, 3, 3]),  # nothing has followed the last token yet
    ],
)
def test_the_longest_match_goes_on(tokens: list[int], expected: list[int]) -> None:
    continuation = Continuation(np.array(tokens))
    guesses = []
    for _ in expected:
        probabilities = continuation.probabilities()
        assert probabilities.min() > 0.0
        assert probabilities.sum() == pytest.approx(1.0)
        index = choose(continuation.token_ids, probabilities, pb.SlotSampling(), 0)
        continuation.append(index)
        guesses.append(int(continuation.token_ids[index]))
    assert guesses == expected


def test_the_arena_is_mapped_and_its_fences_wake_across() -> None:
    owner = SharedArenas()
    arena = Arena(owner.own.manifest.to_pb(), is_writable=True)
    tokens = arena.array("draft_tokens", (SHAPE.num_slots, SHAPE.num_draft_tokens))
    tokens[2] = 5
    assert owner.tensor(BufferName.DRAFT_TOKENS)[2].tolist() == [5] * SHAPE.num_draft_tokens
    fence = arena.fence(pb.FENCE_DRAFT_PROPOSED)
    fence.signal(2**32 + 3)
    assert owner.fence(FenceName.DRAFT_PROPOSED).wait_on_host(2**32 + 3, 0.0)
    assert fence.wait(2**32, lambda: False)
    assert not fence.wait(2**32 + 4, lambda: True)
    owner.close()


def test_the_memory_given_by_verify_is_read_and_waited_for_but_never_written() -> None:
    owner = SharedArenas()
    given = Arena(owner.given.manifest.to_pb(), is_writable=False)
    seq_lens, fence = given.array("seq_lens", (SHAPE.num_slots,)), given.fence(pb.FENCE_VERIFY_STASH)
    with pytest.raises(ValueError, match="read-only"):
        seq_lens[1] = 3
    assert not fence.wait(1, lambda: True)
    looks = iter((False, False, True))
    assert not fence.wait(1, lambda: next(looks)), "it sleeps on memory that it may not write"
    owner.tensor(BufferName.SEQ_LENS)[1] = 7
    owner.fence(FenceName.VERIFY_STASH).release(1)
    assert fence.wait(1, lambda: False)
    assert seq_lens[1] == 7
    owner.close()


@pytest.mark.parametrize("fault", ["kind", "path", "size", "shape", "offset", "missing", "fence kind", "fence offset"])
def test_a_manifest_that_cannot_be_is_refused(fault: str) -> None:
    owner = SharedArenas()
    manifest = owner.given.manifest.to_pb()
    buffer = next(buffer for buffer in manifest.buffers if buffer.name == "seq_lens")
    match fault:
        case "kind":
            manifest.kind = "cuda_ipc"
        case "path":
            manifest.path = "/etc/passwd"
        case "size":
            manifest.size += 1
        case "shape":
            buffer.shape[0] += 1
        case "offset":
            buffer.offset = manifest.size // 256 * 256
        case "missing":
            buffer.name = "other"
        case "fence kind":
            manifest.fences[0].kind = "event"
        case _:
            manifest.fences[0].offset = manifest.size
    with pytest.raises(ManifestError):
        _use(manifest)
    owner.close()


def _use(manifest: pb.Manifest) -> None:
    arena = Arena(manifest, is_writable=False)
    arena.array("seq_lens", (SHAPE.num_slots,))
    arena.fence(manifest.fences[0].fence)


def test_the_bytes_of_the_page_are_those_of_its_arena() -> None:
    shape = DraftShape(num_slots=4, run_ahead=1, num_draft_tokens=2, chunk_tokens=16)
    page = (ROOT / "docs" / "write-a-drafter.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (own|given) \| (\d+) \| (?:fence )?`(\w+)`", page, re.MULTILINE)
    assert len(rows) == 10
    for piece, specs, fences in (
        ("own", shape.own_specs(), OWN_FENCES),
        ("given", shape.given_specs(), GIVEN_FENCES),
    ):
        buffers, words, size = lay_out(specs, fences, "host")
        places = {placed.spec.name: placed.offset for placed in buffers}
        places |= {pb.Fence.Name(word.fence): word.offset for word in words}
        assert {name: int(offset) for where, offset, name in rows if where == piece} == places
        assert f"{size} bytes" in page


def test_it_is_made_of_the_contract_alone() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import main; "
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers', 'slipstream')))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = process.stdout.split()
    assert "slipstream.protos.worker_pb2" in loaded
    assert all(name == "slipstream" or name.startswith("slipstream.protos") for name in loaded)
