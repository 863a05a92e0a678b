"""The options of `stagepack serve` that say who may use the server."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagepack.cli.model_loading import ServeOptions
from stagepack.cli.path_options import PathType
from stagepack_loaders.distributed.launch_environment import is_launched_group, launched_rank

if TYPE_CHECKING:
    from stagepack_serving.server.security import ServerSecurity


def security_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options, passed as fields of `ServeOptions`."""
    options = (
        click.option(
            "--tls-certificate",
            type=PathType(Path),
            metavar="FILE",
            show_default="no encryption",
            help="PEM file with the certificate of the server, and those between it and its authority: REST and gRPC are encrypted by TLS.",
        ),
        click.option(
            "--tls-key",
            type=PathType(Path),
            metavar="FILE",
            help="With --tls-certificate: PEM file with its private key, which other users must not be able to read.",
        ),
        click.option(
            "--tls-client-ca",
            type=PathType(Path),
            metavar="FILE",
            show_default="clients need no certificate",
            help="With --tls-certificate: PEM file with certificate authorities; clients need a certificate of one of them.",
        ),
        click.option(
            "--token-file",
            type=PathType(Path),
            metavar="FILE",
            show_default="no token",
            help="File with a token on each line. Requests, but those for the health of the server, need one of them: "
            "'Authorization: Bearer TOKEN'.",
        ),
    )
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), function)


def check_security_options(options: ServeOptions) -> None:
    """Refuse options of TLS that do not go together."""
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise click.UsageError("--tls-certificate and --tls-key require each other")
    if options.tls_client_ca is not None and options.tls_certificate is None:
        raise click.UsageError("--tls-client-ca requires --tls-certificate")


def server_security(options: ServeOptions) -> "ServerSecurity":
    """Read and check the files that the options name. In processes of torchrun that run stages only, the files need not be there."""
    from stagepack_serving.server.security import ServerSecurity, read_security  # noqa: PLC0415 - after the arguments are checked

    if is_launched_group() and launched_rank() != 0:
        return ServerSecurity()
    return read_security(
        tls_certificate=options.tls_certificate,
        tls_key=options.tls_key,
        tls_client_ca=options.tls_client_ca,
        token_file=options.token_file,
    )
