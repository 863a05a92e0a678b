"""The manifests are valid by the published schemas, have limits and no rights that they do not need, and fit together."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import click
import jsonschema
import pytest
import yaml

from stagepack.cli import main
from tests.kubernetes.manifests import ROOT, container_of, manifest_objects, templates, validator, worker_set

GROUP_NAME = {"leaderworkerset.sigs.k8s.io/name": "tower"}
LEADER = {**GROUP_NAME, "leaderworkerset.sigs.k8s.io/worker-index": "0"}


def pod_templates() -> Iterator[dict[str, Any]]:
    yield manifest_objects("deployment.yaml")[0]["spec"]["template"]
    yield from templates(worker_set())


def test_the_objects_are_valid_by_their_published_schemas() -> None:
    kinds = {}
    for file_name in ("deployment.yaml", "group.yaml"):
        objects = manifest_objects(file_name)
        kinds[file_name] = [described["kind"] for described in objects]
        for described in objects:
            validator(described["kind"]).validate(described)
    others = ["Service", "NetworkPolicy", "PodDisruptionBudget"]
    assert kinds["deployment.yaml"] == ["Deployment", *others]
    assert kinds["group.yaml"] == ["LeaderWorkerSet", *others, "HorizontalPodAutoscaler"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("size", "3"),
        ("restartPolicy", "Always"),
        ("leaderTemplate/spec/containers/0/comand", ["torchrun"]),
        ("workerTemplate/spec/containers/0/env/0/value", 2),
        ("workerTemplate/spec/volumes/0/emptyDir", []),
    ],
)
def test_the_schema_finds_what_is_wrong(path: str, value: Any) -> None:
    changed = copy.deepcopy(worker_set())
    *parents, last = path.split("/")
    place: Any = changed["spec"]["leaderWorkerTemplate"]
    for parent in parents:
        place = place[int(parent) if parent.isdigit() else parent]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        validator("LeaderWorkerSet").validate(changed)


def test_containers_have_limits_and_no_rights_that_they_do_not_need() -> None:
    for template in pod_templates():
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            resources = container["resources"]
            assert {"cpu", "memory", "ephemeral-storage"} <= resources["requests"].keys()
            assert resources["limits"]["memory"] == resources["requests"]["memory"]
            assert resources["limits"].keys() == {"memory", "ephemeral-storage"}
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
            assert re.fullmatch(r"[a-z./]+@sha256:[0-9a-f]{64}", container["image"])
        assert all("sizeLimit" in volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)
        (spread,) = pod["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"


def test_all_pods_are_probed_and_the_server_by_its_health() -> None:
    deployed, leader, worker = map(container_of, pod_templates())
    for server in (deployed, leader):
        probes = [
            server[f"{kind}Probe"]["httpGet"]["path"].rpartition("/")[2]
            for kind in ("startup", "liveness", "readiness")
        ]
        assert probes == ["live", "live", "ready"]
    assert worker["livenessProbe"] == worker["startupProbe"]
    assert "readinessProbe" not in worker  # LeaderWorkerSet waits for that of the leader


def test_pods_have_time_to_stop() -> None:
    for template in templates(worker_set()):
        container = container_of(template)
        variables = {variable["name"]: variable["value"] for variable in container["env"]}
        server_seconds = sum(
            int(argument.partition("=")[2])
            for argument in container["command"]
            if argument.startswith(("--linger-s", "--drain-s"))
        )
        torchrun_seconds = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        assert server_seconds < torchrun_seconds < template["spec"]["terminationGracePeriodSeconds"]


def test_the_pull_and_the_server_take_the_same_bundle() -> None:
    leader, worker = templates(worker_set())
    (pull,) = leader["spec"]["initContainers"]
    assert worker["spec"]["initContainers"] == [pull]
    digests = {
        variable["value"]
        for container in (pull, container_of(leader), container_of(worker))
        for variable in container["env"]
        if variable["name"] == "BUNDLE_DIGEST"
    }
    assert len(digests) == 1
    assert container_of(leader)["command"] == container_of(worker)["command"]
    assert "--digest=$(BUNDLE_DIGEST)" in container_of(leader)["command"]


def test_commands_have_options_that_there_are() -> None:
    (pull,) = templates(worker_set())[0]["spec"]["initContainers"]
    server = container_of(templates(worker_set())[0])["command"]
    deployed = container_of(manifest_objects("deployment.yaml")[0]["spec"]["template"])["args"]
    for name, arguments in (("pull", pull["command"]), ("serve", server[server.index("serve") :]), ("serve", deployed)):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word.partition("=")[0] for word in arguments if word.startswith("--")} <= options


def test_secrets_are_files_that_the_leader_alone_reads() -> None:
    leader, worker = templates(worker_set())
    (tokens,) = [volume["secret"] for volume in leader["spec"]["volumes"] if "secret" in volume]
    assert tokens["defaultMode"] == 0o440
    assert leader["spec"]["securityContext"]["fsGroup"] > 0
    assert not any("secret" in volume for volume in worker["spec"]["volumes"])


def test_who_may_come_is_named() -> None:
    """All clients have a label, and Prometheus a namespace; only the group reaches the ports of torch.distributed."""
    policies = [
        one
        for name in ("deployment.yaml", "group.yaml")
        for one in manifest_objects(name)
        if one["kind"] == "NetworkPolicy"
    ]
    assert len(policies) == 2
    for policy in policies:
        for rule in policy["spec"]["ingress"]:
            assert all(
                peer.keys() <= {"podSelector", "namespaceSelector"} and all(peer.values()) for peer in rule["from"]
            )
    among_pods, clients, operators = policies[1]["spec"]["ingress"]
    assert among_pods == {"from": [{"podSelector": {"matchLabels": GROUP_NAME}}]}
    assert [port["port"] for port in clients["ports"]] == [8000, 8001]
    assert [port["port"] for port in operators["ports"]] == [9000]


def test_the_objects_name_each_other() -> None:
    group, service, policy, budget, scaler = manifest_objects("group.yaml")
    assert service["spec"]["selector"] == LEADER
    assert service["metadata"]["name"] != group["metadata"]["name"]  # LeaderWorkerSet uses it for a service of its own
    assert policy["spec"]["podSelector"]["matchLabels"] == budget["spec"]["selector"]["matchLabels"] == GROUP_NAME
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (group["kind"], group["metadata"]["name"])


def test_documented_patches_lead_to_fields_of_the_manifests() -> None:
    page = (ROOT / "examples" / "kubernetes" / "README.md").read_text()
    (kustomization,) = [
        document
        for block in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        for document in yaml.safe_load_all(block)
        if document.get("kind") == "Kustomization"
    ]
    group = worker_set()
    assert kustomization["patches"]
    for patch in kustomization["patches"]:
        assert patch["target"]["kind"] == group["kind"]
        for operation in yaml.safe_load(patch["patch"]):
            *parents, field = (part.replace("~1", "/") for part in operation["path"].strip("/").split("/"))
            place: Any = group
            for parent in parents:
                place = place[int(parent) if parent.isdigit() else parent]
            assert operation["op"] == "add"
            if isinstance(place, list):
                assert field == "-"
                place.append(operation["value"])
            else:
                place[field] = operation["value"]
    validator(group["kind"]).validate(group)
