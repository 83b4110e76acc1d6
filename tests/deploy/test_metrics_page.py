"""docs/metrics.md and the definitions that it is made of."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry

from slipstream.common.rpc.metrics import MetricKind, MetricSpec
from slipstream.deploy.metrics_page import CATALOGUE, PAGE, text
from slipstream.gateway.metrics import COMPAT_SPECS

SPECS = [spec for section in CATALOGUE for spec in section.metrics]


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == text(), "run python -m slipstream.deploy.metrics_page"


def test_names_are_as_prometheus_wants_them() -> None:
    assert len({spec.name for spec in SPECS}) == len(SPECS)
    for spec in SPECS:
        assert re.fullmatch(r"slipstream(_[a-z0-9]+)+", spec.name) or spec in COMPAT_SPECS
        assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER), spec.name
        assert not spec.name.endswith(("_bucket", "_sum", "_count")), spec.name
        assert "ms" not in spec.name.split("_"), spec.name
        if spec.kind is MetricKind.HISTOGRAM:
            assert spec.name.endswith("_seconds")
            assert list(spec.buckets) == sorted(set(spec.buckets))


def test_help_is_a_sentence() -> None:
    for spec in SPECS:
        assert re.match(r"[A-Z01]", spec.help), spec.name
        assert spec.help.endswith("."), spec.name


def test_a_definition_registers_what_it_says() -> None:
    registry = CollectorRegistry()
    made = {MetricKind.COUNTER: MetricSpec.counter, MetricKind.GAUGE: MetricSpec.gauge}
    for spec in SPECS:
        made.get(spec.kind, MetricSpec.histogram)(spec, registry)
    families = {family.name: family for family in registry.collect()}
    for spec in SPECS:
        family = families[spec.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (spec.kind.value, spec.help)
