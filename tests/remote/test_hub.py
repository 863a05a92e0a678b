"""Bundles on the Hugging Face Hub. It cannot be reached from here: `hub_server` has its endpoints."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import stagepack
from stagepack.cli import main
from stagepack.errors import NotABundleError, OptionError, RemoteError
from stagepack.remote.url import BundleUrl
from tests.remote.hub_server import REPOSITORY, HubServer

# The library of the hub uses its HTTP client in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_push_load_and_pull(hub: HubServer, served: Path, tmp_path: Path) -> None:
    result = run("push", served / "tiny.stagepack", f"hf://{REPOSITORY}", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["commit"].endswith(hub.head)
    bundle = stagepack.open(f"hf://{REPOSITORY}")
    assert bundle.digest == stagepack.open(served / "tiny.stagepack").digest
    assert f'stagepack.load("hf://{REPOSITORY}")' in hub.files[hub.head]["README.md"].decode()
    stagepack.load_stage(bundle, 1)
    assert "stage-0.safetensors" not in hub.content_host.requests
    # The token is for the hub alone.
    assert all("Authorization" not in headers for _, headers in hub.content_host.headers)

    result = run("pull", f"hf://{REPOSITORY}@{hub.head}", "-o", tmp_path / "pulled")
    assert result.exit_code == 0, result.output
    stagepack.open(tmp_path / "pulled").verify()
    assert not (tmp_path / "pulled/README.md").exists()


def test_a_new_bundle_replaces_the_old_one(hub: HubServer, served: Path, tmp_path: Path) -> None:
    result = run("push", served / "tiny.stagepack", f"hf://{REPOSITORY}")
    assert result.exit_code == 0, result.output
    first = hub.head
    hub.files[first]["README.md"] = b"my own"
    hub.files[first]["notes.txt"] = b"mine"
    stagepack.recut(served / "tiny.stagepack", out=tmp_path / "one.stagepack", stages=1)
    result = run("push", tmp_path / "one.stagepack", f"hf://{REPOSITORY}", "--message", "one stage")
    assert result.exit_code == 0, result.output
    files = hub.files[hub.head]
    assert files["README.md"] == b"my own"
    assert {name for name in files if name.startswith("stage-")} == {"stage-0.msgpack", "stage-0.safetensors"}
    assert "notes.txt" in files
    # The old commit has the old bundle still.
    stagepack.open(f"hf://{REPOSITORY}@{first}").verify()
    stagepack.open(f"hf://{REPOSITORY}").verify()


def test_a_folder_of_a_repository(hub: HubServer, served: Path) -> None:
    result = run("push", served / "tiny.stagepack", f"hf://{REPOSITORY}/cuts/three")
    assert result.exit_code == 0, result.output
    stagepack.open(f"hf://{REPOSITORY}/cuts/three").verify()
    with pytest.raises(NotABundleError, match=r"there is no manifest.json"):
        stagepack.open(f"hf://{REPOSITORY}")


def test_what_the_hub_refuses(hub: HubServer, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("push", served / "tiny.stagepack", f"hf://{REPOSITORY}")
    assert result.exit_code == 0, result.output
    with pytest.raises(RemoteError, match=r"RevisionNotFoundError"):
        stagepack.open(f"hf://{REPOSITORY}@absent")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(RemoteError, match=r"401"):
        stagepack.open(f"hf://{REPOSITORY}")
    assert "401" in run("push", served / "tiny.stagepack", f"hf://{REPOSITORY}").output


@pytest.mark.parametrize("url", ["hf://name", "hf://datasets/org/name", "hf://org/name?x", "hf:///"])
def test_urls_that_name_no_repository(url: str, cache: Path) -> None:
    with pytest.raises(OptionError, match=r"expected hf://"):
        stagepack.open(url)


def test_names_of_urls() -> None:
    names = {
        "hf://org/name@v1": "name",
        "hf://org/name/cuts/three": "three",
        "s3://bucket/m.stagepack/": "m.stagepack",
        "https://user:secret@host/a/m.stagepack?x=1": "m.stagepack",
    }
    assert {url: BundleUrl.parse(url).name for url in names} == names


def test_urls_in_messages_have_no_secrets() -> None:
    shown = {
        "https://user:secret@host/m.stagepack?token=secret": "https://host/m.stagepack",
        "sftp://user:secret@host/m.stagepack": "sftp://host/m.stagepack",
        "abfs://container@account.dfs.core.windows.net/m": "abfs://container@account.dfs.core.windows.net/m",
        "hf://org/name@v1": "hf://org/name@v1",
    }
    assert {url: str(BundleUrl.parse(url)) for url in shown} == shown
    malformed = ["https://u:secret@/m", "https://u:secret@h:port/m", "http://[::1/m?secret", "https://h/m?a=secret#b"]
    for url in [*malformed, "hf://u:secret@org/name", "hf://org/name?secret"]:
        with pytest.raises(OptionError) as caught:
            assert BundleUrl.parse(url).hub_location
        assert "secret" not in str(caught.value)


def test_a_delta_is_pushed_to_where_who_has_its_base_finds_it(hub: HubServer, cache: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(700, 700)
    old = stagepack.export(model, (torch.ones(1, 700),), out=tmp_path / "old.stagepack")
    assert run("push", old.path, f"hf://{REPOSITORY}").exit_code == 0
    stagepack.load(f"hf://{REPOSITORY}")
    with torch.no_grad():
        model.bias.zero_()
        model.weight[::50, 0] += 1
    new = stagepack.export(model, (torch.ones(1, 700),), out=tmp_path / "new.stagepack")
    delta = stagepack.delta(old, new, out=tmp_path / "step.delta")
    for path, *options in ([new.path], [delta.path, "--by-base"]):
        place = f"hf://{REPOSITORY}{'/deltas' if options else ''}"
        result = run("push", path, place, *options)
        assert result.exit_code == 0, result.output
    assert f"uploaded {delta.path} to hf://{REPOSITORY}/deltas/{old.digest}" in result.output
    result = run("push", new.path, f"hf://{REPOSITORY}/deltas", "--by-base")
    assert (result.exit_code, "--by-base: expected a delta" in result.output) == (2, True)
    hub.content_host.requests.clear()
    found = stagepack.load(f"hf://{REPOSITORY}")
    assert found.bundle.digest == new.digest
    assert torch.equal(found.state_dict()["weight"], model.weight)
    assert not hub.content_host.requests["stage-0.safetensors"]
    found.bundle.verify()
