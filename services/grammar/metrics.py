"""The metrics of a grammar worker."""

from __future__ import annotations

from slipstream.common.rpc.metrics import counter

MASKS = counter("slipstream_grammar_masks_total", "Masks that were filled, one for each place of a row in a step.")
MASK_SECONDS = counter(
    "slipstream_grammar_mask_seconds_total",
    "Time to make the masks of steps, after their waits; verify works meanwhile.",
)
SPECS = (MASKS, MASK_SECONDS)
