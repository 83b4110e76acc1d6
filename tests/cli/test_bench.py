"""`slipstream bench`: its requests and its figures. `test_openai.py` loads a real server."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import pytest

from slipstream.cli.bench import OpenAIServer, figures, part_of, requests
from slipstream.cli.load_generator import COMPLETED, FAILED, LEFT, LoadRun, RequestRecord
from slipstream.cli.options import BenchOptions
from slipstream.common.errors import ConfigError, ResourceExhaustedError, SlipstreamError
from tests.harness.certificates import Certificates
from tests.harness.doors import running_door
from tests.harness.generation_server import generation_server


def record(times_s: tuple[float, ...], counts: tuple[int, ...], outcome: str = COMPLETED) -> RequestRecord:
    """A request that was made at the start."""
    made = RequestRecord(intended_s=0.0, sent_s=0.0, wanted_tokens=sum(counts), outcome=outcome, ended_s=max(times_s))
    made.times_s.extend(times_s)
    made.counts.extend(counts)
    return made


def test_equal_options_give_equal_requests_of_the_lengths_asked_for() -> None:
    options = BenchOptions(input_len=20, output_len=7)
    one, again, other = (
        list(islice(requests(chosen, 4096), 50)) for chosen in (options, options, BenchOptions(seed=1))
    )
    assert one == again
    assert one != other
    assert {(len(r.prompt), r.options["max_new_tokens"]) for r in one} == {(20, 7)}
    assert all(256 <= token < 4096 for r in one for token in r.prompt)
    words = next(requests(options, None)).prompt
    assert isinstance(words, str)
    assert len(words.split()) == 20


def test_lengths_like_sharegpt_have_their_means() -> None:
    options = BenchOptions(dataset="sharegpt", input_len=100, output_len=50)
    made = list(islice(requests(options, 4096), 4000))
    assert mean(len(r.prompt) for r in made) == pytest.approx(100, rel=0.15)
    assert mean(r.options["max_new_tokens"] or 0 for r in made) == pytest.approx(50, rel=0.15)
    assert len({len(r.prompt) for r in made}) > 100


def test_figures_are_those_of_completed_requests() -> None:
    records = [record((0.1, 0.2, 0.5), (1, 1, 3)), record((0.3, 1.1), (1, 4))]
    records += [record((0.1,), (1,), outcome) for outcome in (FAILED, LEFT)]
    found = figures(LoadRun(records, 2.0, 0.1, 2.0), {"ttft": 200.0})
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (2, 2, 10)
    assert found["output_throughput"] == 5.0
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["median_tpot_ms"] == pytest.approx(150)  # 100 and 200
    assert found["p99_e2el_ms"] == pytest.approx(1100, rel=0.01)
    assert found["mean_itl_ms"] == pytest.approx((100 + 3 * 100 + 4 * 200) / 8)
    assert found["request_goodput"] == 0.5


@pytest.mark.parametrize(("given", "retry_after_ms"), [("2", 2000), ("Wed, 21 Oct 2026 07:28:00 GMT", 1000)])
async def test_a_rejection_may_name_a_time_or_a_date(given: str, retry_after_ms: int) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(429, headers={"retry-after": given}))
    made = next(requests(BenchOptions(), None))
    async with httpx.AsyncClient(transport=transport) as client:
        with pytest.raises(ResourceExhaustedError) as caught:
            await anext(aiter(OpenAIServer("http://a", "tiny", "").stream(client, made)))
    assert caught.value.retry_after_ms == retry_after_ms


async def test_openai_s_interface_may_ask_for_a_certificate(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    secured = {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": files.ca}
    async with generation_server() as server, running_door(server.address, **secured) as door:
        known = OpenAIServer(f"{door.url}/v1", "tiny", "", files.ca, files.client_cert, files.client_key)
        async with known.connect():
            pass
        with pytest.raises(SlipstreamError, match="does not answer"):
            async with OpenAIServer(f"{door.url}/v1", "tiny", "", files.ca).connect():
                pass
    for options, name in (({"tls_key": files.key}, "tls_cert"), ({"tls_ca": tmp_path / "none"}, "tls_ca")):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            OpenAIServer("https://a", "tiny", "", **options).tls_context()


def test_tokens_are_spread_over_messages_that_do_not_count_them() -> None:
    made = record((0.1, 0.2, 0.3), (1, 1, 1))
    made.spread(8)
    assert list(made.counts) == [3, 3, 2]
    made.spread(8)
    assert made.num_tokens == 8


def test_events_of_openai_are_read() -> None:
    counts = {"prompt_tokens": 5, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    assert part_of({"choices": [{"text": "a", "finish_reason": None}]}) == (1, None, None)
    assert part_of({"choices": [{"text": "", "finish_reason": "length"}], "usage": None}) == (0, "length", None)
    usage = part_of({"choices": [], "usage": counts}).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 9, 4)
    with pytest.raises(SlipstreamError, match="overloaded"):
        part_of({"error": {"message": "overloaded"}})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"goodput": ["itl:3"]}, "ttft, tpot or e2el"),
        ({"goodput": ["ttft:0"]}, "above 0"),
        ({"goodput": ["ttft"]}, "a colon"),
        ({"openai": "http://127.0.0.1:1/v1"}, "a name with --openai"),
        ({"request_rate": 2.0, "max_concurrency": 3}, "none with --request-rate"),
        ({"num_prompts": 0}, "1 to 1000000"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        BenchOptions(**options)
