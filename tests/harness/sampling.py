"""Samples of slow properties: `make test` runs a part of each with a printed seed, `make test-all` the whole.

Hypothesis tries a fifth of its examples, `@settings(max_examples=examples(1000))` a fifth of those.
`@pytest.mark.sampled(2)` runs two of the test's parameters, and `pytestmark = pytest.mark.sampled_module(9)` nine of
the module's tests, parameters counted one by one.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import pytest

is_sampled = False
"""True while `--sampled` is given. Set before tests are imported."""
SHARE = 5


def examples(whole: int, *, sampled: int | None = None) -> int:
    """Hypothesis's number of examples: `whole`, or in a sampled run a fifth of it (or `sampled`)."""
    return (sampled or max(5, whole // SHARE)) if is_sampled else whole


def left_out(items: list[pytest.Item], seed: int) -> set[pytest.Item]:
    """Returns what a sampled run leaves out.

    That is all but n of the parameters of a test that is marked `sampled(n)`, and then all but n of the tests of a
    module that is marked `sampled_module(n)`. Of a module, tests that other marks leave out do not count.
    """
    gone = _beyond("sampled", items, seed, lambda item: item.nodeid.partition("[")[0])
    is_run = [item for item in items if item not in gone and not any(map(item.get_closest_marker, ("slow", "gpu")))]
    return gone | _beyond("sampled_module", is_run, seed, lambda item: item.nodeid.partition("::")[0])


def _beyond(
    mark_name: str, items: list[pytest.Item], seed: int, group_of: Callable[[pytest.Item], str]
) -> set[pytest.Item]:
    """Returns the marked items beyond their mark's number, drawn at random from each group."""
    groups: dict[str, list[tuple[int, pytest.Item]]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker(mark_name)
        if mark is not None:
            groups[group_of(item)].append((mark.args[0], item))
    gone: set[pytest.Item] = set()
    for name, group in groups.items():
        count = min(number for number, _ in group)
        chosen = random.Random(f"{seed} {name}").sample(range(len(group)), min(count, len(group)))
        gone.update(item for index, (_, item) in enumerate(group) if index not in chosen)
    return gone
