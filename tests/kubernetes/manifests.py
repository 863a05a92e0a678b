"""The manifests of examples/kubernetes and of the documentation, and the schemas that Kubernetes publishes of their objects."""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"


def manifest_objects(file_name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / file_name).read_text()))


def worker_set() -> dict[str, Any]:
    return manifest_objects("group.yaml")[0]


def templates(group: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod templates of the leader and of the workers."""
    template = group["spec"]["leaderWorkerTemplate"]
    return template["leaderTemplate"], template["workerTemplate"]


def container_of(template: dict[str, Any]) -> dict[str, Any]:
    (container,) = template["spec"]["containers"]
    pod_container: dict[str, Any] = container
    return pod_container


@functools.cache
def validator(kind: str) -> Draft202012Validator:
    """Return a validator of the published schema of a kind, in which no object has other fields than those that it names."""
    (path,) = SCHEMAS.glob(f"{kind.lower()}-v*.json")
    return Draft202012Validator(forbid_other_fields(json.loads(path.read_text())))


def forbid_other_fields(node: Any) -> Any:
    """A schema whose objects with named properties have no others. Kubernetes drops them, or refuses them (`kubectl --validate`)."""
    if isinstance(node, list):
        return [forbid_other_fields(item) for item in node]
    if not isinstance(node, dict):
        return node
    strict = {key: forbid_other_fields(value) for key, value in node.items()}
    if isinstance(node.get("properties"), dict) and node.get("type") == "object":
        strict.setdefault("additionalProperties", False)
    return strict


def expand(argument: str, variables: Mapping[str, str]) -> str:
    """Replace references as Kubernetes does: ``$(NAME)`` by the variable, ``$$`` by ``$``; others stay."""

    def replace(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, argument)
