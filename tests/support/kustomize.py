"""Renders the part of kustomize that deploy/kubernetes uses, so that CI needs no binary; the rest it refuses.

Held against `kubectl kustomize` wherever that is installed (tests/deploy/test_kubernetes.py).
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

KEYS = {
    *("apiVersion", "kind", "namespace", "resources", "components", "configMapGenerator"),
    *("labels", "images", "patches"),
}
CLUSTER_KINDS = {"Namespace"}
# What a strategic merge knows the items of a list by; lists of other names are replaced whole.
MERGE_KEYS = {"containers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}


def render(directory: Path) -> list[Resource]:
    """The resources of a kustomization. Raises ValueError for what this does not know."""
    found = _apply(directory, [])
    for resource in found:
        if resource["kind"] == "ConfigMap" and "$hashed" in resource:
            _name_by_content(resource, found)
    return found


def _apply(directory: Path, found: list[Resource]) -> list[Resource]:
    """`found` and what the kustomization (or component) in `directory` adds to it, changed by it."""
    directory = directory.resolve()
    recipe = yaml.safe_load((directory / "kustomization.yaml").read_text())
    if unknown := set(recipe) - KEYS:
        raise ValueError(f"{directory}: this renderer does not know {sorted(unknown)}")
    for entry in recipe.get("resources", ()):
        path = directory / entry
        found = found + (_apply(path, []) if path.is_dir() else list(yaml.safe_load_all(path.read_text())))
    for entry in recipe.get("components", ()):
        found = _apply(directory / entry, found)
    for generator in recipe.get("configMapGenerator", ()):
        _generate(directory, generator, found)
    for patch in recipe.get("patches", ()):
        _patch(yaml.safe_load((directory / patch["path"]).read_text()), found)
    for resource in found:
        if "namespace" in recipe and resource["kind"] not in CLUSTER_KINDS:
            resource["metadata"]["namespace"] = recipe["namespace"]
        for labels in recipe.get("labels", ()):
            if set(labels) != {"pairs"}:
                raise ValueError(f"{directory}: labels other than pairs")
            resource["metadata"].setdefault("labels", {}).update(labels["pairs"])
        for image in recipe.get("images", ()):
            _walk(resource, lambda each, image=image: _tag(each, image))
    return found


def _generate(directory: Path, generator: Resource, found: list[Resource]) -> None:
    data = {name: (directory / name).read_text() for name in generator["files"]}
    same = [each for each in found if _key(each) == ("ConfigMap", generator["name"])]
    match generator.get("behavior", "create"), same:
        case "create", []:
            about = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}}
            found.append({**about, "data": data, "$hashed": True})
        case "replace", [existing]:
            existing["data"] = data
        case behavior, _:
            raise ValueError(f"configMapGenerator {generator['name']}: cannot {behavior}")


def _key(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def _patch(patch: Resource, found: list[Resource]) -> None:
    (target,) = [each for each in found if _key(each) == _key(patch)]
    merged = _merge(target, patch)
    target.clear()
    target.update(merged)


def _merge(old: Any, new: Any, name: str = "") -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merge(old.get(key), value, key) for key, value in new.items()}
    if isinstance(old, list) and isinstance(new, list) and name in MERGE_KEYS:
        by = MERGE_KEYS[name]
        # New items come first, as kustomize has them.
        olds = {item[by]: item for item in old}
        added = [item for item in new if item[by] not in olds]
        changes = {item[by]: item for item in new}
        return added + [_merge(item, changes.get(key, {})) for key, item in olds.items()]
    return copy.deepcopy(new)


def _tag(container: Resource, image: Resource) -> None:
    if container.get("image") == image["name"]:
        container["image"] = f"{image['name']}:{image['newTag']}"


def _name_by_content(config_map: Resource, found: list[Resource]) -> None:
    """The suffix that kustomize gives: of a hash over the content, without letters that spell words."""
    del config_map["$hashed"]
    name = config_map["metadata"]["name"]
    content = {"data": config_map["data"], "kind": "ConfigMap", "name": ""}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    hashed = f"{name}-{digest.translate(str.maketrans('013ae', 'ghkmt'))}"
    config_map["metadata"]["name"] = hashed

    def refer(each: Resource) -> None:
        if each.get("configMap", {}).get("name") == name:
            each["configMap"]["name"] = hashed

    for resource in found:
        _walk(resource, refer)


def _walk(value: Any, visit: Callable[[Resource], None]) -> None:
    if isinstance(value, dict):
        visit(value)
        for each in value.values():
            _walk(each, visit)
    elif isinstance(value, list):
        for each in value:
            _walk(each, visit)
