"""`stagepack sign`."""

from pathlib import Path

import click

from stagepack.cli.command import subcommand
from stagepack.cli.failures import fail
from stagepack.cli.output import byte_progress, print_json, print_line
from stagepack.cli.path_options import PathType, bundle_argument, open_argument
from stagepack.cli.run_options import json_option
from stagepack.extras import explain_missing_packages
from stagepack.format.rules import SIGNATURE_NAME
from stagepack.remote.url import is_url


@subcommand(
    "sign",
    examples=[
        "stagepack sign net.stagepack --key signer.pem",
        "stagepack sign net.stagepack --key signer.pem --certificate signer.crt",
    ],
)
@bundle_argument
@click.option(
    "--key",
    required=True,
    type=PathType(Path),
    metavar="PEM",
    help="Private key of the signer, unencrypted, of the curve P-256, P-384 or P-521.",
)
@click.option(
    "--certificate",
    type=PathType(Path),
    metavar="PEM",
    show_default="none",
    help="Certificate of the key, which comes into the signature. Without it, the public key verifies the signature.",
)
@click.option(
    "--certificate-chain",
    "certificate_chain",
    multiple=True,
    type=PathType(Path),
    metavar="PEM",
    show_default="none",
    help="Certificates of the authorities between --certificate and the one that verifiers trust. Repeatable.",
)
@click.option("--overwrite", is_flag=True, help="Replace a signature that the bundle has.")
@json_option
def command(
    bundle_path: str,
    key: Path,
    certificate: Path | None,
    certificate_chain: tuple[Path, ...],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Sign a bundle.

    All files are compared with their digests and all rules are checked. Then a signature over all files is written into the bundle, as
    model.sig, by the model signing of OpenSSF: 'model_signing verify key' and 'model_signing verify certificate' verify it too. Every
    change of the bundle makes it invalid. 'stagepack verify --require-signature' verifies it, and so do 'load' and 'serve'.
    """
    if certificate_chain and certificate is None:
        raise click.UsageError("--certificate-chain requires --certificate")
    if is_url(bundle_path):
        fail(
            f"{bundle_path}: a signature is written into the folder: download it first: stagepack pull {bundle_path} -o FOLDER"
        )
    bundle = open_argument(bundle_path)
    with explain_missing_packages("sign"):
        from stagepack.signing.sign import sign_bundle  # noqa: PLC0415 - model_signing is optional

    with byte_progress("verifying the bundle", sum(file.size for file in bundle.manifest.files)) as count_bytes:
        sign_bundle(
            bundle,
            key=key,
            certificate=certificate,
            certificate_chain=certificate_chain,
            overwrite=overwrite,
            progress=count_bytes,
        )
    signature_path = bundle.path / SIGNATURE_NAME
    if as_json:
        print_json({"bundle": bundle_path, "digest": bundle.digest, "signature": str(signature_path)})
    else:
        print_line(f"signed {len(bundle.files) + 1} files: {signature_path}")
        print_line(f"sha256: {bundle.digest}")
