"""A bundled head behind `slipstream up`: all four services, on either device."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slipstream.bundled import prompts
from slipstream.client import Client
from slipstream.common.wire.server import ServerState
from tests.harness.running import running_up
from tests.harness.waiting import until

NUM_PROMPTS = 6
MAX_NEW_TOKENS = 48
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The server's outputs and its state."""

    token_ids: list[tuple[int, ...]]
    """Per job: each prompt greedily, then each at T = 0.8."""
    accept_lengths: list[float]
    """Mean accept length per job; 0 without a draft."""
    state: ServerState


def serve(state_dir: Path, device: str, algorithm: str) -> Outputs:
    """Runs the jobs in float32, several at a time, with a head ("eagle3", "eagle", "mtp", "dflash") or "none".

    "eagle" borrows the target's embedding and output.
    """
    options = ("--device", device, "--dtype", "float32", "--algorithm", algorithm, "--metrics-port", "0")
    if algorithm != "none":
        options = (*options, "--fixed-draft-tokens", "4", *(["--share-weights"] if algorithm == "eagle" else []))
    with running_up(state_dir, *options), Client((state_dir / "server").read_text()) as client:

        def run(number: int) -> tuple[tuple[int, ...], float]:
            temperature, prompt = TEMPERATURES[number // NUM_PROMPTS], prompts()[number % NUM_PROMPTS]
            settings = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": temperature, "seed": number}
            chunks = list(client.generate(prompt.text, ignore_eos=True, timeout_s=100, **settings))  # type: ignore[arg-type]
            usage = chunks[-1].usage
            assert usage is not None, "the last chunk has the usage"
            return tuple(token for chunk in chunks for token in chunk.token_ids), usage.mean_accept_length

        # A draft may attach a moment after the server is ready.
        asyncio.run(until(lambda: client.server_info().algorithm == algorithm))
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(run, range(NUM_PROMPTS * len(TEMPERATURES))))
        state = client.server_info()
    return Outputs([tokens for tokens, _ in answers], [length for _, length in answers], state)


def check_tokens(folder: Path, device: str, fences: tuple[str, ...], algorithm: str = "eagle3") -> None:
    """Asserts that the tokens with a head are those of plain decoding on the same device."""
    drafted = serve(folder / algorithm, device, algorithm)
    assert drafted.state.algorithm == algorithm
    assert drafted.state.fence in fences
    services = drafted.state.services
    assert len({service.pid for service in services}) == len(services) >= 4, "each service is a process of its own"
    workers = [service for service in drafted.state.services if service.name in ("draft", "verify")]
    assert len(workers) == 2
    assert len({service.device for service in workers}) == 1
    assert (workers[0].device == "cpu") == (device == "cpu")
    assert any(worker.shared_weight_bytes for worker in workers) == (algorithm == "eagle")
    plain = serve(folder / "plain", device, "none")
    assert {service.name for service in plain.state.services} == {service.name for service in services} - {"draft"}
    assert all(len(tokens) == MAX_NEW_TOKENS for tokens in plain.token_ids)
    assert drafted.token_ids == plain.token_ids
    greedy, sampled = drafted.accept_lengths[:NUM_PROMPTS], drafted.accept_lengths[NUM_PROMPTS:]
    for lengths in (greedy, sampled):
        assert sum(lengths) / NUM_PROMPTS > 1.5, "the head's tokens are used"
