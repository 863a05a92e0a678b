"""`stagepack k8s`, and what it has written."""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from stagepack.cli import main
from stagepack.format.reader import Bundle

SCHEMAS = Path(__file__).parent / "schemas"


IMAGE = ["--image", "registry.example/stagepack:1.4"]


def write_objects(source: str | Path, *options: str) -> list[dict[str, Any]]:
    """Run the command, which writes to standard output; return the objects."""
    image = [] if "--image" in options else IMAGE
    result = CliRunner().invoke(main, ["k8s", str(source), "-o", "-", *image, *options])
    assert result.exit_code == 0, result.output
    return list(yaml.safe_load_all(result.stdout))


def write_deployment(
    bundle: Bundle, folder: Path, *options: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Run the command; return the objects that each deployment has."""
    worker_set, service, policy, *_ = write_objects(bundle.path, *options)
    return worker_set, service, policy


@functools.cache
def validator(kind: str) -> Draft202012Validator:
    """Of the published schema of a kind of objects, in which no object has other fields than those that it names."""
    return Draft202012Validator(forbid_other_fields(json.loads((SCHEMAS / f"{kind.lower()}-v1.json").read_text())))


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


def container_of(template: dict[str, Any]) -> dict[str, Any]:
    (container,) = template["spec"]["containers"]
    pod_container: dict[str, Any] = container
    return pod_container


def templates(worker_set: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod templates of the leader and of the workers."""
    group = worker_set["spec"]["leaderWorkerTemplate"]
    return group["leaderTemplate"], group["workerTemplate"]


def expand(argument: str, variables: Mapping[str, str]) -> str:
    """Replace references as Kubernetes does: ``$(NAME)`` by the variable, ``$$`` by ``$``; others stay."""

    def replace(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, argument)
