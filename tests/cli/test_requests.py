"""Tests of every request option, against the real services with the bundled model."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.bundled import target_dir
from slipstream.client import Client
from slipstream.common.errors import InvalidArgumentError
from slipstream.common.wire.job import OutputChunk
from slipstream.gateway.request import sample_seed
from tests.harness.running import running_up, slipstream
from tests.harness.waiting import block_until

PROMPT = "def read_lines(path):\n"
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_new_tokens": 60, "ignore_eos": True}
GREEDY: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}


@pytest.fixture
def client(server: str) -> Iterator[Client]:
    with Client(server) as connected:
        yield connected


def tokens_of(chunks: list[OutputChunk], sample: int = 0) -> list[int]:
    """The tokens of a sample."""
    return [token for chunk in chunks if chunk.sample_index == sample for token in chunk.token_ids]


def text_of(chunks: list[OutputChunk], sample: int = 0) -> str:
    """Its text."""
    return "".join(chunk.text for chunk in chunks if chunk.sample_index == sample)


def generate(client: Client, prompt: Any = PROMPT, **options: Any) -> list[OutputChunk]:
    """Everything that comes for a request."""
    return list(client.generate(prompt, **options))


@pytest.mark.slow
def test_samples_are_what_single_requests_with_their_seeds_are(client: Client) -> None:
    together = generate(client, n=4, **SAMPLED)
    outputs = [tokens_of(together, index) for index in range(4)]
    assert len({tuple(output) for output in outputs}) == 4
    for index, output in enumerate(outputs):
        alone = generate(client, **{**SAMPLED, "seed": sample_seed(5, index)})
        assert tokens_of(alone) == output
        assert text_of(alone) == text_of(together, index)
    total = together[-1].job_usage
    assert total is not None
    assert total.completion_tokens == 4 * 60
    assert total.total_accepted_tokens == sum(total.accepted_per_position) > 0
    assert 0 < total.queue_seconds < total.time_to_first_token_seconds < total.end_to_end_seconds
    assert 0 < total.mean_inter_token_latency_seconds < total.end_to_end_seconds


def test_a_stop_string_cuts_what_comes_without_it(client: Client) -> None:
    """At the same token with and without drafts, alone and in a batch."""
    plain = generate(client, **SAMPLED)
    text, tokens = text_of(plain), tokens_of(plain)
    lengths = [length for chunk in plain for length in chunk.text_lengths]
    stops = [text[start : start + length] for start, length in ((20, 1), (31, 3), (40, 9), (47, 2), (60, 5), (80, 12))]

    def cut(stop: str, speculation: bool) -> tuple[str, list[int], object]:
        chunks = generate(client, stop=[stop, "never there"], speculation=speculation, **SAMPLED)
        last = chunks[-1]
        assert (last.finish_reason, last.matched_stop) == ("stop", stop)
        assert last.usage is not None
        assert last.usage.completion_tokens == len(tokens_of(chunks))
        return text_of(chunks), tokens_of(chunks), last.usage.num_verify_steps > 0

    with ThreadPoolExecutor(8) as pool:
        batched = [pool.submit(cut, stop, speculation) for stop in stops for speculation in (True, False)]
        results = [result.result() for result in batched]
    results.append(cut(stops[0], True))
    for (found, ids, _), stop in zip(results, [*(stop for stop in stops for _ in range(2)), stops[0]], strict=True):
        end = text.index(stop) + len(stop)
        num_tokens = next(n for n in range(len(tokens)) if sum(lengths[:n]) >= end)
        assert (found, ids) == (text[: text.index(stop)], tokens[:num_tokens])
    assert [drafted for _, _, drafted in results[:12]] == [True, False] * 6


def test_speculation_changes_no_token(client: Client) -> None:
    plain = tokens_of(generate(client, speculation=False, **SAMPLED))
    for options, num_places in (({"speculation": False}, 0), ({"max_draft_tokens": 1}, 1), ({}, 4)):
        with ThreadPoolExecutor(2) as pool:
            # Beside one of another kind.
            other = pool.submit(generate, client, **SAMPLED)
            chunks = generate(client, **options, **SAMPLED)
            assert tokens_of(other.result()) == plain
        assert tokens_of(chunks) == plain
        usage = chunks[-1].usage
        assert usage is not None
        assert sum(count > 0 for count in usage.accepted_per_position) == num_places
        assert (usage.num_verify_steps > 0) == bool(num_places)
    with pytest.raises(InvalidArgumentError, match="0 to 4") as caught:
        generate(client, max_draft_tokens=5)
    assert caught.value.field == "speculation.max_draft_tokens"


def test_nothing_ends_an_output_before_its_least_length(client: Client) -> None:
    tokens = tokens_of(generate(client, **GREEDY))
    stop = tokens[3]
    early = generate(client, stop_token_ids=[stop], **GREEDY)
    assert (tokens_of(early), early[-1].matched_stop) == (tokens[: tokens.index(stop) + 1], stop)
    late = generate(client, stop_token_ids=[stop], min_new_tokens=20, **GREEDY)
    assert stop not in tokens_of(late)[:20]
    assert len(tokens_of(late)) > 20


def test_the_likeliest_token_has_the_greatest_logprob(client: Client) -> None:
    chunks = generate(client, logprobs=True, top_logprobs=5, **GREEDY)
    entries = [entry for chunk in chunks for entry in chunk.logprobs]
    tokens = tokens_of(chunks)
    assert len(entries) == len(tokens) == 40
    for token, entry in zip(tokens, entries, strict=True):
        assert len(entry.top) == 5
        assert entry.top[0] == (token, entry.logprob)
        values = [logprob for _, logprob in entry.top]
        assert values == sorted(values, reverse=True)
        assert values[0] <= 0
    alone = generate(client, logprobs=True, speculation=False, **GREEDY)
    own = [entry.logprob for chunk in alone for entry in chunk.logprobs]
    assert own == pytest.approx([entry.logprob for entry in entries], abs=1e-3)


def test_biases_and_penalties_count(client: Client) -> None:
    wanted = tokens_of(generate(client, **GREEDY))[0] + 1
    assert tokens_of(generate(client, logit_bias={wanted: 100}, **GREEDY)) == [wanted] * 40
    # What is there already costs more than any token is worth.
    varied = tokens_of(generate(client, presence_penalty=2, frequency_penalty=2, repetition_penalty=2, **GREEDY))
    plain = tokens_of(generate(client, **GREEDY))
    assert len(set(varied)) > len(set(plain))


def test_a_model_without_a_chat_template_says_so(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="the model has no chat template"):
        generate(client, [{"role": "user", "content": "Hello"}])


@pytest.mark.slow
def test_a_conversation_goes_through_the_model_s_own_template(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(target_dir(), target)
    template = "{% for said in messages %}# {{ said.role }}: {{ said.content }}\n{% endfor %}"
    (target / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}def {% endif %}")
    state_dir = tmp_path / "state"
    with running_up(state_dir, "--target", str(target)), Client((state_dir / "server").read_text()) as client:
        said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Open a file."}]
        answer = generate(client, said, stop=["\n"], **SAMPLED)
        assert text_of(answer)
        same = generate(client, "# system: Be brief.\n# user: Open a file.\ndef ", stop=["\n"], **SAMPLED)
        assert (tokens_of(answer), text_of(answer)) == (tokens_of(same), text_of(same))
        printed = slipstream("generate", "--server", (state_dir / "server").read_text(), "--chat", "--json", "Hello")
        assert json.loads(printed.stdout)["prompt_tokens"] == len(
            AutoTokenizer.from_pretrained(str(target)).encode("# user: Hello\ndef ")
        )


def test_a_job_can_be_cancelled_again_and_again(held_server: str) -> None:
    with Client(held_server) as client:
        client.create_job(PROMPT, job_id="long", n=2, max_new_tokens=100)
        block_until(lambda: client.get_job("long").num_tokens == 6)
        for _ in range(3):
            client.cancel_job("long")
        chunks = list(client.watch_job("long"))
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["abort", "abort"]
        client.cancel_job("long")
        assert [len(tokens_of(chunks, index)) for index in range(2)] == [3, 3]
        assert [chunk.token_ids for chunk in client.watch_job("long", [3, 3])] == [(), ()]


def test_the_command_line_asks_for_all_that(server: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(target_dir()))
    options = (
        "generate",
        "--server",
        server,
        "--max-new-tokens",
        "30",
        "--temperature",
        "0.8",
        "--seed",
        "7",
        "--n",
        "2",
    )
    more = (
        "--no-speculation",
        "--priority",
        "-1",
        "--min-new-tokens",
        "2",
        "--presence-penalty",
        "0.5",
        "--stop",
        "\n\n\n\n\n",
    )
    found = slipstream(*options, *more, "--logprobs", "3", "--json", PROMPT)
    assert found.returncode == 0, found.stderr
    reports = [json.loads(line) for line in found.stdout.splitlines()]
    assert [report["sample_index"] for report in reports] == [0, 1]
    assert [report["seed"] for report in reports] == [7, sample_seed(7, 1)]
    for report in reports:
        assert report["num_verify_steps"] == 0
        assert len(report["logprobs"]) == len(report["token_ids"]) == report["completion_tokens"]
        assert all(len(entry["top_logprobs"]) == 3 for entry in report["logprobs"])
        assert tokenizer.decode(report["token_ids"], skip_special_tokens=True).startswith(report["text"])
    texts = slipstream(*options, *more, PROMPT)
    assert texts.stdout == "".join(f"--- sample {i} ---\n{report['text']}\n" for i, report in enumerate(reports))
    wrong = slipstream(*options, "--logprobs", "3", PROMPT)
    assert (wrong.returncode, "--logprobs: got 3" in wrong.stderr) == (2, True)
    chat = slipstream(*options, "--chat", "Hello")
    assert (chat.returncode, "messages: got" in chat.stderr) == (2, True)


def test_the_command_line_biases_tokens_bounds_drafts_and_salts_the_cache(server: str, client: Client) -> None:
    options = ("generate", "--server", server, "--json", "--max-new-tokens", "40", "--ignore-eos")

    def report(*more: str, prompt: str = PROMPT) -> dict[str, Any]:
        found = slipstream(*options, *more, prompt)
        assert found.returncode == 0, found.stderr
        return dict(json.loads(found.stdout))

    first, *_ = tokens = tokens_of(generate(client, **GREEDY))
    bounded = report("--max-draft-tokens", "1")
    assert bounded["token_ids"] == tokens
    assert sum(count > 0 for count in bounded["accepted_per_position"]) == 1
    assert report("--max-draft-tokens", "0")["num_verify_steps"] == 0
    biased = report("--logit-bias", f"{first}:-100", "--logit-bias", f"{tokens[1]}:0.5")
    assert first not in biased["token_ids"]
    long, salt = PROMPT * 20, str(uuid.uuid4())
    report(prompt=long)
    assert [report("--cache-salt", salt, prompt=long)["cached_tokens"] > 0 for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--logit-bias", "7"),
        ("--logit-bias", "7:much"),
        ("--logit-bias", "7:101"),
        ("--logit-bias", "7:nan"),
        ("--logit-bias", "-7:1"),
        ("--logit-bias", "999999:1"),
        ("--max-draft-tokens", "5"),
        ("--max-draft-tokens", "-1"),
        ("--cache-salt", "x" * 129),
        ("--top-p", "2"),
        ("--stop-token-id", "999999"),
        ("--stop", ""),
        ("--job-id", "a b"),
    ],
)
def test_the_command_line_names_the_option_of_a_bad_value(server: str, option: str, value: str) -> None:
    found = slipstream("generate", "--server", server, option, value, PROMPT)
    assert found.returncode == 2
    assert found.stderr.startswith(f"slipstream: error: {option}: got ")
    assert found.stderr.count("\n") == 1


def test_the_command_line_names_a_prompt_that_is_refused(server: str) -> None:
    found = slipstream("generate", "--server", server, "")
    assert found.returncode == 2
    assert found.stderr.startswith("slipstream: error: PROMPT: got ")


def test_a_token_is_biased_once(server: str) -> None:
    found = slipstream("generate", "--server", server, "--logit-bias", "7:1", "--logit-bias", "7:2", PROMPT)
    assert found.stderr == "slipstream: error: --logit-bias: got '7:2', accepted: each token once\n"
