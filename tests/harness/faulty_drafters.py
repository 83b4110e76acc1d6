"""NumPy drafters, each with a fault of its own, in one process: faulty_drafters.py --tokenizer DIR --listen unix:DIR.

Each serves at DIR/NAME.sock, by its name in `FAULTS`; "none" and "pauses" have no fault.
"""

from __future__ import annotations

import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "numpy_drafter"))

from collections.abc import Iterable

import grpc
from epoch import Epoch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from ngram import History
from server import describe, parse_arguments
from servicer import DraftServicer

from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc


class SignalsFirst(Epoch):
    """Copies its guesses to the shared memory when it has signalled them."""

    def _carry_out(self, command: Any) -> None:
        shared = self._draft_tokens
        self._draft_tokens = shared.copy()
        super()._carry_out(command)
        if command.slots:
            threading.Event().wait(0.005)
            shared[command.slots] = self._draft_tokens[command.slots]
        self._draft_tokens = shared


class BeyondVocabulary(Epoch):
    """Guesses tokens that there are not."""

    def _propose(self, slot: int, num_guesses: int) -> list[int]:
        return [token + self._vocab_size for token in super()._propose(slot, num_guesses)]


class Scribbles(Epoch):
    """Writes the rows of all slots."""

    def _propose(self, slot: int, num_guesses: int) -> list[int]:
        self._draft_tokens[:] = 7
        return super()._propose(slot, num_guesses)


class DoesNotWait(Epoch):
    """Takes the stash to be there."""

    def _carry_out(self, command: Any) -> None:
        at_once = pb.StepCommand()
        at_once.CopyFrom(command)
        del at_once.waits[:]
        super()._carry_out(at_once)


class ReadsEarly(Epoch):
    """Reads the stash when a step begins, and waits then."""

    def _carry_out(self, command: Any) -> None:
        shared = self._seq_lens, self._num_new, self._last_tokens
        self._seq_lens, self._num_new, self._last_tokens = (array.copy() for array in shared)
        super()._carry_out(command)
        self._seq_lens, self._num_new, self._last_tokens = shared


class UncutHistory(History):
    """Overwrites tokens, and keeps those behind."""

    def put(self, position: int, tokens: Iterable[int]) -> None:
        """See `History.put`."""
        behind = self._tokens[position + len(list(tokens)) - self._start :]
        super().put(position, tokens)
        self._tokens += behind


class KeepsHistory(Epoch):
    """Keeps what a slot's last sequence had behind the new one's end."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._histories = [UncutHistory() for _ in self._histories]


class NeverLeaves(Epoch):
    """Waits on when its scheduler is gone."""

    def abandon(self) -> None:
        """See `Epoch.abandon`."""
        self.finish()


class SkipsSteps(Epoch):
    """Does not take in the stash where it need not guess."""

    def _carry_out(self, command: Any) -> None:
        done = pb.StepCommand()
        done.CopyFrom(command)
        if not any(command.num_draft_tokens):
            del done.slots[:]
        super()._carry_out(done)


class Pauses(Epoch):
    """Has no fault, and takes its time between the parts of a step."""

    def _carry_out(self, command: Any) -> None:
        for point in command.signals:
            part = pb.StepCommand()
            part.CopyFrom(command)
            del part.signals[:]
            part.signals.append(point)
            super()._carry_out(part)
            threading.Event().wait(0.005)


class TakesAnything(DraftServicer):
    """Compares nothing with verify's description."""

    def _misfit(self, request: Any) -> str:
        return ""


FAULTS: dict[str, Any] = {
    "none": Epoch,
    "pauses": Pauses,
    "signals-first": SignalsFirst,
    "beyond-vocabulary": BeyondVocabulary,
    "scribbles": Scribbles,
    "does-not-wait": DoesNotWait,
    "reads-early": ReadsEarly,
    "keeps-history": KeepsHistory,
    "never-leaves": NeverLeaves,
    "skips-steps": SkipsSteps,
    "takes-anything": Epoch,
}


def main() -> None:
    """Serves until a signal."""
    arguments = parse_arguments(__doc__, dtype="float32")
    description = describe(arguments, device="cpu", algorithm="faulty", model="faulty")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    servers = []
    for name, kind in FAULTS.items():
        server = grpc.server(ThreadPoolExecutor(8))
        serving = TakesAnything if name == "takes-anything" else DraftServicer

        def open_epoch(request: Any, kind: Any = kind) -> Epoch:
            return kind(request, description.vocab_size, lambda: None)

        pb_grpc.add_WorkerServicer_to_server(serving(description, open_epoch), server)
        checks = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        checks.set("slipstream.v1.Worker", health_pb2.HealthCheckResponse.SERVING)
        server.add_insecure_port(f"{arguments.listen}/{name}.sock")
        server.start()
        servers.append(server)  # one that nobody holds ends
    print("ready", flush=True)
    signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    main()
