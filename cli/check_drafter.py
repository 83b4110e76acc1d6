"""`slipstream check-drafter`: checks, each of which attaches the drafter anew; its docstring is what is printed."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.cli.scripted_verify import ALPHABET, NUM_DRAFT_TOKENS, NUM_SLOTS, ContractError, ScriptedVerify
from slipstream.common.device.choose import AUTO, CPU, CUDA, choose_device
from slipstream.common.errors import FailedPreconditionError, SlipstreamError, UnavailableError
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.manifest import TIMELINE
from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.step import PROTOCOL_VERSION, Role
from slipstream.common.wire.worker import attachment_to_pb
from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc
from slipstream.scheduler.attachment import check_sharing
from slipstream.scheduler.link import ATTACH_TIMEOUT_S, Link, LinkThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from slipstream.common.device.interface import Device
    from slipstream.common.wire.worker import WorkerDescription

REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
POLL_S = 0.01
PROMPT = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3, 5, 2, 1, 2, 3]
"""Longer than a chunk, and it repeats itself in more than one way."""
OTHER_PROMPT = PROMPT[2:5]
"""A prompt whose tokens PROMPT has, too, followed by others."""
ACCEPTED = (0, 1, NUM_DRAFT_TOKENS, 0)
"""Guesses that verify accepts in the steps of a sequence."""


class Bench:
    """Attaches one drafter, again and again."""

    device: Device
    """The drafter's, to be set before it is attached."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        """`timeout_s`: the longest time that an answer or a step may take."""
        self._address = address
        self._thread = LinkThread()
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address)
        self.stub: Any = pb_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Closes the connections."""
        self._channel.close()
        self._thread.close()

    def link(self) -> Link:
        """Makes a link as the scheduler has it, without a listener."""
        return Link(Role.DRAFT, self._address, self._thread, on_failure=lambda: None)

    def describe(self) -> WorkerDescription:
        """Returns the drafter's description. Raises UnavailableError if it is not there."""
        link = self.link()
        try:
            return link.describe()
        finally:
            link.detach(drain=False)

    def health(self, name: str) -> int:
        """Returns the health of a service of the drafter."""
        request = health_pb2.HealthCheckRequest(service=name)
        answer = health_pb2_grpc.HealthStub(self._channel).Check(request, timeout=self._timeout_s)
        return answer.status  # type: ignore[no-any-return]

    def until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        """Waits until `is_so()`. Raises ContractError if it takes too long."""
        deadline = time.monotonic() + self._timeout_s
        while not is_so():
            if time.monotonic() > deadline:
                raise ContractError(f"{otherwise} for {self._timeout_s:g} s")
            time.sleep(POLL_S)

    @contextmanager
    def verify(self, *, run_ahead: int = 1) -> Iterator[ScriptedVerify]:
        """Yields the memory of an attachment that is not attached yet."""
        draft = self.describe()
        number = draft.last_epoch + 1
        verify = ScriptedVerify(self.device, draft, number, run_ahead=run_ahead, timeout_s=self._timeout_s)
        try:
            yield verify
        finally:
            verify.close()

    @contextmanager
    def attached(self, *, run_ahead: int = 1) -> Iterator[ScriptedVerify]:
        """Yields an attachment. At its end the drafter must be free again."""
        with self.verify(run_ahead=run_ahead) as verify:
            link = self.link()
            is_over = False
            try:
                verify.attach(link)
                yield verify
                is_over = True
            finally:
                if not is_over:
                    verify.give_up()
                has_drained = link.detach(drain=is_over)
            if not has_drained:
                raise ContractError(f"Drain fails{f': {link.failure}' if link.failure else ''}")
            if unfinished := verify.unfinished():
                raise ContractError(f"Drain returns while {unfinished}")
            self.await_end()

    def await_end(self) -> None:
        """Waits until the drafter knows that its scheduler is gone. Raises ContractError."""
        self.until(lambda: not self.describe().has_scheduler, "has_scheduler is true after the end of Execute")

    def answers(self) -> bool:
        """Returns whether the drafter still answers."""
        try:
            self.describe()
        except SlipstreamError:
            return False
        return True

    def execute(self, commands: list[pb.StepCommand]) -> None:
        """Sends commands on a new stream, and reads to its end. Raises grpc.RpcError."""
        list(self.stub.Execute(iter(commands), timeout=self._timeout_s))

    def must_refuse(self, what: str, call: Callable[[], object]) -> None:
        """Raises ContractError unless a call is refused, with one of REFUSALS."""
        accepted = " or ".join(code.name for code in REFUSALS)
        try:
            call()
        except grpc.RpcError as raised:
            error: Any = raised
            if error.code() not in REFUSALS:
                given = f"{error.code().name} ({error_from_rpc(error)})"
                raise ContractError(f"{what} is answered with {given}, not {accepted}") from None
        else:
            raise ContractError(f"{what} is taken, not refused with {accepted}")


def says_what_it_is(bench: Bench) -> None:
    """Says what it is, and that it serves."""
    for name in ("", "slipstream.v1.Worker"):
        if bench.health(name) != health_pb2.HealthCheckResponse.SERVING:
            raise ContractError(f"grpc.health.v1 does not say SERVING for {name!r}")
    draft = bench.describe()
    check_sharing(bench.device, [draft])
    for name, value, accepted in (
        ("protocol_version", draft.protocol_version, [PROTOCOL_VERSION]),
        ("length of tokenizer_sha256", len(draft.tokenizer_sha256), [64]),
        ("dtype", draft.dtype, ["float32"] if draft.device == "cpu" else ["bfloat16", "float16", "float32"]),
    ):
        if value not in accepted:
            raise ContractError(f"{name} is {value!r}, not {' or '.join(map(str, accepted))}")
    if draft.vocab_size <= ALPHABET:
        raise ContractError(f"vocab_size is {draft.vocab_size}")


def refuses_what_does_not_fit(bench: Bench) -> None:
    """Refuses an attachment that does not fit, and changes nothing."""
    with bench.attached() as verify:
        last_epoch = verify.attachment.epoch
    for what, change in (
        ("an epoch that is over", lambda made: setattr(made, "epoch", last_epoch)),
        ("the number of another process", lambda made: setattr(made, "pid", 2**32 - 1)),
        ("another protocol_version", lambda made: setattr(made, "protocol_version", PROTOCOL_VERSION + 1)),
        ("a verify with another tokenizer", lambda made: setattr(made.peer, "tokenizer_sha256", "0" * 64)),
        ("a verify of another dtype", lambda made: setattr(made.peer, "dtype", "int32")),
        ("a verify on another device", lambda made: setattr(made.peer, "device", "GPU-0")),
        ("memory that is smaller than its manifest says", lambda made: setattr(made.manifest, "size", 2**40)),
        ("a buffer of another shape", lambda made: made.manifest.buffers[0].shape.append(2)),
        ("a buffer after the end", lambda made: setattr(made.given.buffers[0], "offset", made.given.size)),
        ("memory without a fence", lambda made: made.manifest.ClearField("fences")),
        ("memory that is not there", _without_memory),
    ):
        with bench.verify() as verify:
            made = attachment_to_pb(verify.attachment)
            change(made)
            bench.must_refuse(f"Attach with {what}", partial(bench.stub.Attach, made, timeout=ATTACH_TIMEOUT_S))


def _without_memory(request: pb.AttachRequest) -> None:
    request.given.path, request.given.handle = "/dev/shm/slipstream-none", bytes(len(request.given.handle))


def drafts(bench: Bench) -> None:
    """Drafts tokens, writes nothing else, and signals when they are written."""
    samplings = (
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, seed=2**63),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, logit_bias=((3, 2.0),)),
    )
    with bench.attached() as verify:
        for slot, sampling in zip((1, 2, 4), samplings, strict=True):
            verify.take_in(slot, PROMPT[: 6 * slot], sampling)
        for number in range(2 * (NUM_DRAFT_TOKENS + 1)):
            verify.decode(4, 1, 2, accepted=number % (NUM_DRAFT_TOKENS + 1))
        verify.decode(2, accepted=1)
        verify.decode(4, accepted=0)
        step = verify.send()  # without slots
        verify.finish(step, ())
        verify.finish_prefill(step)
        verify.stash(step, {})


def waits_for_the_stash(bench: Bench) -> None:
    """Takes commands ahead, and waits for the stash of each."""
    with bench.attached(run_ahead=2) as verify:
        verify.take_in(1, PROMPT)
        step = verify.send((1,))
        queued = [verify.send((1,), wants_acknowledgement=True) for _ in range(2)]
        verify.await_acknowledgement(queued[-1])
        for each in (step, *queued):
            verify.accept(each, (1,), verify.finish(each, (1,)), NUM_DRAFT_TOKENS)


def guesses_alike(bench: Bench) -> None:
    """Guesses alike for equal input, whenever the stash is signalled."""
    expected = _guesses(bench)
    _compare(_guesses(bench), expected, "equal requests in two attachments")
    with bench.attached() as verify:
        verify.take_in(1, PROMPT)
        step = verify.send((1,))
        found = verify.finish(step, (1,))
        for accepted in ACCEPTED[:-1]:
            following = verify.send((1,))
            verify.scramble(1)
            verify.hold()
            verify.accept(step, (1,), found[-1:], accepted)
            step = following
            found += verify.finish(step, (1,))
        verify.accept(step, (1,), found[-1:], ACCEPTED[-1])
    _compare(found, expected, "a stash that is there before the command and a later one")


def takes_in_where_it_need_not_guess(bench: Bench) -> None:
    """Takes in the stash in a step that asks for no guess as in any other."""
    with bench.attached() as verify:
        verify.take_in(1, PROMPT)
        expected = [verify.decode(1, accepted=accepted)[0] for accepted in (1, 0, 0, 1)]
    with bench.attached() as verify:
        verify.take_in(1, PROMPT)
        found = verify.decode(1, accepted=1)
        verify.decode_plainly(1)
        verify.decode_plainly(1)
        found += verify.decode(1, accepted=1)
    _compare(found, [expected[0], expected[-1]], "steps that draft none and steps whose guesses are wrong")


def takes_in_prompts_beside(bench: Bench) -> None:
    """Drafts and takes in a prompt in one step, and signals each part at its place."""
    with bench.attached() as verify:
        verify.take_in(1, PROMPT)
        expected = [verify.decode(1, accepted=NUM_DRAFT_TOKENS)[0] for _ in range(3)]
        verify.take_in(2, OTHER_PROMPT)
        expected += verify.decode(2, accepted=1)
    with bench.attached() as verify:
        verify.take_in(1, PROMPT)
        found = verify.decode(1, accepted=NUM_DRAFT_TOKENS)
        found += verify.take_in(2, OTHER_PROMPT, beside=(1,))
        found += verify.decode(1, accepted=NUM_DRAFT_TOKENS)
        found += verify.decode(2, accepted=1)
    _compare(found, expected, "steps with a prompt beside and steps without")


def forgets_a_slots_last_sequence(bench: Bench) -> None:
    """Forgets a slot's last sequence."""
    expected = _guesses(bench, OTHER_PROMPT)
    with bench.attached() as verify:
        _sequence(verify, PROMPT)
        found = _sequence(verify, OTHER_PROMPT)
    _compare(found, expected, "a sequence in a new slot and in one that had another before")


def catches_up(bench: Bench) -> None:
    """Catches up with sequences that run already."""
    with bench.attached() as verify:
        found = _sequence(verify, PROMPT, catches_up=True)
    if not verify.reads_hidden:  # it begins with the stash then
        _compare(found, _guesses(bench), "a prompt in PREFILL and in CATCH_UP steps")


def goes_on_after_a_release(bench: Bench) -> None:
    """Goes on after a release, whatever is in the memory."""
    with bench.attached() as verify:
        for value in (-1, 2**62, -(2**63), 2**63 - 1):
            verify.take_in(1, PROMPT)
            first = verify.send((1,))
            verify.finish(first, (1,))
            step = verify.send((1,))
            verify.lose(first, (1,), value)
            verify.release(step)
            verify.finish(step, (1,))
        found = _sequence(verify, PROMPT)
    _compare(found, _guesses(bench), "a sequence in new memory and in memory that was overwritten")


def refuses_what_makes_no_sense(bench: Bench) -> None:
    """Refuses a command that makes no sense, and does nothing for it."""
    stash, published = pb.FENCE_VERIFY_STASH, pb.FENCE_VERIFY_PUBLISH
    for what, fields in (
        ("another epoch", {"epoch": 2**40}),
        ("step 0", {"step": 0}),
        ("a number of draft tokens for a slot that is not named", {"num_draft_tokens": [1]}),
        ("a number of draft tokens above K", {"slots": [1], "num_draft_tokens": [NUM_DRAFT_TOKENS + 1]}),
        ("a slot that is not there", {"slots": [NUM_SLOTS]}),
        ("a signal of VERIFY_STASH", {"signals": [pb.FencePoint(fence=stash, value=1)]}),
        ("a wait for VERIFY_PUBLISH", {"waits": [pb.FenceWait(fence=published, place=pb.WAIT_PLACE_START)]}),
    ):
        with bench.verify() as verify:
            bench.stub.Attach(attachment_to_pb(verify.attachment), timeout=ATTACH_TIMEOUT_S)
            verify.allow_rehearsal()
            made = {"epoch": verify.attachment.epoch, "step": 1} | fields
            bench.must_refuse(f"a command with {what}", partial(bench.execute, [pb.StepCommand(**made)]))
            verify.check_memory(f"by a command with {what}")
            bench.await_end()


def serves_one_scheduler(bench: Bench) -> None:
    """Serves one scheduler at a time."""
    bench.must_refuse("Execute without Attach", partial(bench.execute, []))
    with bench.attached() as verify, bench.verify() as other:
        verify.take_in(1, PROMPT)
        described, number = bench.describe(), verify.attachment.epoch
        if not described.has_scheduler or described.last_epoch != number:
            found = f"has_scheduler {described.has_scheduler}, last_epoch {described.last_epoch}"
            raise ContractError(f"Describe says {found} in attachment {number}")
        request = attachment_to_pb(other.attachment)
        bench.must_refuse("Attach beside Execute", partial(bench.stub.Attach, request, timeout=ATTACH_TIMEOUT_S))
        bench.must_refuse("a second Execute", partial(bench.execute, []))
        bench.stub.Drain(pb.DrainRequest(epoch=number + 1), timeout=ATTACH_TIMEOUT_S)  # of no effect
        verify.decode(1, accepted=1)


def drains(bench: Bench) -> None:
    """Drains what is enqueued, and unmaps the memory."""
    with bench.attached(run_ahead=2) as verify:
        verify.take_in(1, PROMPT)
        steps = [verify.send((1,), wants_acknowledgement=True) for _ in range(3)]
        verify.await_acknowledgement(steps[-1])  # Drain is another call, which may overtake commands
        for step in steps:
            verify.accept(step, (1,), [[]], 0)
    pid = bench.describe().pid
    paths = [manifest.path for manifest in (verify.own.manifest, verify.given.manifest) if manifest.path]
    bench.until(lambda: not any(path in _maps(pid) for path in paths), "memory is mapped that was drained")


def ends_with_the_stream(bench: Bench) -> None:
    """Ends with the stream of commands, in the middle of a wait, and can be attached anew."""
    expected = _guesses(bench)
    with bench.verify() as verify:
        link = bench.link()
        verify.attach(link)
        verify.take_in(1, PROMPT)
        verify.finish(verify.send((1,)), (1,))
        verify.send((1,))
        verify.hold()
        link.detach(drain=False)
        bench.await_end()
    _compare(_guesses(bench), expected, "an attachment before one that broke off and one after it")


CHECKS = (
    says_what_it_is,
    refuses_what_does_not_fit,
    drafts,
    waits_for_the_stash,
    guesses_alike,
    takes_in_where_it_need_not_guess,
    takes_in_prompts_beside,
    forgets_a_slots_last_sequence,
    catches_up,
    goes_on_after_a_release,
    refuses_what_makes_no_sense,
    serves_one_scheduler,
    drains,
    ends_with_the_stream,
)


def run_checks(bench: Bench) -> Iterator[tuple[str, str]]:
    """Makes the checks. Yields what each is and what broke it, if anything did; ends when nobody answers."""
    for check in CHECKS:
        name, broken = (check.__doc__ or "").rstrip("."), ""
        try:
            check(bench)
        except (ContractError, SlipstreamError) as error:
            broken = str(error)
        except grpc.RpcError as error:
            broken = str(error_from_rpc(error))
        if broken and not bench.answers():
            yield name, f"{broken}; nobody answers any more, and no further check is made"
            return
        yield name, broken


def _guesses(bench: Bench, prompt: Sequence[int] = PROMPT) -> list[list[int]]:
    """The guesses for a greedy request in an attachment of its own."""
    with bench.attached() as verify:
        return _sequence(verify, prompt)


def _sequence(verify: ScriptedVerify, prompt: Sequence[int], *, catches_up: bool = False) -> list[list[int]]:
    """The guesses for a greedy request in slot 1."""
    verify.take_in(1, prompt, catches_up=catches_up)
    return [verify.decode(1, accepted=accepted)[0] for accepted in ACCEPTED]


def _compare(found: list[list[int]], expected: list[list[int]], between: str) -> None:
    if found != expected:
        raise ContractError(f"greedy guesses differ between {between}: {expected} and {found}")


def _maps(pid: int) -> str:
    """The mappings of a process, as far as they can be seen."""
    try:
        return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def run_check_drafter(address: str, device: str, *, timeout_s: float) -> int:
    """Returns 1 if the drafter at `address` breaks the contract. `device`: "cpu", "cuda" or "auto", the drafter's own.

    Raises UnavailableError if nobody answers, FailedPreconditionError if the drafter has a scheduler, ConfigError.
    """
    with closing(Bench(address, timeout_s=timeout_s)) as bench:
        try:
            draft = bench.describe()
        except UnavailableError as error:
            raise UnavailableError(f"no drafter answers at {address}: {error}") from error
        if draft.has_scheduler:
            raise FailedPreconditionError("the drafter has a scheduler: start one only for the check")
        if device == AUTO:
            device = CPU if draft.device == CPU else CUDA
        bench.device = choose_device(device, AUTO if device == CPU else TIMELINE)
        num_made = num_broken = 0
        for name, broken in run_checks(bench):
            print(f"✗ {name}: {broken}" if broken else f"✓ {name}", flush=True)
            num_made, num_broken = num_made + 1, num_broken + bool(broken)
    print(f"\n{draft.model}: {num_made} of {len(CHECKS)} checks made, {num_broken} broken")
    return 1 if num_broken else 0
