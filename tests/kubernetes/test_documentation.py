"""The objects that the documentation shows: valid by their schemas, within limits, and without rights that they do not need."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagepack.format.reader import Bundle
from tests.kubernetes.deployment import validator, write_objects

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"


def documented_objects(page: str) -> list[dict[str, Any]]:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (HOW_TO / page).read_text(), re.MULTILINE | re.DOTALL)
    documents = [document for block in blocks for document in yaml.safe_load_all(block)]
    return [document for document in documents if "kind" in document]


@pytest.mark.parametrize("kind", ["Deployment", "Service"])
def test_documented_objects_are_valid(kind: str) -> None:
    (described,) = [described for described in documented_objects("deploy.md") if described["kind"] == kind]
    validator(kind).validate(described)


def test_documented_deployment_is_limited() -> None:
    (deployment,) = [one for one in documented_objects("deploy.md") if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_documented_patches_lead_to_fields_of_the_written_objects(layers: Bundle) -> None:
    (kustomization,) = [one for one in documented_objects("ray-and-kubernetes.md") if one["kind"] == "Kustomization"]
    worker_set = write_objects(layers.path)[0]
    assert kustomization["patches"]
    for patch in kustomization["patches"]:
        assert patch["target"]["kind"] == worker_set["kind"]
        for operation in yaml.safe_load(patch["patch"]):
            *parents, field = operation["path"].strip("/").split("/")
            place = worker_set
            for parent in parents:
                place = place[parent]
            assert (operation["op"], field in place) == ("add", False)
            place[field] = operation["value"]
    validator(worker_set["kind"]).validate(worker_set)
