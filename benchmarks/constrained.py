"""Decode steps whose requests have a constraint, beside steps without: the time of a step, of its masks, and of waits.

The draft knows the outputs of the same requests before (prompt lookup that searches them), so that it proposes what the
grammar allows and the target takes: accept length and masks are real, whatever the weights.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import add
from pathlib import Path
from statistics import mean, median
from typing import Any

from slipstream.benchmarks.models import BUNDLED, NGRAM, NGRAM_SUFFIX, NUM_DRAFT_TOKENS, Setup, draft_options
from slipstream.benchmarks.runner import DevicePlan, Row, Table, benchmark, grouped, host
from slipstream.benchmarks.stack import SCRIPTS, Served, Stack, free_ports, words
from slipstream.benchmarks.streams import SEED, Window, stream_window
from slipstream.cli.load_requests import Request, request
from slipstream.common.rpc.metrics import HOST_STALL_SECONDS, scrape
from slipstream.common.settings import setting
from slipstream.services.grammar.metrics import MASK_SECONDS, MASKS

FREE, ALL, SOME = MODES = ("free", "constrained", "mixed")
"""Which requests of a batch have a constraint: none, all, or NUM_MIXED of them."""
NUM_MIXED = 8
LEAST_STEPS = 80
"""In a repeat, which takes as many batches of requests as that needs."""
WARM_UP_TOKENS = 16
SUFFIX_CACHE_TOKENS = 131_072
"""More than the modes put out in a repeat: the draft knows the outputs of the one before."""
PROMPT_TOKENS, MAX_NEW_TOKENS = 128, 376
GRAMMAR_TIMEOUT_MS = 5000
"""Far more than a step waits: a grammar worker that is found late would be measured as none."""
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 1, "maximum": 999999},
            "name": {"type": "string", "minLength": 3, "maxLength": 24},
            "kind": {"enum": ["person", "company", "place", "event", "product"]},
            "email": {"type": "string", "pattern": "^[a-z]{3,12}@[a-z]{3,12}[.](com|org|net)$"},
            "tags": {"type": "array", "maxItems": 4, "items": {"type": "string", "maxLength": 10}},
            "created": {"type": "string", "format": "date"},
            "is_active": {"type": "boolean"},
            "address": {
                "type": "object",
                "properties": {
                    "street": {"type": "string", "maxLength": 30},
                    "city": {"type": "string", "maxLength": 20},
                    "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                },
                "required": ["street", "city", "zip"],
                "additionalProperties": False,
            },
        },
        "required": ["id", "name", "kind", "email", "created", "is_active", "address"],
        "additionalProperties": False,
    },
}
"""A schema of medium size: an output that keeps to it is longer than a window."""


@dataclass(frozen=True, kw_only=True)
class Plan(DevicePlan):
    """The settings of a measurement."""

    shape: str = setting("llama-3.1-8b", help="Name of the target's shape, or bundled.")
    batches: str = setting("1,8,64", help="Numbers of concurrent requests.")
    repeats: int = setting(2, help="How often the modes take turns.")

    @property
    def sizes(self) -> list[int]:
        """Numbers of concurrent requests."""
        return [int(batch) for batch in self.batches.split(",")]


def requests_of(mode: str, batch: int) -> list[Request]:
    """The requests of a batch, the same each time."""
    rng, made = random.Random(SEED), []
    num_constrained = {FREE: 0, ALL: batch, SOME: NUM_MIXED}[mode]
    for number in range(batch):
        prompt = [rng.randrange(256, 4096) for _ in range(PROMPT_TOKENS)]
        one = request(prompt, MAX_NEW_TOKENS, 0.0, SEED + number)
        if number < num_constrained:
            one.options["ignore_eos"], one.options["json_schema"] = False, json.dumps(SCHEMA)
        made.append(one)
    return made


async def measure(served: Served, ports: Sequence[int], mode: str, batch: int, *, is_warm_up: bool = False) -> Row:
    """Measures as many windows as have enough steps; to warm up, one. `ports`: metrics of verify and grammar worker."""
    windows: list[Window] = []
    before = [await scrape(port) for port in ports]
    while not windows or (sum(window.num_steps for window in windows) < LEAST_STEPS and not is_warm_up):
        windows.append(await stream_window(served, requests_of(mode, batch), warm_up_tokens=WARM_UP_TOKENS))
    verify, grammar = [(await scrape(port)).since(then) for port, then in zip(ports, before, strict=True)]
    whole, num_masks = reduce(add, windows), grammar.total(MASKS.name)
    # Masks and waits are those of all steps, in the windows and about them: each such step has one mask a place.
    num_masked = num_masks / (NUM_DRAFT_TOKENS + 1) / (NUM_MIXED if mode == SOME else batch)
    return {
        "mode": mode,
        "batch": batch,
        "step_ms": whole.mean_ms(whole.step_s),
        "verify_ms": whole.mean_ms(whole.verify_s),
        "tokens_per_second": whole.tokens_per_second,
        "mean_accept_length": mean(window.mean_accept_length for window in windows),
        "num_steps": whole.num_steps,
        "num_masks": num_masks,
        "mask_ms": 1e3 * grammar.total(MASK_SECONDS.name) / num_masked if num_masks else 0.0,  # of a step
        "wait_ms": 1e3 * verify.total(HOST_STALL_SECONDS.name, site="masks") / num_masked if num_masks else 0.0,
        "fence": whole.fence,
        "mps": whole.has_mps,
    }


def ratios(rows: list[Row]) -> list[Row]:
    """The median over the repeats of a step's time with constraints by that without, in the same repeat."""
    found = []
    groups = grouped(rows, "batch", "mode")
    for batch, mode in product(dict.fromkeys(row["batch"] for row in rows), (ALL, SOME)):
        if pairs := list(zip(groups.get((batch, mode), ()), groups.get((batch, FREE), ()), strict=False)):
            ratio = median(row["step_ms"] / free["step_ms"] for row, free in pairs)
            found.append({"batch": batch, "mode": mode, "ratio": round(ratio, 4)})
    return found


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> None:
    """Measures decode steps with constraints and without."""
    setup = Setup.named(plan.shape if plan.shape == BUNDLED else f"{plan.shape}-{NGRAM}")
    ports, rows, table = free_ports(2), list[Row](), Table(file, "shape")
    async with Stack(device=plan.device) as stack:
        draft = {**draft_options(NGRAM_SUFFIX, target=setup.target), "suffix_cache_tokens": SUFFIX_CACHE_TOKENS}
        grammar = words(listen=stack.socket("grammar"), metrics_port=ports[1])
        await asyncio.gather(
            stack.worker("verify", model=setup.target, load_format=setup.load_format, metrics_port=ports[0]),
            stack.worker("draft", **draft),
            stack.process("grammar", str(SCRIPTS / "slipstream-grammar"), *grammar),
        )
        options: dict[str, Any] = {
            "slots": max(plan.sizes),
            "context_tokens": PROMPT_TOKENS + MAX_NEW_TOKENS,
            "kv_memory_mib": setup.kv_memory_mib,
            "no_prefix_cache": True,
            "grammar": stack.socket("grammar"),
            "grammar_timeout_ms": GRAMMAR_TIMEOUT_MS,
        }
        async with stack.scheduler("draft", fixed_draft_tokens=NUM_DRAFT_TOKENS, **options) as served:
            for batch in plan.sizes:
                modes = [mode for mode in MODES if mode != SOME or batch > NUM_MIXED]
                for repeat in range(-1, plan.repeats):
                    for mode in modes:
                        row = await measure(served, ports, mode, batch, is_warm_up=repeat < 0)
                        if repeat >= 0:
                            rows.append({"shape": plan.shape, "repeat": repeat, **row, "host": host(plan.device)})
                            table.add(rows[-1])
    for ratio in ratios(rows):
        print(json.dumps(ratio), flush=True)
