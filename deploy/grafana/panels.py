"""Panels as all dashboards have them: every one with a unit, a description and thresholds."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slipstream.deploy.grafana.queries import Query

Panel: TypeAlias = stat.Panel | timeseries.Panel | bargauge.Panel | heatmap.Panel | table.Panel
Limits: TypeAlias = "Sequence[tuple[float, str]]"
"""From which value on which colour; green below the first."""

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24
"""Columns of Grafana's grid."""


def numbers(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    limits: Limits = (),
    base: str = "green",
    span: int = 6,
    height: int = 4,
    decimals: int | None = None,
) -> stat.Panel:
    """The newest values, large."""
    panel = (
        stat.Panel()
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .text_mode(common_models.BigValueTextMode.AUTO)
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .thresholds(_thresholds(limits, base))
        .span(span)
        .height(height)
    )
    if decimals is not None:
        panel.decimals(decimals)
    for target in _targets(queries):
        panel.with_target(target)
    return panel


def graph(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    limits: Limits = (),
    base: str = "green",
    is_stacked: bool = False,
    lines: Sequence[str] = (),
    colors: Mapping[str, str] | None = None,
    span: int = 12,
    height: int = 8,
    least: float | None = 0,
    most: float | None = None,
) -> timeseries.Panel:
    """Values over time. `lines` names the series that lie over a stack instead of in it; `colors` is by series."""
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.TABLE).show_legend(True)
    mode = common_models.StackingMode.NORMAL if is_stacked else common_models.StackingMode.NONE
    panel = (
        timeseries.Panel()
        .legend(legend.placement(common_models.LegendPlacement.BOTTOM).calcs(["lastNotNull", "mean"]))
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        .stacking(common.StackingConfig().mode(mode).group("A"))
        .fill_opacity(60 if is_stacked else 8)
        .line_width(1)
        .show_points(common_models.VisibilityMode.NEVER)
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .thresholds(_thresholds(limits, base))
        .span(span)
        .height(height)
    )
    if limits:
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED))
    if least is not None:
        panel.min(least)
    if most is not None:
        panel.max(most)
    for target in _targets(queries):
        panel.with_target(target)
    for name in lines:
        panel.override_by_name(name, _LINE)
    for name, color in (colors or {}).items():
        fixed = {"mode": "fixed", "fixedColor": color}
        panel.override_by_name(name, [models.DynamicConfigValue(id_val="color", value=fixed)])
    return panel


def bars(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    limits: Limits = (),
    base: str = "green",
    span: int = 8,
    height: int = 8,
    most: float | None = None,
) -> bargauge.Panel:
    """The newest values, side by side."""
    panel = (
        bargauge.Panel()
        .display_mode(common_models.BarGaugeDisplayMode.GRADIENT)
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .thresholds(_thresholds(limits, base))
        .span(span)
        .height(height)
    )
    if most is not None:
        panel.max(most)
    for target in _targets(queries):
        panel.with_target(target)
    return panel


def heat_map(
    title: str, description: str, query: Query, *, unit: str, span: int = 12, height: int = 8
) -> heatmap.Panel:
    """A histogram's buckets over time."""
    target = _target(query, "A").format(prometheus_models.PromQueryFormat.HEATMAP)
    colors = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    return (
        heatmap.Panel()
        .calculate(False)
        .color(colors)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_gap(1)
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .thresholds(_thresholds((), "green"))
        .span(span)
        .height(height)
        .with_target(target)
    )


def listing(
    title: str, description: str, query: Query, *, columns: Sequence[str], span: int = 24, height: int = 6
) -> table.Panel:
    """The labels of a metric that is always 1, a row each."""
    names = {name: number for number, name in enumerate(columns)}
    hidden = {name: True for name in ("Time", "Value", "__name__", "job") if name not in names}
    options = {"indexByName": names, "excludeByName": hidden}
    return (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("none")
        .thresholds(_thresholds((), "green"))
        .span(span)
        .height(height)
        .with_target(_target(query, "A").format(prometheus_models.PromQueryFormat.TABLE))
        .with_transformation(models.DataTransformerConfig(id_val="organize", options=options))
    )


_LINE = [
    models.DynamicConfigValue(id_val="custom.stacking", value={"mode": "none", "group": "A"}),
    models.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
    models.DynamicConfigValue(id_val="custom.lineWidth", value=2),
]


def _targets(queries: Sequence[Query]) -> list[prometheus.Dataquery]:
    return [_target(query, chr(ord("A") + number)) for number, query in enumerate(queries)]


def _target(query: Query, ref_id: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend or "__auto").ref_id(ref_id)
    return target.instant() if query.is_instant else target.range()


def _thresholds(limits: Limits, base: str) -> dashboard.ThresholdsConfig:
    steps = [models.Threshold(value=None, color=base)]
    steps += [models.Threshold(value=value, color=color) for value, color in limits]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
