"""The panels of all dashboards, each with a unit, a description and thresholds."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slipstream.deploy.grafana.queries import Query

Panel: TypeAlias = stat.Panel | timeseries.Panel | bargauge.Panel | heatmap.Panel | table.Panel
P = TypeVar("P", stat.Panel, timeseries.Panel, bargauge.Panel, heatmap.Panel, table.Panel)
Limits: TypeAlias = "Sequence[tuple[float, str]]"
"""The colours from each value on; green below the first."""

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24
"""Columns of Grafana's grid."""


def numbers(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "none",
    limits: Limits = (),
    base: str = "green",
    span: int = 6,
    height: int = 4,
    decimals: int | None = None,
) -> stat.Panel:
    """The newest values, large."""
    panel = _framed(stat.Panel(), queries, title, description, unit, _thresholds(limits, base), (span, height))
    panel.graph_mode(common_models.BigValueGraphMode.AREA).color_mode(common_models.BigValueColorMode.VALUE)
    panel.reduce_options(_newest()).text_mode(common_models.BigValueTextMode.AUTO)
    return panel if decimals is None else panel.decimals(decimals)


def graph(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "none",
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
    panel = _framed(timeseries.Panel(), queries, title, description, unit, _thresholds(limits, base), (span, height))
    panel.legend(legend.placement(common_models.LegendPlacement.BOTTOM).calcs(["lastNotNull", "mean"]))
    panel.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    panel.stacking(common.StackingConfig().mode(mode).group("A")).fill_opacity(60 if is_stacked else 8)
    panel.line_width(1).show_points(common_models.VisibilityMode.NEVER)
    if limits:
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED))
    if least is not None:
        panel.min(least)
    if most is not None:
        panel.max(most)
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
    panel = _framed(bargauge.Panel(), queries, title, description, unit, _thresholds(limits, base), (span, height))
    panel.display_mode(common_models.BarGaugeDisplayMode.GRADIENT).reduce_options(_newest())
    panel.orientation(common_models.VizOrientation.HORIZONTAL).min(0)
    return panel if most is None else panel.max(most)


def heat_map(title: str, description: str, query: Query, *, unit: str) -> heatmap.Panel:
    """A histogram's buckets over time."""
    panel = _framed(heatmap.Panel(), (), title, description, unit, _thresholds((), "green"), (12, 8))
    colors = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    panel.calculate(False).color(colors).y_axis(heatmap.YAxisConfig().unit(unit)).cell_gap(1)
    return panel.with_target(_target(query, "A").format(prometheus_models.PromQueryFormat.HEATMAP))


def listing(title: str, description: str, query: Query, *, columns: Sequence[str], height: int = 6) -> table.Panel:
    """The labels of a metric that is always 1, a row each."""
    names = {name: number for number, name in enumerate(columns)}
    hidden = {name: True for name in ("Time", "Value", "__name__", "job") if name not in names}
    options = {"indexByName": names, "excludeByName": hidden}
    panel = _framed(table.Panel(), (), title, description, "none", _thresholds((), "green"), (WIDTH, height))
    panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=options))
    return panel.with_target(_target(query, "A").format(prometheus_models.PromQueryFormat.TABLE))


def _framed(
    panel: P,
    queries: Sequence[Query],
    title: str,
    description: str,
    unit: str,
    thresholds: dashboard.ThresholdsConfig,
    size: tuple[int, int],
) -> P:
    """Sets the parts that every panel has; `size` is its columns and rows."""
    panel.title(title).description(description).datasource(DATASOURCE).unit(unit).thresholds(thresholds)
    panel.span(size[0]).height(size[1])
    for number, query in enumerate(queries):
        panel.with_target(_target(query, chr(ord("A") + number)))
    return panel


def _newest() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


_LINE = [
    models.DynamicConfigValue(id_val="custom.stacking", value={"mode": "none", "group": "A"}),
    models.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
    models.DynamicConfigValue(id_val="custom.lineWidth", value=2),
]


def _target(query: Query, ref_id: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend or "__auto").ref_id(ref_id)
    return target.instant() if query.is_instant else target.range()


def _thresholds(limits: Limits, base: str) -> dashboard.ThresholdsConfig:
    steps = [models.Threshold(value=None, color=base)]
    steps += [models.Threshold(value=value, color=color) for value, color in limits]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
