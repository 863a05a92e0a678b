"""Private authorities and proxies of a network, by the environment variables that the documentation names."""

import os
import ssl
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.remote.http_server import HttpServer
from tests.serve.certificates import make_certificate


class ProxyServer(HttpServer):
    """A proxy that has the files itself: it is asked for whole URLs."""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        assert handler.path.startswith("http://bundles.invalid/")
        handler.path = urlsplit(handler.path).path
        super().answer(handler)


def inspect(url: str, cache: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {
        "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder),
        "STAGEPACK_CACHE": str(cache),
    }
    command = [sys.executable, "-m", "stagepack", "inspect", url]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=False)


def test_private_authority_is_that_of_ssl_cert_file(server: HttpServer, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    authority = make_certificate(tmp_path, "authority")
    certificate = make_certificate(tmp_path, "server", authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate_file, certificate.key_file)
    server.use_tls(context)
    url = f"{server.url}/tiny.stagepack"
    refused = inspect(url, tmp_path / "cache")
    assert refused.returncode == 1
    assert "certificate" in refused.stderr.lower()
    accepted = inspect(url, tmp_path / "cache", SSL_CERT_FILE=str(authority.certificate_file))
    assert accepted.returncode == 0, accepted.stderr


def test_proxy_of_the_environment_is_asked(served: Path, tmp_path: Path) -> None:
    with ProxyServer(served) as proxy:
        finished = inspect("http://bundles.invalid/tiny.stagepack", tmp_path / "cache", HTTP_PROXY=proxy.url)
        assert finished.returncode == 0, finished.stderr
        assert proxy.requests["manifest.json"] == 1


def test_hosts_of_no_proxy_are_asked_without_one(server: HttpServer, tmp_path: Path) -> None:
    variables = {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    finished = inspect(f"{server.url}/tiny.stagepack", tmp_path / "cache", **variables)
    assert finished.returncode == 0, finished.stderr
