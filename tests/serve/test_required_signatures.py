"""A server that requires signatures serves what a trusted signer has signed, and nothing else."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import stagepack
from stagepack.cli import main
from tests.conformance.vectors import TINY
from tests.serve.servers import stagepack_server

pytest.importorskip("model_signing", reason="signatures are not tested: pip install '.[sign]' installs model_signing")

from tests.signing.signers import make_signer


def serve(*arguments: str | Path) -> Result:
    ports = ("--http-port", "0", "--grpc-port", "0")
    return CliRunner().invoke(main, ["serve", *map(str, arguments), *ports])


def test_the_server_refuses_what_is_not_signed_by_a_trusted_signer(tmp_path: Path) -> None:
    signer, stranger = make_signer(tmp_path, "release"), make_signer(tmp_path, "stranger")
    bundle_path = Path(shutil.copytree(TINY, tmp_path / "tiny.stagepack"))
    required = ("--require-signature", str(signer.public_key))
    shutil.copytree(bundle_path, tmp_path / "models" / "tiny" / "1")
    for source in ((bundle_path,), ("--model-repository", tmp_path / "models")):
        result = serve(*source, *required)
        assert result.exit_code == 1
        assert "found no model.sig" in result.stderr
    stagepack.sign(bundle_path, key=stranger.key)
    result = serve(bundle_path, *required)
    assert result.exit_code == 1
    assert "not by a trusted signer" in result.stderr
    stagepack.sign(bundle_path, key=signer.key, overwrite=True)
    with stagepack_server([bundle_path], *required) as server:
        assert server.facts["models"][0]["name"] == "tiny"
