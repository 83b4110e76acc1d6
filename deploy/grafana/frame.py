"""The frame of every dashboard: variables, links to the others, marks at restarts and new epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from slipstream.common.rpc.metrics import BUILD_INFO
from slipstream.deploy.grafana.panels import DATASOURCE
from slipstream.deploy.grafana.queries import INTERVAL, series
from slipstream.scheduler.metrics import EPOCH

if TYPE_CHECKING:
    from slipstream.deploy.grafana.panels import Panel

TAG = "slipstream"
JOBS = "=~slipstream-.*"
"""The scrape jobs of the services."""
RESTARTS = f"changes({series('process_start_time_seconds', job=JOBS)}[{INTERVAL}]) > 0"
EPOCHS = f"changes({series(EPOCH)}[{INTERVAL}]) > 0"


def row(name: str, *panels: Panel) -> tuple[str, tuple[Panel, ...]]:
    """A row of a dashboard."""
    return name, panels


def framed(name: str, description: str, *rows: tuple[str, tuple[Panel, ...]]) -> models.Dashboard:
    """A dashboard of these rows."""
    board = (
        dashboard.Dashboard(f"Slipstream: {name}")
        .uid(f"slipstream-{name}")
        .description(description)
        .tags([TAG])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(_link_to_the_others())
        .annotation(_annotation("Restarts", RESTARTS, "red"))
        .annotation(_annotation("New epochs", EPOCHS, "orange"))
    )
    for variable in _variables():
        board.with_variable(variable)
    for heading, panels in rows:
        board.with_row(dashboard.Row(heading))
        for panel in panels:
            board.with_panel(panel)
    built = board.build()
    for number, made in enumerate(built.panels or [], start=1):
        made.id_val = number
    return built


def _variables() -> list[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    models_query = f'label_values({BUILD_INFO.name}{{service="scheduler"}}, model)'
    instances = f'label_values({BUILD_INFO.name}{{service="scheduler", model=~"$model"}}, instance)'
    return [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _choice("model", "Model", "The target models that are served.", models_query),
        _choice("instance", "Instance", "The servers that serve them.", instances),
    ]


def _choice(name: str, label: str, description: str, query: str) -> dashboard.QueryVariable:
    everything = models.VariableOption(text="All", value="$__all", selected=True)
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(everything)
    )


def _link_to_the_others() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Slipstream").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.include_vars(True).keep_time(True)


def _annotation(name: str, expr: str, color: str) -> dashboard.AnnotationQuery:
    return dashboard.AnnotationQuery().name(name).datasource(DATASOURCE).expr(expr).enable(True).icon_color(color)
