"""Bundles in S3, by s3fs, against the server of moto."""

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

import stagepack
from stagepack.errors import DigestError, NotABundleError
from stagepack.format.chunks import CHUNK_BYTES


@pytest.fixture
def endpoint(served: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 server whose bucket `models` has the bundle large.stagepack."""
    moto_server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto_server.start()
    host, port = moto_server.get_host_and_port()
    for variable, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(variable, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    for path in (served / "large.stagepack").iterdir():
        client.upload_file(str(path), "models", f"large.stagepack/{path.name}")
    yield f"http://{host}:{port}"
    client.close()
    moto_server.stop()


def test_a_bundle_in_s3(endpoint: str, served: Path) -> None:
    bundle = stagepack.open("s3://models/large.stagepack")
    stagepack.load_stage(bundle, 1)
    assert {path.name for path in bundle.path.iterdir()} == {"manifest.json", "stage-1.msgpack", "stage-1.safetensors"}
    bundle.verify()
    for file_name in bundle.files:
        assert (bundle.path / file_name).read_bytes() == (served / "large.stagepack" / file_name).read_bytes()
    with pytest.raises(NotABundleError, match=r"s3://models/absent.stagepack: not a stagepack bundle"):
        stagepack.open("s3://models/absent.stagepack")


def test_wrong_objects_are_refused(endpoint: str) -> None:
    bundle = stagepack.open(
        "s3://models/large.stagepack", storage_options={"client_kwargs": {"endpoint_url": endpoint}}
    )
    client = boto3.client("s3")
    name = "stage-0.safetensors"
    client.put_object(Bucket="models", Key=f"large.stagepack/{name}", Body=bytes(bundle.files[name].size))
    with pytest.raises(DigestError, match="D2"):
        bundle.fetch([name])
    client.put_object(Bucket="models", Key=f"large.stagepack/{name}", Body=bytes(CHUNK_BYTES - 1))
    with pytest.raises(DigestError, match="D1"):
        bundle.fetch([name])
    client.close()
    assert not (bundle.path / name).exists()
