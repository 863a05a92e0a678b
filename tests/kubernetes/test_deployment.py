"""The objects that `stagepack k8s` writes: valid against the published schemas, sized from the plan."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from click.testing import CliRunner

import stagepack
from stagepack.cli import main
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.process_memory import estimate_memory
from tests.distributed.bundles import export_counting
from tests.kubernetes.deployment import (
    IMAGE,
    container_of,
    expand,
    templates,
    validator,
    write_deployment,
    write_objects,
)

OPTIONS = [
    [],
    ["--volume", "claim:models", "--replicas", "2"],
    ["--volume", "host:/srv/models", "--pods", "1"],
    ["--volume", "image:registry.example/models:1", "--path", "/bundles/it is $(here)"],
    ["--gpu", "--pods", "2"],
    ["--token-secret", "tokens", "--tls-secret", "tls", "--namespace", "models", "--replicas", "3", "--max-surge", "0"],
    [
        "--image-pull-secret",
        "a",
        "--image-pull-secret",
        "b",
        "--service-account",
        "reader",
        "--node-selector",
        "a.b/c=D",
    ],
    ["--gpu", "amd.com/gpu", "--pods", "1", "--processes-per-pod", "3", "--memory", "24GiB"],
    ["--allow-ops", "mine", "--import", "my.operators", "--cpus", "8", "--linger-s", "0.5", "--image", "yes"],
    ["--operator-port", "9000", "--tls-secret", "tls"],
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_objects_are_valid_by_their_published_schemas(layers: Bundle, options: list[str]) -> None:
    objects = write_objects(layers.path, *options)
    kinds = ["LeaderWorkerSet", "Service", "NetworkPolicy"] + (
        ["PodDisruptionBudget"] if "--replicas" in options else []
    )
    assert [described["kind"] for described in objects] == kinds
    for described in objects:
        validator(described["kind"]).validate(described)


@pytest.mark.parametrize("folder", ["$(HOME)", "$$(HOME)", "price$$", "a$b$"])
def test_kubernetes_replaces_nothing_in_texts(layers: Bundle, tmp_path: Path, folder: str) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--path", f"/bundles/{folder}")
    command = container_of(templates(worker_set)[0])["command"]
    expanded_command = [expand(argument, {"HOME": "/root"}) for argument in command]
    assert any(argument.endswith(f"=/bundles/{folder}") for argument in expanded_command)


def test_the_schema_finds_what_is_wrong(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path)

    def change(path: str, value: Any) -> dict[str, Any]:
        changed = copy.deepcopy(worker_set)
        *parents, last = path.split("/")
        place: Any = changed["spec"]["leaderWorkerTemplate"]
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[last] = value
        return changed

    for path, value in [
        ("size", "3"),
        ("restartPolicy", "Always"),
        ("leaderTemplate/spec/containers/0/comand", ["torchrun"]),
        ("workerTemplate/spec/containers/0/env/0/value", 2),
        ("workerTemplate/spec/volumes/0/emptyDir", []),
    ]:
        with pytest.raises(jsonschema.ValidationError):
            validator("LeaderWorkerSet").validate(change(path, value))


def test_memory_is_that_of_the_plan(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--max-batch", "4096")
    leader, worker = map(container_of, templates(worker_set))
    assert worker_set["spec"]["leaderWorkerTemplate"]["size"] == 3
    (symbol,) = layers.entry_point.symbols
    needed = [estimate_memory(layers, (0, 1, 2), rank, sizes={symbol.name: 4096}).total for rank in range(3)]
    for container, byte_count in ((leader, needed[0] + 768 * 2**20), (worker, max(needed[1:]) + 256 * 2**20)):
        memory = container["resources"]["limits"]["memory"]
        assert memory == container["resources"]["requests"]["memory"]
        assert byte_count <= int(memory.removesuffix("Mi")) * 2**20 < byte_count + 64 * 2**20

    facts = json.loads(
        CliRunner()
        .invoke(main, ["k8s", str(layers.path), *IMAGE, "-o", str(tmp_path / "x.yaml"), "--memory", "2GiB", "--json"])
        .stdout
    )
    expected = [([0], "2048Mi"), ([1], "2048Mi"), ([2], "2048Mi")]
    assert [(pod["stages"], pod["memory"]) for pod in facts["pods"]] == expected


def test_gpus_and_their_processes(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--gpu", "--pods", "1", "--processes-per-pod", "3")
    leader, _ = map(container_of, templates(worker_set))
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == "3"
    command = " ".join(leader["command"])
    assert "--nproc-per-node 3 " in command
    assert "--device cuda:0 --device cuda:1 --device cuda:2" in command
    worker_set, _, _ = write_deployment(layers, tmp_path, "--gpu")
    assert "--device cuda --max-batch" in " ".join(container_of(templates(worker_set)[1])["command"])


def test_further_options_of_the_server(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--", "--runtime", "onnxruntime", "--deadline-s=20")
    for template in templates(worker_set):
        assert container_of(template)["command"][-3:] == ["--runtime", "onnxruntime", "--deadline-s=20"]
    for refused in ("--processes", "--no-such-option", "--max-batch", "--tls-key"):
        arguments = ["k8s", str(layers.path), *IMAGE, "-o", str(tmp_path / "x.yaml"), "--", refused, "2"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert f"{refused} is not an option of stagepack serve that a deployment leaves open" in result.stderr
    for further, message in (
        (["--log-level", "loud"], "'loud' is not one of"),
        (["--deadline-s", "soon"], "Invalid value for '--deadline-s': 'soon' is not a valid float"),
        (["--max-value-bytes=2 elephants"], "Invalid value for '--max-value-bytes'"),
        (["--max-queue", "0"], "0 is not in the range x>=1"),
        (["--access-log", "other.stagepack"], "unexpected argument 'other.stagepack'"),
        (["--max-queue"], "'--max-queue' requires an argument"),
        (["--model-control", "poll"], "--model-control is not an option"),
    ):
        result = CliRunner().invoke(
            main, ["k8s", str(layers.path), *IMAGE, "-o", str(tmp_path / "x.yaml"), "--", *further]
        )
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    result = CliRunner().invoke(
        main, ["k8s", str(layers.path), "other.stagepack", *IMAGE, "-o", str(tmp_path / "x.yaml")]
    )
    assert (result.exit_code, "unexpected argument 'other.stagepack'" in result.stderr) == (2, True)


def test_a_pod_that_is_restarted_may_replace_its_trace(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--", "--trace", "/traces/run.json", "--overwrite")
    for template in templates(worker_set):
        assert container_of(template)["command"][-3:] == ["--trace", "/traces/run.json", "--overwrite"]


def test_only_the_leader_is_asked_and_only_the_group_connects(layers: Bundle, tmp_path: Path) -> None:
    worker_set, service, policy = write_deployment(layers, tmp_path, "--name", "net")
    leader, worker = map(container_of, templates(worker_set))
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(leader)
    assert not {"startupProbe", "livenessProbe", "readinessProbe", "ports"} & set(worker)
    assert (
        service["metadata"]["name"] != worker_set["metadata"]["name"]
    )  # which LeaderWorkerSet uses for a service of its own
    expected = {"leaderworkerset.sigs.k8s.io/name": "net", "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert service["spec"]["selector"] == expected
    among_pods, from_clients = policy["spec"]["ingress"]
    assert among_pods["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert [port["port"] for port in from_clients["ports"]] == [8000, 8001]


@pytest.mark.parametrize("tls", [[], ["--tls-secret", "tls"]])
def test_operator_port_is_asked_by_probes_and_open_to_prometheus(
    layers: Bundle, tmp_path: Path, tls: list[str]
) -> None:
    worker_set, _, policy = write_deployment(layers, tmp_path, "--operator-port", "9000", *tls)
    leader, _ = templates(worker_set)
    container = container_of(leader)
    assert option_values(container["command"], "--operator-port") == ["9000"]
    assert {"name": "operator", "containerPort": 9000} in container["ports"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert (asked["port"], asked["scheme"]) == ("operator", "HTTP")
    annotations = leader["metadata"]["annotations"]
    assert (annotations["prometheus.io/port"], annotations["prometheus.io/scheme"]) == ("9000", "http")
    assert [port["port"] for port in policy["spec"]["ingress"][1]["ports"]] == [8000, 8001, 9000]


def test_it_has_time_to_stop(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--linger-s", "20", "--drain-s", "100")
    for template in templates(worker_set):
        (torchrun_seconds,) = (
            int(variable["value"])
            for variable in container_of(template)["env"]
            if variable["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        )
        assert 120 < torchrun_seconds < template["spec"]["terminationGracePeriodSeconds"]


def test_sequences_stay_with_the_group_that_has_their_state(layers: Bundle, tmp_path: Path) -> None:
    _, with_state, _ = write_deployment(export_counting(tmp_path), tmp_path)
    _, without_state, _ = write_deployment(layers, tmp_path)
    assert with_state["spec"]["sessionAffinity"] == "ClientIP"
    assert "sessionAffinity" not in without_state["spec"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--pods", "4"],
            "expected at most as many processes as stages, 3, found 4: choose fewer --pods or --processes-per-pod",
        ),
        (["--processes-per-pod", "4"], "expected at most as many processes as stages, 3, found 4"),
        (["--name", "Net"], "--name: expected at most 48 lowercase letters"),
        (["--path", "models/m"], "--path: expected an absolute path in a folder such as /models, found 'models/m'"),
        (["--path", "/m"], "--path: expected an absolute path in a folder"),
        (["--path", "/models/../m/x"], "--path: expected no '..'"),
        (["--path", "/a:b/x"], "no ':'"),
        (["--path", "/tmp/x", "--volume", "claim:models"], "another folder than /tmp"),  # noqa: S108 - of the pod
        (["--memory", "0"], "--memory: expected more than 0 bytes, found 0"),
        (["--node-selector", "a=b", "--node-selector", "a=c"], "--node-selector: expected each key once, found a, a"),
        (["--operator-port", "8001"], "--operator-port: expected another port than 8000, 8001, 29500"),
    ],
)
def test_what_cannot_be_deployed_is_one_line(layers: Bundle, tmp_path: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["k8s", str(layers.path), *IMAGE, "-o", str(tmp_path / "x.yaml"), *options])
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "x.yaml").exists()


def test_a_file_is_not_replaced_by_mistake(layers: Bundle, tmp_path: Path) -> None:
    out = tmp_path / "x.yaml"
    out.write_text("mine")
    result = CliRunner().invoke(main, ["k8s", str(layers.path), *IMAGE, "-o", str(out)])
    assert result.exit_code == 1
    assert "x.yaml: already exists: choose another name, or replace the file (--overwrite)" in result.stderr
    assert out.read_text() == "mine"


class _Functions(torch.nn.Module):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x - 1


def test_one_of_several_entry_points_is_served(tmp_path: Path) -> None:
    inputs = stagepack.Inputs(args=(torch.ones(2),))
    bundle = stagepack.export(
        _Functions(), entry_points={"encode": inputs, "decode": inputs}, out=tmp_path / "m.stagepack"
    )
    out = tmp_path / "m.yaml"
    arguments = ["k8s", f"{bundle.path}#decode", *IMAGE, "-o", str(out), "--volume", "claim:models"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    container = container_of(templates(next(yaml.safe_load_all(out.read_text())))[0])
    assert "m-decode=/models/m.stagepack#decode" in container["command"]
    assert container["volumeMounts"][0]["mountPath"] == "/models"


def option_values(command: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(command) if name == option]


def test_the_server_must_find_the_bundle_that_the_file_was_written_for(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path)
    for template in templates(worker_set):
        assert option_values(container_of(template)["command"], "--digest") == [layers.digest]


def test_credentials_are_secrets_of_the_leader_that_no_other_user_reads(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--token-secret", "tokens", "--tls-secret", "tls")
    leader, worker = templates(worker_set)
    secrets = {volume["name"]: volume["secret"] for volume in leader["spec"]["volumes"] if "secret" in volume}
    assert secrets == {
        "token": {"secretName": "tokens", "defaultMode": 0o440},
        "tls": {"secretName": "tls", "defaultMode": 0o440},
    }
    assert leader["spec"]["securityContext"]["fsGroup"] > 0
    assert not any("secret" in volume for volume in worker["spec"]["volumes"])
    container = container_of(leader)
    folders = {mount["mountPath"]: mount["readOnly"] for mount in container["volumeMounts"] if mount["name"] in secrets}
    assert folders == {"/etc/stagepack/token": True, "/etc/stagepack/tls": True}
    for option, file in {
        "--token-file": "/etc/stagepack/token/tokens",
        "--tls-certificate": "/etc/stagepack/tls/tls.crt",
        "--tls-key": "/etc/stagepack/tls/tls.key",
    }.items():
        assert option_values(container["command"], option) == [file]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    assert leader["metadata"]["annotations"]["prometheus.io/scheme"] == "https"


def test_a_bundle_at_a_url_is_downloaded_before_the_containers_start(
    layers: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGEPACK_CACHE", str(tmp_path / "cache"))
    url = layers.path.as_uri()
    objects = write_objects(url, "--url-secret", "store")
    for described in objects:
        validator(described["kind"]).validate(described)
    for template in templates(objects[0]):
        (pull,) = template["spec"]["initContainers"]
        path = f"/models/{layers.path.name}"
        assert pull["command"] == ["stagepack", "pull", url, "--out", path, "--digest", layers.digest, "--overwrite"]
        assert pull["envFrom"] == [{"secretRef": {"name": "store"}}]
        assert {"name": "bundle", "mountPath": "/models"} in pull["volumeMounts"]
        assert {"name": "bundle", "emptyDir": {}} in template["spec"]["volumes"]
        container = container_of(template)
        assert {"name": "bundle", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
        assert f"{layers.path.name.removesuffix('.stagepack')}={path}" in container["command"]
        assert (
            int(pull["resources"]["requests"]["ephemeral-storage"].removesuffix("Mi")) * 2**20
            > layers.files["stage-0.safetensors"].size
        )


def test_groups_are_replaced_without_a_gap(layers: Bundle, tmp_path: Path) -> None:
    for surge, unavailable in ((1, 0), (0, 1)):
        *_, budget = objects = write_objects(layers.path, "--replicas", "2", "--max-surge", str(surge))
        strategy = objects[0]["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert strategy == {"maxSurge": surge, "maxUnavailable": unavailable}
        assert budget["spec"]["selector"]["matchLabels"] == objects[2]["spec"]["podSelector"]["matchLabels"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--token-secret", "My_Tokens"], "expected the name of an object of Kubernetes, found 'My_Tokens'"),
        (["--node-selector", "disk"], "expected a label KEY=VALUE of Kubernetes, found 'disk'"),
        (["--image", ""], "expected a container image such as a/b:1, found ''"),
        (["--image", "a b"], "expected a container image such as a/b:1, found 'a b'"),
        (["--volume", "claim:My_Claim"], "expected claim: and what names it in Kubernetes, found 'claim:My_Claim'"),
        (["--volume", "image:a b"], "expected image: and what names it in Kubernetes, found 'image:a b'"),
        (["--gpu", "a b"], "expected a resource such as nvidia.com/gpu, found 'a b'"),
        (["--gpu", ""], "expected a resource such as nvidia.com/gpu, found ''"),
        (["--", "--operator-port", "9000"], "--operator-port is not an option of stagepack serve that a deployment"),
        (["--url-secret", "store"], "--url-secret requires a BUNDLE at a URL"),
        (["--", "--token-file", "x"], "--token-file is not an option of stagepack serve that a deployment leaves open"),
        (["--", "--digest", "0" * 64], "--digest is not an option of stagepack serve that a deployment leaves open"),
    ],
)
def test_wrong_usage(layers: Bundle, options: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["k8s", str(layers.path), "-o", "-", *IMAGE, *options])
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_an_image_must_be_named(layers: Bundle) -> None:
    result = CliRunner().invoke(main, ["k8s", str(layers.path), "-o", "-"])
    assert (result.exit_code, "Missing option '--image'" in result.stderr) == (2, True)
