"""A target of several ranks in one process: rank 0 is the caller's thread, each of the others has its own."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from slipstream.services.models.checkpoint import load_decoder
from slipstream.services.models.config import Rank
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.ranks import Ranks
from slipstream.services.worker.crew import Crew, join_ranks
from slipstream.services.worker.follower import Follower, Line
from tests.harness.paged_model import CPU, PAGE_SIZE, PagedModel


@contextmanager
def ranked_model(path: Path, num_ranks: int) -> Iterator[PagedModel]:
    """A model whose parts compute together."""
    lost: list[tuple[int, str]] = []
    store = os.memfd_create("ranks")
    pairs = [socket.socketpair() for _ in range(1, num_ranks)]
    crew = Crew([own for own, _ in pairs], store, lambda *rank: lost.append(rank))

    def part(ranks: Ranks) -> Decoder:
        return load_decoder(path, device=CPU, dtype=torch.float32, ranks=ranks)

    def follow(number: int, connection: socket.socket) -> None:
        ranks, line = join_ranks(Rank(number, num_ranks), store, CPU), Line(connection)
        with connection:
            line.show_life()
            decoder = part(ranks)
            line.answer("")
            line.serve(Follower(decoder, ranks, CPU), ranks)

    threads = [threading.Thread(target=follow, args=(rank, theirs)) for rank, (_, theirs) in enumerate(pairs, 1)]
    for thread in threads:
        thread.start()
    ranks = crew.meet(CPU)
    try:
        model = PagedModel(part(ranks))
        crew.wait_until_loaded()
        ranks.ask("open", num_pages=model.cache.num_pages, page_tokens=PAGE_SIZE)
        yield model
        assert not lost
    finally:
        crew.close()
        for thread in threads:
            thread.join(20)
        for own, _ in pairs:
            own.close()
        os.close(store)
    assert not any(thread.is_alive() for thread in threads)
