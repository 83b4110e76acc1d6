"""Renders the kustomizations of `deploy/`: as much of kustomize as these use, which a test compares with the files."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]
TAKEN = {"apiVersion", "kind", "resources", "components", "patches", "images", "configMapGenerator"}


def render(directory: Path, before: list[Resource] | None = None) -> list[Resource]:
    """Returns the resources of a kustomization; those of a component are made of the resources `before` it."""
    plan = yaml.safe_load((directory / "kustomization.yaml").read_text(encoding="utf-8"))
    assert set(plan) <= TAKEN, f"{directory} has {set(plan) - TAKEN}, which this renderer does not know"
    found = list(before or ())
    for name in plan.get("resources", ()):
        path = directory / name
        found += render(path) if path.is_dir() else yaml.safe_load_all(path.read_text(encoding="utf-8"))
    found += [_config_map(directory, one) for one in plan.get("configMapGenerator", ())]
    for name in plan.get("components", ()):
        found = render(directory / name, found)
    for patch in plan.get("patches", ()):
        (target,) = (one for one in found if _matches(one, patch["target"]))
        for change in yaml.safe_load((directory / patch["path"]).read_text(encoding="utf-8")):
            _add(target, **change)
    for image in plan.get("images", ()):
        for container in (one for resource in found for one in containers(resource)):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return found


def containers(resource: Resource) -> list[Resource]:
    """Returns the containers of a StatefulSet, in the order of their start; none of any other kind."""
    if resource["kind"] != "StatefulSet":
        return []
    pod = resource["spec"]["template"]["spec"]
    return [*pod["initContainers"], *pod["containers"]]


def one_of(resources: list[Resource], kind: str, name: str = "slipstream") -> Resource:
    """Returns the resource of this kind and name."""
    (found,) = (one for one in resources if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def _matches(resource: Resource, target: dict[str, str]) -> bool:
    return (resource["kind"], resource["metadata"]["name"]) == (target["kind"], target["name"])


def _add(resource: Resource, op: str, path: str, value: Any) -> None:
    """Applies the one operation of a JSON patch that is used here."""
    assert op == "add", op
    *parents, last = path.strip("/").split("/")
    place: Any = resource
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if isinstance(place, list):
        place.insert(len(place) if last == "-" else int(last), deepcopy(value))
    else:
        place[last] = deepcopy(value)


def _config_map(directory: Path, generator: Resource) -> Resource:
    paths = [directory / name for name in generator["files"]]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": generator["name"], "labels": generator["options"]["labels"]},
        "data": {path.name: path.read_text(encoding="utf-8") for path in paths},
    }
