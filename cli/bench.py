"""`slipstream bench`: a load on a running server, and the latencies and rates that its clients saw."""

from __future__ import annotations

import json
import os
import random
import ssl
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

from slipstream.cli.load_generator import (
    COMPLETED,
    FAILED,
    LEFT,
    TIMEOUT_S,
    Counts,
    GrpcServer,
    Part,
    closed_loop,
    latencies,
    open_loop,
    summary,
)
from slipstream.cli.load_requests import Arrival, Lengths, LogNormal, poisson_times, request
from slipstream.cli.options import SHAREGPT
from slipstream.common.errors import ConfigError, ConnectionLostError, ResourceExhaustedError, SlipstreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    import httpx

    from slipstream.cli.load_generator import LoadClient, LoadRun, LoadServer, RequestRecord, Row
    from slipstream.cli.load_requests import Request
    from slipstream.cli.options import BenchOptions, ConnectionOptions

FIRST_ID = 256
"""Lower ids are often special tokens."""
WORDS = ("the", "of", "to", "in", "is", "on", "by", "it", "or", "be", "at", "as", "an", "we", "us", "if", "my", "do")
"""Words that most tokenizers have as a token each: prompts for servers whose vocabulary is not known."""
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
"""Latencies, by the names that vLLM's benchmark gives them: time to the first token, time per output token after it,
time between tokens, and time to the end of a request."""
BARS = 40


async def run_bench(connection: ConnectionOptions, options: BenchOptions) -> int:
    """Loads the server, and prints the figures; gives 1 if a request failed. Raises SlipstreamError as the clients do.

    Nothing is printed before the end but what goes wrong.
    """
    if options.picture is not None and find_spec("matplotlib") is None:
        raise ConfigError("picture", "a file", "none where matplotlib is not installed")
    server, vocab_size = await _server(connection, options)
    made = list(islice(requests(options, vocab_size), options.num_prompts))
    run = await _load(server, options, made)
    found = figures(run, options.limits())
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.picture is not None:
        draw(run, options.picture)
    _print(found)
    if num_left := sum(record.outcome == LEFT for record in run.records):
        print(f"failed: {num_left} without an end after {TIMEOUT_S:g} s")
    for line in sorted(set(run.failures))[:5]:
        print(f"failed: {line}")
    return 1 if found["failed"] else 0


def requests(options: BenchOptions, vocab_size: int | None) -> Iterator[Request]:
    """An endless sequence of requests, whose prompts are of ids, or of words where the vocabulary is not known.

    Equal options give equal ones.
    """
    rng = random.Random(f"bench {options.seed}")
    most = 8 * max(options.input_len, options.output_len)
    lengths = Lengths(
        prompt=LogNormal(options.input_len, 1.2), output=LogNormal(options.output_len, 0.9), context_tokens=2 * most
    )
    while True:
        fixed = options.input_len, options.output_len
        prompt_tokens, output_tokens = lengths.draw(rng) if options.dataset == SHAREGPT else fixed
        if vocab_size is None:
            prompt: str | tuple[int, ...] = " ".join(rng.choice(WORDS) for _ in range(prompt_tokens))
        else:
            ids = range(min(FIRST_ID, vocab_size // 2), vocab_size)
            prompt = tuple(rng.randrange(ids.start, ids.stop) for _ in range(prompt_tokens))
        yield request(prompt, output_tokens, options.temperature, rng.randrange(2**31))


def figures(run: LoadRun, limits: dict[str, float]) -> Row:
    """Sums up a run, with the names of vLLM's benchmark. Latencies are in milliseconds, of completed requests."""
    completed = [record for record in run.records if record.outcome == COMPLETED]
    usages = [record.usage for record in completed if record.usage is not None]
    num_in, num_out = sum(usage.prompt_tokens for usage in usages), sum(record.num_tokens for record in completed)
    good = [record for record in completed if all(_latency(record, name) <= most for name, most in limits.items())]
    report = run.report(0.0)
    found: Row = {
        "completed": len(completed),
        "failed": sum(record.outcome in (FAILED, LEFT) for record in run.records),
        "rejected": report["num_rejected"],
        "duration": run.wall_s,
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(completed) / run.wall_s,
        "output_throughput": num_out / run.wall_s,
        "total_token_throughput": (num_in + num_out) / run.wall_s,
        "request_goodput": len(good) / run.wall_s if limits else None,
        "cached_share": report["cached_share"],
        "mean_accept_length": report["mean_accept_length"],
        "client_cpu_share": report["generator_cpu_share"],
    }
    for name, seconds in latencies(completed).items():
        found |= {f"{part}_{name}_ms": value for part, value in summary(seconds).items()}
    return found


def _latency(record: RequestRecord, metric: str) -> float:
    """A latency of a completed request, in milliseconds; 0 where a single token has none."""
    return 1e3 * sum(latencies([record])[metric])


async def _load(server: LoadServer, options: BenchOptions, made: Sequence[Request]) -> LoadRun:
    if options.request_rate is None:
        sessions, concurrency = [(one,) for one in made], options.max_concurrency or 16
        return await closed_loop(server, sessions, concurrency, num_processes=options.processes)
    times = poisson_times(options.request_rate, random.Random(f"times {options.seed}"))
    arrivals = [Arrival(at_s, one) for at_s, one in zip(times, made, strict=False)]
    return await open_loop(server, arrivals, arrivals[-1].at_s, TIMEOUT_S, num_processes=options.processes)


async def _server(connection: ConnectionOptions, options: BenchOptions) -> tuple[LoadServer, int | None]:
    """Returns the server, and its number of tokens if it says it. Raises ConnectionLostError if nothing answers."""
    if options.openai is None:
        async with connection.client() as client:
            info = await client.server_info()
        return GrpcServer(connection.server, connection.access), info.vocab_size
    key = connection.api_key or os.environ.get("SLIPSTREAM_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""
    files = {name: getattr(connection, name) for name in ("tls_ca", "tls_cert", "tls_key")}
    server = OpenAIServer(options.openai.rstrip("/"), str(options.model), key, **files)
    async with server.connect():
        return server, None


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """A `LoadServer` by OpenAI's interface."""

    url: str
    model: str
    key: str
    tls_ca: Path | None = None
    """Authorities to trust, in place of the usual ones."""
    tls_cert: Path | None = None
    """Mutual TLS: the client's certificate."""
    tls_key: Path | None = None

    def tls_context(self) -> ssl.SSLContext:
        """Raises ConfigError naming the file that cannot be used."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert", self.tls_cert, "a file if and only if there is a tls_key")
        with _naming("tls_ca", self.tls_ca):
            context = ssl.create_default_context(cafile=self.tls_ca)
        if self.tls_cert is not None:
            with _naming("tls_cert", self.tls_cert):
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        return context

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LoadClient]:
        import httpx

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        limits = httpx.Limits(max_connections=None)
        tls: ssl.SSLContext | bool = self.tls_context() if self.tls_ca or self.tls_cert or self.tls_key else True
        async with httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S, limits=limits, verify=tls) as client:
            try:
                (await client.get(f"{self.url}/models")).raise_for_status()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise ConnectionLostError(f"{self.url} does not answer as OpenAI's interface: {error}") from None
            yield partial(self.stream, client)

    async def stream(self, client: httpx.AsyncClient, request: Request) -> AsyncIterator[Part]:
        """Completes a prompt. A message counts as one token before the end."""
        import httpx

        prompt, options = request
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": options["max_new_tokens"],
            **{name: options[name] for name in ("temperature", "seed", "ignore_eos")},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with client.stream("POST", f"{self.url}/completions", json=body) as response:
                if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
                    given = response.headers.get("retry-after", "")
                    wait_s = float(given) if given.isdecimal() else 1.0  # it may be a date
                    raise ResourceExhaustedError("rejected", retry_after_ms=int(1000 * wait_s))
                if response.is_error:
                    text = (await response.aread()).decode(errors="replace")
                    raise SlipstreamError(f"HTTP {response.status_code}: {text[:200]}")
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        yield part_of(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            raise ConnectionLostError(repr(error)) from None


@contextmanager
def _naming(option: str, path: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(option, path and str(path), f"a file in PEM that this user can read ({error})") from error


def part_of(event: dict[str, Any]) -> Part:
    """Reads an event of a stream. Raises SlipstreamError for one that is an error."""
    if "error" in event:
        raise SlipstreamError(str(event["error"]))
    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
    found, counts = event.get("usage"), None
    if found:
        cached = (found.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        counts = Counts(found["prompt_tokens"], found["completion_tokens"], cached)
    return Part(int(bool(choice.get("text"))), choice.get("finish_reason"), counts)


def draw(run: LoadRun, path: Path) -> None:
    """Draws how many requests had which latency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    found = latencies([record for record in run.records if record.outcome == COMPLETED])
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, METRICS.items(), strict=True):
        axes.hist([1e3 * seconds for seconds in found[name]], bins=BARS)
        axes.set(xlabel=f"{title}, ms", yscale="log")
    figure.savefig(path)


def _print(found: Row) -> None:
    rows = {
        "Successful requests": found["completed"],
        "Failed requests": found["failed"],
        "Rejected requests": found["rejected"],
        "Benchmark duration (s)": found["duration"],
        "Total input tokens": found["total_input_tokens"],
        "Total generated tokens": found["total_output_tokens"],
        "Request throughput (req/s)": found["request_throughput"],
        "Request goodput (req/s)": found["request_goodput"],
        "Output token throughput (tok/s)": found["output_throughput"],
        "Total token throughput (tok/s)": found["total_token_throughput"],
        "Mean accept length": found["mean_accept_length"],
    }
    rows |= {
        f"{part.capitalize()} {title} (ms)": found[f"{part}_{name}_ms"]
        for name, title in METRICS.items()
        for part in ("mean", "median", "p99")
    }
    for name, value in rows.items():
        if value is not None:
            print(f"{name:<34}{value:>12.2f}" if isinstance(value, float) else f"{name:<34}{value:>12}")
