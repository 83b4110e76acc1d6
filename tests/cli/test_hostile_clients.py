"""Whatever a client sends to a running server: it gets a proper status, and the server serves on as before."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import message_factory
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.client import Client
from slipstream.common.errors import InvalidArgumentError
from slipstream.common.rpc.status import error_from_rpc
from slipstream.protos import generation_pb2 as pb
from tests.harness.checkpoints import VOCAB_SIZE, write_checkpoint, write_json
from tests.harness.hostile_messages import decodes, mangled, messages, methods
from tests.harness.running import Running, running_up, until
from tests.harness.sampling import examples

pytestmark = pytest.mark.timeout(180)

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"]
METHODS = {name: (kind, is_stream) for name, kind, is_stream in methods(SERVICE)}
CONTEXT_TOKENS = 96
TIMEOUT_S = 30.0
ENDLESS = "Deliver"
"""The stream that lasts until its caller leaves."""
REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
)
FUZZ = settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))

_JOB_IDS = st.sampled_from(("a", "b", "c", "a.B_9:-", "", "x" * 128, "x" * 129, "a b", "ä"))
_TOKENS = st.integers(0, VOCAB_SIZE - 1) | st.sampled_from((VOCAB_SIZE, 2**32 - 1))
_TEXTS = st.text(max_size=30) | st.sampled_from(("the man", "x" * 50, "<|eos|>", "x" * 5000, "é\0\n"))
_PROMISING: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.integers(0, CONTEXT_TOKENS),
    "temperature": st.sampled_from((0.0, 0.7, 1.5)),
    "top_p": st.sampled_from((1.0, 0.9, 1e-30)),
    "min_p": st.sampled_from((0.0, 0.1, 1.0)),
    "top_k": st.sampled_from((0, 1, 40)),
    "stop_token_ids": _TOKENS,
    "page_size": st.integers(0, 3),
    "page_token": st.sampled_from(("", "1", "2", "99")),
    "from_token": st.integers(0, CONTEXT_TOKENS),
    "job_id": _JOB_IDS,
    "text": _TEXTS,
    "ids": _TOKENS,
    "stop": st.sampled_from(("x", "the", "\0", "👩")),
    "min_new_tokens": st.integers(0, 5),
    "n": st.integers(1, 3),
    "repetition_penalty": st.sampled_from((1.0, 1.3, 2.0)),
    "frequency_penalty": st.sampled_from((0.0, -2.0, 2.0)),
    "presence_penalty": st.sampled_from((0.0, -2.0, 2.0)),
    "logit_bias": st.sampled_from((0.0, -100.0, 100.0)),
    "top_logprobs": st.integers(0, 20),
    "max_draft_tokens": st.integers(0, 4),
    "role": st.sampled_from(("system", "user", "assistant")),
    "content": _TEXTS,
}


def _fields(kind: type[Message], seen: set[str]) -> Iterator[str]:
    """Full names of the fields here and in the messages within."""
    descriptor: Any = kind.DESCRIPTOR
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from _fields(message_factory.GetMessageClass(field.message_type), seen)
        yield field.full_name


VALUES = {
    name: _PROMISING[name.rpartition(".")[2]]
    for kind, _ in METHODS.values()
    for name in _fields(kind, set())
    if name.rpartition(".")[2] in _PROMISING
}
"""Values that a server may well take, so that not all is refused for its first field."""


@st.composite
def sent_to(draw: st.DrawFn, method: str) -> bytes:
    """Draws the bytes of a request to a method: arbitrary ones, or a request that may be valid."""
    message: Any = draw(messages(METHODS[method][0], VALUES))
    if "sampling_params" in message.DESCRIPTOR.fields_by_name and draw(st.booleans()):
        message.DiscardUnknownFields()
        message.input_ids.ids[:] = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40))
        message.sampling_params.max_new_tokens = draw(st.integers(1, CONTEXT_TOKENS // 2))
        if message.job_id not in ("", "a", "b", "c"):
            message.job_id = "a"
    return mangled(draw, message.SerializeToString())


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, and what it was before it was fuzzed."""

    address: str
    state_dir: Path
    up: Running
    expected: list[int]

    def tokens(self) -> list[int]:
        """The canary's."""
        with Client(self.address) as client:
            chunks = client.generate([5, 6, 7], max_new_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
            return [token for chunk in chunks for token in chunk.token_ids]

    def check_it_serves_on(self) -> None:
        """Nothing waits, nothing runs, every page and slot is free, no error in a log, and the same tokens come."""
        with Client(self.address) as client:
            # A call that was cancelled may become a job yet.
            until(lambda: self._is_idle(client), self.up)
        assert self.tokens() == self.expected
        for log in self.state_dir.glob("*.log"):
            lines = log.read_text(encoding="utf-8").splitlines()
            assert not [line for line in lines if " ERROR " in line], lines[-40:]

    @staticmethod
    def _is_idle(client: Client) -> bool:
        info = client.server_info()
        has_all = info.num_free_pages == info.num_pages and info.num_running == info.num_waiting == 0
        return has_all and all(job.state == "ended" for job in client.list_jobs(page_size=1000).jobs)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Small, with a draft, and a queue that is soon full."""
    folder = tmp_path_factory.mktemp("hostile")
    target = write_checkpoint(folder / "target", seed=9)
    settings_file = target / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    write_json(settings_file, json.loads(settings_file.read_text()) | {"chat_template": template})
    sizes = {"--slots": "3", "--queue": "2", "--context-tokens": str(CONTEXT_TOKENS), "--max-batched-tokens": "16"}
    models = ("--target", str(target), "--draft", str(target), "--algorithm", "standalone", "--kv-memory-mib", "8")
    with running_up(folder / "state", *models, *itertools.chain(*sizes.items())) as up:
        address = (folder / "state" / "server").read_text()
        made = Server(address, folder / "state", up, [])
        # What is open is counted from here on.
        with Client(address) as client:
            until(lambda: client.server_info().draft_state == "attached", up)
        made.expected.extend(made.tokens())
        assert len(set(made.expected)) > 8
        yield made


def exchange(channel: grpc.Channel, method: str, sent: bytes, num_read: int | None) -> Any:
    """Makes a call with these bytes; reads so many messages of a stream and leaves, or all. Returns the error."""
    _, is_stream = METHODS[method]
    path = f"/{SERVICE.full_name}/{method}"
    try:
        if not is_stream:
            channel.unary_unary(path)(sent, timeout=TIMEOUT_S)
            return None
        call = channel.unary_stream(path)(sent, timeout=TIMEOUT_S)
        for _ in itertools.islice(call, num_read):
            pass
        call.cancel()
    except grpc.RpcError as error:
        return error
    return None


def check_refusal(kind: type[Message], sent: bytes, error: Any) -> None:
    """A proper status, and one that says which field it is about."""
    if not decodes(kind, sent):
        found = error_from_rpc(error)
        assert isinstance(found, InvalidArgumentError), error
        assert found.field == "request"
        return
    assert error.code() in REFUSALS, error
    found = error_from_rpc(error)
    if isinstance(found, InvalidArgumentError):
        descriptor: Any = kind.DESCRIPTOR
        first = found.field.partition(".")[0].partition("[")[0]
        assert first.isdigit() or first in (*descriptor.fields_by_name, *descriptor.oneofs_by_name), found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", METHODS)
def test_any_message_gets_a_proper_status(server: Server, method: str) -> None:
    kind, _ = METHODS[method]

    with grpc.insecure_channel(server.address) as channel:

        @FUZZ
        @given(sent=sent_to(method), num_read=st.none() | st.integers(0, 3))
        def fuzz(sent: bytes, num_read: int | None) -> None:
            error = exchange(channel, method, sent, 1 if method == ENDLESS else num_read)
            if error is not None:
                check_refusal(kind, sent, error)
            elif num_read is None:
                assert decodes(kind, sent), "bytes that are no message were taken for one"

        fuzz()
    server.check_it_serves_on()


def test_any_calls_at_once(server: Server) -> None:
    """Streams that are left open, jobs that fill the queue, cancels and watchers of other calls' jobs."""
    anything = st.one_of(*(st.tuples(st.just(method), sent_to(method)) for method in METHODS))
    with grpc.insecure_channel(server.address) as channel:
        # The first constraint starts the process that compiles them.
        constrained = pb.GenerateRequest(text="x", regex="a")
        exchange(channel, "Generate", constrained.SerializeToString(), None)
    before = {process.pid: process.num_fds() for process in server.up.children()}

    @settings(FUZZ, max_examples=examples(25, sampled=10))
    @given(sequence=st.lists(anything, min_size=2, max_size=12))
    def fuzz(sequence: list[tuple[str, bytes]]) -> None:
        with grpc.insecure_channel(server.address) as channel:
            calls = []
            for method, sent in sequence:
                path = f"/{SERVICE.full_name}/{method}"
                if METHODS[method][1]:
                    call = channel.unary_stream(path)(sent, timeout=TIMEOUT_S)
                    calls.append((call, partial(list, call)))
                else:
                    call = channel.unary_unary(path).future(sent, timeout=TIMEOUT_S)
                    calls.append((call, call.result))
            for number, (call, finish) in enumerate(calls):
                if number % 3 == 2 or sequence[number][0] == ENDLESS:
                    call.cancel()
                    continue
                try:
                    finish()
                except grpc.RpcError as error:
                    method, sent = sequence[number]
                    check_refusal(METHODS[method][0], sent, error)

    fuzz()
    server.check_it_serves_on()
    until(lambda: all(psutil.Process(pid).num_fds() <= count + 1 for pid, count in before.items()), server.up)


def test_a_message_that_is_too_large(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        sent = pb.GenerateRequest(text="x" * 5 * 2**20).SerializeToString()
        error = exchange(channel, "Generate", sent, None)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    server.check_it_serves_on()
