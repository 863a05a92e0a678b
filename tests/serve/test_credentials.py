"""Files of certificates, keys and tokens that a server refuses, before it loads or listens."""

import errno
import os
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stagepack
from stagepack.cli.serve_command import server_security
from stagepack.errors import OptionError
from stagepack_serving.server.errors import CredentialError
from stagepack_serving.server.security import (
    AuthenticationError,
    ServerSecurity,
    ServerTls,
    StoredTokens,
    WatchedFiles,
    check_authorization,
)
from tests.serve.certificates import Certificate, make_certificate, secret_file

TOKEN = "right-token-0123456789"  # noqa: S105 - of these tests
OTHER_TOKEN = "other-token-0123456789"  # noqa: S105 - of these tests


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"), "server")


def encrypt(key: Path) -> bytes:
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:secret"]
    return subprocess.run(command, capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (lambda good: good.with_name("absent"), "absent: the TLS key cannot be read: No such file"),
        (lambda good: good.parent, "the TLS key cannot be read: Is a directory"),
        (lambda good: secret_file(good.with_name("empty"), b""), "expected a TLS key, found an empty file"),
        (lambda good: secret_file(good.with_name("large"), bytes(2_000_000)), "found more than 1000000 bytes"),
        (lambda good: secret_file(good.with_name("open"), good.read_bytes(), 0o644), "the permissions 0644"),
        (lambda good: secret_file(good.with_name("shared"), good.read_bytes(), 0o660), "the permissions 0660"),
        (lambda good: secret_file(good.with_name("text"), "a key"), "expected a TLS key in PEM"),
        (lambda good: secret_file(good.with_name("locked"), encrypt(good)), "the TLS key is encrypted"),
        (lambda good: make_certificate(good.parent, "other").key_file, "is not that of the certificate"),
        (
            lambda good: secret_file(good.with_name("damaged"), good.read_bytes().replace(b"M", b"N", 1)),
            "TLS cannot use them",
        ),
    ],
)
def test_keys_that_are_refused(certificate: Certificate, key: Callable[[Path], Path], says: str) -> None:
    with pytest.raises(CredentialError, match=says) as caught:
        ServerTls(certificate.certificate_file, key(certificate.key_file))
    assert "MIG" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a certificate", "expected a {} in PEM"),
        ("\N{SNOWMAN}".encode(), "expected a {} in PEM: it is not ASCII"),
        (b"", "expected a {}, found an empty file"),
    ],
)
def test_certificates_that_are_refused(certificate: Certificate, tmp_path: Path, content: bytes, says: str) -> None:
    file = secret_file(tmp_path / "file", content)
    with pytest.raises(CredentialError, match=says.format("TLS certificate")):
        ServerTls(file, certificate.key_file)
    with pytest.raises(CredentialError, match=says.format("client CA")):
        ServerTls(certificate.certificate_file, certificate.key_file, file)


def test_a_key_of_the_group_is_accepted(certificate: Certificate, tmp_path: Path) -> None:
    key = secret_file(tmp_path / "key", certificate.key_file.read_bytes(), 0o440)
    tls = ServerTls(certificate.certificate_file, key, certificate.certificate_file)
    assert "PRIVATE" not in repr(tls)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all files")
def test_a_file_without_permission(tmp_path: Path) -> None:
    with pytest.raises(CredentialError, match="cannot be read: Permission denied"):
        StoredTokens(secret_file(tmp_path / "tokens", TOKEN, 0o000))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "found an empty file"),
        ("# only this\n\n", "expected a token on each line, found none"),
        (f"{TOKEN}\nshort\n", "line 2: expected a token of at least 16"),
        (f"{TOKEN} {TOKEN}\n", "line 1: expected a token"),
        ("p\xe4ssw\xf6rter-der-nutzer\n", "line 1: expected a token"),
    ],
)
def test_token_files_that_are_refused(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(CredentialError, match=says) as caught:
        StoredTokens(secret_file(tmp_path / "tokens", content))
    assert TOKEN not in str(caught.value)


def test_tokens_from_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, TOKEN.encode())
    os.close(writing)
    check_token = StoredTokens(f"/proc/self/fd/{reading}")
    os.close(reading)
    assert check_token(TOKEN)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        ["Bearer"],
        [TOKEN],
        [f"Basic {TOKEN}"],
        [f"Bearer {TOKEN[:-1]}"],
        ["Bearer \udcff\xff"],
        [f"Bearer {TOKEN}"] * 2,
    ],
)
def test_requests_that_are_refused(tmp_path: Path, values: list[str]) -> None:
    check_token = StoredTokens(secret_file(tmp_path / "tokens", TOKEN))
    check_authorization(check_token, [f"Bearer {TOKEN}"])
    with pytest.raises(AuthenticationError) as caught:
        check_authorization(check_token, values)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tls_key": "x"}, "tls_certificate and tls_key: expected both or none"),
        ({"tls_client_ca": "x"}, "tls_client_ca: expected tls_certificate"),
        ({"token_file": "x", "check_token": bool}, "token_file and check_token: expected one of them"),
    ],
)
def test_arguments_of_python_that_do_not_go_together(arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
    import torch

    bundle = stagepack.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), out=tmp_path / "x.stagepack", stages=1)
    with pytest.raises(OptionError, match=says):
        stagepack.serve({"x": stagepack.load(bundle)}, **arguments)


def test_tokens_that_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = secret_file(tmp_path / "tokens", TOKEN)
    tokens = StoredTokens(file)
    watched = WatchedFiles([file], tokens.reload)
    with caplog.at_level("INFO", "stagepack.serve"):
        for content, accepted in (
            (TOKEN, TOKEN),
            (f"{OTHER_TOKEN}\n", OTHER_TOKEN),
            ("short", OTHER_TOKEN),
            ("", OTHER_TOKEN),
            (f"{TOKEN}\n{OTHER_TOKEN}", TOKEN),
        ):
            secret_file(tmp_path / "next", content).replace(file)
            watched.check()
            watched.check()
            assert tokens(accepted)
        assert tokens(OTHER_TOKEN)
        file.unlink()
        watched.check()
        assert tokens(TOKEN)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 6
    assert "the server goes on with what it read before" in messages[-1]
    assert not [message for message in messages if TOKEN in message or OTHER_TOKEN in message]


def test_a_certificate_that_changes_before_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine, other = make_certificate(tmp_path, "mine"), make_certificate(tmp_path, "other")
    tls = ServerTls(mine.certificate_file, mine.key_file)
    watched = WatchedFiles([mine.certificate_file, mine.key_file], tls.reload)
    mine.certificate_file.write_bytes(other.certificate_file.read_bytes())
    watched.check()
    assert "is not that of the certificate" in caplog.text
    mine.key_file.write_bytes(other.key_file.read_bytes())
    caplog.clear()
    watched.check()
    assert "is not that of the certificate" not in caplog.text


def test_a_key_that_is_missing_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The key was read, and is being replaced when OpenSSL reads it."""
    mine = make_certificate(tmp_path, "mine")
    tls = ServerTls(mine.certificate_file, mine.key_file)
    watched = WatchedFiles([mine.certificate_file, mine.key_file], tls.reload)
    os.utime(mine.certificate_file, (1, 1))
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", missing_file)
    watched.check()
    assert "cannot be read: No such file or directory; the server goes on with what it read before" in caplog.text


def missing_file(*_: Any, **__: Any) -> None:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_process_that_serves_reads_the_files(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for variable, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(variable, str(value))
    options: Any = SimpleNamespace(tls_certificate=None, tls_key=None, tls_client_ca=None, token_file=Path("nothing"))
    if rank == 0:
        with pytest.raises(CredentialError):
            server_security(options)
    else:
        assert server_security(options) == ServerSecurity()
