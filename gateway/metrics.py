"""Metrics and times of requests: waiting time, first token, time between tokens, duration, and outcome."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from slipstream.common.rpc.metrics import BUILD_INFO, counter, gauge, histogram
from slipstream.common.wire.events import Event, Site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import CollectorRegistry, Metric

    from slipstream.common.wire.server import ServerState

REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
TOKEN_BUCKETS_S = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
SEND_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1)

KEPT_REQUEST_TIMES = 2048
"""Requests whose times are kept for `slipstream trace`."""

FAILED = "error"
REFUSED = "refused"
DISCONNECTED = "disconnected"
DEADLINE = "deadline"
OUTCOMES = ("stop", "length", "abort", FAILED, REFUSED, DISCONNECTED, DEADLINE)
"""Outcomes of requests: the finish reasons, and ends without one."""

FIRST_TOKEN = histogram(
    "slipstream_time_to_first_token_seconds",
    "Time from the arrival of a request to its first token.",
    buckets=FIRST_TOKEN_BUCKETS_S,
)
INTER_TOKEN = histogram(
    "slipstream_inter_token_latency_seconds",
    "Time between tokens of a request; those that arrive together share the time since the ones before.",
    buckets=TOKEN_BUCKETS_S,
)
END_TO_END = histogram(
    "slipstream_e2e_request_latency_seconds",
    "Time from the arrival of a request to its end.",
    buckets=REQUEST_BUCKETS_S,
)
QUEUE_TIME = histogram(
    "slipstream_request_queue_time_seconds", "Time that a request waited for a slot.", buckets=REQUEST_BUCKETS_S
)
PROMPT_TOKENS = counter("slipstream_prompt_tokens_total", "Tokens of the prompts of requests that began.")
GENERATION_TOKENS = counter("slipstream_generation_tokens_total", "Tokens generated for clients.")
REQUESTS = counter(
    "slipstream_requests_total",
    "Requests by how they ended: at a stop token, at their length, cancelled by a call, with an error, "
    "refused because the queue is full or closed, because the client went away, or at its call's deadline.",
    "outcome",
)
PUBLISH_TO_SEND = histogram(
    "slipstream_publish_to_send_seconds",
    "Time from a step's result on the host to the write of its message to a client.",
    buckets=SEND_BUCKETS_S,
)
COALESCED = counter(
    "slipstream_coalesced_messages_total",
    "Messages with the output of more than one step because the gateway or a client was late.",
)
CUT_OFF = counter("slipstream_streams_cut_off_total", "Streams given up because their client read nothing.")
GIVEN_UP = counter(
    "slipstream_sequences_given_up_total",
    "Sequences that failed because all work was lost again and again while they ran: they may be the cause.",
)
GRAMMAR_COMPILE = histogram(
    "slipstream_grammar_compile_seconds",
    "Time to compile the constraint of a request; one that was compiled before takes none.",
    buckets=SEND_BUCKETS_S,
)
REFUSED_GRAMMARS = counter(
    "slipstream_grammars_refused_total", "Requests refused because their constraint cannot be compiled."
)
JOURNAL_DAMAGE = counter(
    "slipstream_journal_damage_total",
    "What the gateway found damaged in its journal as it started: jobs that are lost, and output that is.",
    "lost",
)
RUNNING = gauge(
    "slipstream_num_requests_running",
    "Outputs, n of a request, that were given a slot and have not ended; preempted ones count.",
)
WAITING = gauge("slipstream_num_requests_waiting", "Outputs, n of a request, that wait for their first slot.")
QUEUE_CAPACITY = gauge(
    "slipstream_queue_capacity", "Outputs that can wait for their first slot; requests that bring more are refused."
)
ROUTER_WAITING = gauge("vllm:num_requests_waiting", "As `slipstream_num_requests_waiting`.")
ROUTER_RUNNING = gauge("vllm:num_requests_running", "As `slipstream_num_requests_running`.")
ROUTER_KV_USAGE = gauge(
    "vllm:kv_cache_usage_perc",
    "Share of the KV pages that cannot be taken, 0 to 1; pages that only the prefix cache has can be.",
)
ROUTER_CACHE = gauge(
    "vllm:cache_config_info",
    "Always 1: tokens in a KV page, and the number of pages, are in the labels.",
    *("block_size", "num_gpu_blocks"),
)
COMPAT_SPECS = (ROUTER_WAITING, ROUTER_RUNNING, ROUTER_KV_USAGE, ROUTER_CACHE)
SPECS = (
    *(FIRST_TOKEN, INTER_TOKEN, END_TO_END, QUEUE_TIME),
    *(
        PROMPT_TOKENS,
        GENERATION_TOKENS,
        REQUESTS,
        PUBLISH_TO_SEND,
        COALESCED,
        CUT_OFF,
        GIVEN_UP,
        GRAMMAR_COMPILE,
        REFUSED_GRAMMARS,
        JOURNAL_DAMAGE,
        RUNNING,
        WAITING,
        QUEUE_CAPACITY,
    ),
)


@dataclass(slots=True)
class RequestTimes:
    """What happened to a request when, by `time.monotonic_ns`; 0: not yet."""

    received_ns: int = 0
    tokenised_ns: int = 0
    submitted_ns: int = 0
    """When it was sent to a scheduler for the first time."""
    first_sent_ns: int = 0
    """When its first token was sent to a client."""

    def records(self, number: int) -> Iterator[Event]:
        """Yields what has happened to the request of a job's number."""
        yield Event(Site.TOKENISE, number, self.received_ns, self.tokenised_ns)
        if self.submitted_ns:
            yield Event(Site.SUBMIT, number, self.tokenised_ns, self.submitted_ns)
            if self.first_sent_ns:
                yield Event(Site.FIRST_TOKEN, number, self.submitted_ns, self.first_sent_ns)


class TimesOfRequests:
    """The times of the last requests, for `slipstream trace`. Belongs to the event loop."""

    def __init__(self, capacity: int = KEPT_REQUEST_TIMES) -> None:
        self._requests: deque[tuple[int, str, RequestTimes]] = deque(maxlen=capacity)

    def add(self, number: int, owner: str, times: RequestTimes) -> None:
        """Adds a request by its job's number; the oldest one goes."""
        self._requests.append((number, owner, times))

    def records(self, owner: str, from_number: int = 0) -> Iterator[Event]:
        """Yields what has happened to an owner's requests, or to all if it is empty, from a job's number on."""
        for number, owner_of, times in self._requests:
            if number >= from_number and owner in ("", owner_of):
                yield from times.records(number)


class RequestMetrics:
    """The metrics of requests. Written on the event loop."""

    def __init__(
        self, registry: CollectorRegistry, *, num_running: Callable[[], int], num_waiting: Callable[[], int]
    ) -> None:
        """The two callables are read at each scrape, on a thread of its own."""
        self._first_token = FIRST_TOKEN.histogram(registry)
        self._inter_token = INTER_TOKEN.histogram(registry)
        self._end_to_end = END_TO_END.histogram(registry)
        self._queue = QUEUE_TIME.histogram(registry)
        self._prompt_tokens = PROMPT_TOKENS.counter(registry)
        self.generation_tokens = GENERATION_TOKENS.counter(registry)
        self.publish_to_send = PUBLISH_TO_SEND.histogram(registry)
        self.coalesced = COALESCED.counter(registry)
        self.cut_off = CUT_OFF.counter(registry)
        self.given_up = GIVEN_UP.counter(registry)
        self.grammar_compile = GRAMMAR_COMPILE.histogram(registry)
        self.refused_grammars = REFUSED_GRAMMARS.counter(registry)
        damage = JOURNAL_DAMAGE.counter(registry)
        self.lost_jobs, self.lost_output = damage.labels("job"), damage.labels("output")
        requests = REQUESTS.counter(registry)
        self._outcomes = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        RUNNING.gauge(registry).set_function(num_running)
        WAITING.gauge(registry).set_function(num_waiting)

    def started(self, *, prompt_tokens: int, queue_seconds: float, first_token_seconds: float) -> None:
        """Counts a request's first token; both times are from its arrival."""
        self._prompt_tokens.inc(prompt_tokens)
        self._queue.observe(queue_seconds)
        self._first_token.observe(first_token_seconds)

    def went_on(self, num_tokens: int, seconds: float) -> None:
        """Counts more tokens of a request, `seconds` after the ones before."""
        if num_tokens:
            self._inter_token.observe_many(seconds / num_tokens, num_tokens)

    def finished(self, reason: str, seconds: float) -> None:
        """Counts a request that ended with a finish reason, `seconds` after its arrival."""
        self._outcomes[reason].inc()
        self._end_to_end.observe(seconds)

    def lost(self, outcome: str) -> None:
        """Counts a request that ended otherwise: FAILED, REFUSED, DISCONNECTED or DEADLINE."""
        self._outcomes[outcome].inc()


class ServerInfo(Collector):
    """Build, model and queue of the gateway, read at each scrape. Has no model before the first scheduler served."""

    def __init__(
        self, registry: CollectorRegistry, *, queue_capacity: int, state: Callable[[], ServerState | None]
    ) -> None:
        """`state` returns that of the scheduler that serves, or served last; it is called on the scraper's thread."""
        QUEUE_CAPACITY.gauge(registry).set(queue_capacity)
        self._state = state
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return [BUILD_INFO.family()]

    def collect(self) -> Iterable[Metric]:
        state, family = self._state(), BUILD_INFO.family()
        if state is not None:
            mps = "on" if state.under_mps else "off"
            family.add_metric(("gateway", state.version, state.model, "", state.fence, mps, state.algorithm), 1)
        return [family]


class CompatMetrics(Collector):
    """The metrics that routers read, under vLLM's names, read at each scrape. Has none before a scheduler served."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
        state: Callable[[], ServerState | None],
    ) -> None:
        """`state` asks the scheduler for its state of now. All are called on the scraper's thread."""
        self._num_running, self._num_waiting, self._state = num_running, num_waiting, state
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return [spec.family() for spec in COMPAT_SPECS]

    def collect(self) -> Iterable[Metric]:
        state = self._state()
        if state is None:
            return
        usage = 1 - state.num_free_pages / max(1, state.num_pages)
        values = {ROUTER_WAITING: self._num_waiting(), ROUTER_RUNNING: self._num_running(), ROUTER_KV_USAGE: usage}
        for spec, value in values.items():
            family = spec.family()
            family.add_metric((), value)
            yield family
        family = ROUTER_CACHE.family()
        family.add_metric((str(state.page_tokens), str(state.num_pages)), 1)
        yield family
