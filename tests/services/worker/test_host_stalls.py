"""The time that a host is blocked counts once."""

from __future__ import annotations

import threading

from slipstream.services.worker.host_stalls import ATTACH, STAGING, STALL_SITES, HostStalls


def test_a_block_within_another_counts_for_that_alone() -> None:
    stalls = HostStalls()
    with stalls.at(ATTACH), stalls.at(STAGING):
        pass
    found = stalls.seconds()
    assert found[ATTACH] > 0
    assert found == dict.fromkeys(STALL_SITES, 0.0) | {ATTACH: found[ATTACH]}
    with stalls.at(STAGING):
        pass
    assert stalls.seconds()[STAGING] > 0


def test_blocks_of_another_thread_count() -> None:
    stalls = HostStalls()

    def stage() -> None:
        with stalls.at(STAGING):
            pass

    with stalls.at(ATTACH):
        thread = threading.Thread(target=stage)
        thread.start()
        thread.join()
    assert stalls.seconds()[STAGING] > 0
