"""A server that requires signatures serves what a trusted signer has signed, and nothing else."""

import shutil
from pathlib import Path

import pytest

import stagepack
from tests.conformance.vectors import TINY
from tests.serve.local_server import local_server, refusal
from tests.serve.servers import Client
from tests.serve.version_models import Repository, export_scale, factor_of
from tests.waiting import wait_until

pytest.importorskip("model_signing", reason="signatures are not tested: pip install '.[sign]' installs model_signing")

from tests.signing.signers import make_signer


def test_the_server_refuses_what_is_not_signed_by_a_trusted_signer(tmp_path: Path) -> None:
    signer, stranger = make_signer(tmp_path, "release"), make_signer(tmp_path, "stranger")
    bundle_path = Path(shutil.copytree(TINY, tmp_path / "tiny.stagepack"))
    required = ("--require-signature", str(signer.public_key))
    shutil.copytree(bundle_path, tmp_path / "models" / "tiny" / "1")
    for source in ((bundle_path,), ("--model-repository", tmp_path / "models")):
        assert "found no model.sig" in refusal(*source, *required)
    stagepack.sign(bundle_path, key=stranger.key)
    assert "not by a trusted signer" in refusal(bundle_path, *required)
    stagepack.sign(bundle_path, key=signer.key, overwrite=True)
    with local_server([bundle_path], *required) as server:
        assert server.facts["models"][0]["name"] == "tiny"


def test_a_refused_version_is_tried_again_when_a_key_file_changed(tmp_path: Path) -> None:
    old, new = make_signer(tmp_path, "old"), make_signer(tmp_path, "new")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(old.public_key.read_bytes())
    folder = export_scale(tmp_path / "models" / "scale" / "1", 1.0).parent
    stagepack.sign(folder / "1", key=old.key)
    options = ("--model-repository", str(folder.parent), "--model-control", "poll", "--poll-s", "0.2")
    with (
        local_server([], *options, "--require-signature", str(trusted)) as server,
        Client("http", server) as client,
    ):
        repository = Repository(server, folder.parent)

        def state() -> tuple[str, str]:
            entry = repository.index("scale").get("2", {"state": ""})
            return entry["state"], entry.get("reason", "")

        stagepack.sign(export_scale(tmp_path / "next", 2.0), key=new.key)
        (tmp_path / "next").rename(folder / "2")
        wait_until(lambda: "not by a trusted signer" in state()[1])
        assert factor_of(client, "scale") == 1
        trusted.unlink()  # some tools remove a file before they write it again
        wait_until(lambda: "cannot be read" in state()[1])
        assert factor_of(client, "scale") == 1
        trusted.write_bytes(old.public_key.read_bytes() + new.public_key.read_bytes())
        wait_until(lambda: state() == ("READY", ""))
        assert factor_of(client, "scale") == 2
