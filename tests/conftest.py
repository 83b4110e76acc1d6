"""Settings of all tests."""

from __future__ import annotations

import hypothesis

# How long an example takes depends on what else the machine does; pytest bounds the whole test.
hypothesis.settings.register_profile("tests", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tests")
