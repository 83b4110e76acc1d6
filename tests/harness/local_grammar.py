"""A grammar worker in this process, and the scheduler's link to it: all of its process but gRPC."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from llguidance import LLExecutor

from slipstream.common.errors import SlipstreamError, UnavailableError
from slipstream.common.wire.events import EventLog
from slipstream.common.wire.step import Role, StepCommand
from slipstream.common.wire.worker import Attachment, WorkerDescription, attachment_to_pb, command_to_pb
from slipstream.protos import worker_pb2 as pb
from slipstream.scheduler.link import failure_of
from slipstream.services.grammar.epoch import GrammarEpoch
from slipstream.services.grammar.matchers import Grammars, load_tokenizer


class LocalGrammar:
    """One connection to it after the other, each by `link`, as to a process that is started again."""

    def __init__(self, log: EventLog | None = None) -> None:
        """`log`: gets its accesses."""
        self.log = log
        self.links: list[LocalGrammarLink] = []
        self.on_step: Callable[[GrammarEpoch, pb.StepCommand], bool] = lambda epoch, command: True
        """Called on the worker's thread before each step; False does nothing of it."""
        self.on_prepare: Callable[[str], None] = lambda grammar: None
        """Called with a grammar before it is compiled; may raise what is answered."""
        self.max_attachments = 100
        self.protocol_version = Role.GRAMMAR.protocol_version

    def link(self) -> LocalGrammarLink:
        """A new connection."""
        self.links.append(LocalGrammarLink(self))
        return self.links[-1]

    @property
    def num_attached(self) -> int:
        """Connections that were attached."""
        return sum(link.epoch is not None for link in self.links)


class _WatchedEpoch(GrammarEpoch):
    def __init__(self, grammar: LocalGrammar, request: pb.AttachRequest, grammars: Grammars) -> None:
        self._grammar = grammar
        self.failures: list[Exception] = []
        super().__init__(request, grammars, LLExecutor(1), self.failures.append, log=grammar.log)

    def _carry_out(self, command: pb.StepCommand) -> None:
        if self._grammar.on_step(self, command):
            super()._carry_out(command)


class LocalGrammarLink:
    """Implements `Link`."""

    role = Role.GRAMMAR
    has_refused = False

    def __init__(self, grammar: LocalGrammar) -> None:
        self._grammar = grammar
        self.failure: SlipstreamError | None = None
        self.epoch: _WatchedEpoch | None = None
        self._grammars: Grammars | None = None

    def describe(self) -> WorkerDescription:
        if self._grammar.num_attached == self._grammar.max_attachments:
            raise UnavailableError("it is gone")
        return WorkerDescription(
            role=Role.GRAMMAR,
            device="cpu",
            vocab_size=0,
            tokenizer_sha256="",
            dtype="",
            max_context_tokens=0,
            kv_bytes_per_token=0,
            model="llguidance",
            pid=os.getpid(),
            protocol_version=self._grammar.protocol_version,
        )

    def attach(self, attachment: Attachment) -> None:
        assert attachment.protocol_version == Role.GRAMMAR.protocol_version
        request = attachment_to_pb(attachment)
        peer = request.peer
        tokenizer = load_tokenizer(Path(peer.tokenizer_path), peer.vocab_size, peer.eos_token_ids)
        self._grammars = Grammars(tokenizer)
        self.epoch = _WatchedEpoch(self._grammar, request, self._grammars)

    def prepare(self, grammar: str) -> None:
        assert self._grammars is not None
        self._grammar.on_prepare(grammar)
        self._grammars.compile(grammar)

    def send(self, command: StepCommand) -> None:
        if self.failure is not None:
            raise failure_of(self)  # type: ignore[arg-type]
        assert self.epoch is not None
        self.epoch.enqueue(command_to_pb(command))

    def die(self) -> None:
        """The process dies: what it was sent is not done."""
        self.failure = UnavailableError("the grammar service is lost: it died")
        assert self.epoch is not None
        self.epoch._is_over.set()

    def detach(self, *, drain: bool) -> bool:
        if self.epoch is not None:
            threading.Thread(target=self.epoch.abandon, daemon=True).start()
        return True
