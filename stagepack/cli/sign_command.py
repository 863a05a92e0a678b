"""`stagepack sign`."""

from pathlib import Path

from stagepack.cli.command import flag, only_with, option_object, subcommand
from stagepack.cli.output import counted_progress, print_json, print_line
from stagepack.cli.shared_flags import JSON, BundleOptions, open_listed_argument, refuse_url
from stagepack.extras import explain_missing_packages
from stagepack.format.rules import SIGNATURE_NAME


@option_object
class _Options(BundleOptions):
    key: Path = flag(
        "--key PEM", "Private key of the signer, unencrypted, of the curve P-256, P-384 or P-521.", required=True
    )
    certificate: Path | None = flag(
        "--certificate PEM",
        "Certificate of the key, which comes into the signature. Without it, the public key verifies the signature.",
        default_text="none",
    )
    certificate_chain: tuple[Path, ...] = only_with(
        flag(
            "--certificate-chain PEM",
            "Certificates of the authorities between --certificate and the one that verifiers trust. Repeatable.",
            default_text="none",
        ),
        "--certificate",
    )
    overwrite: bool = flag("--overwrite", "Replace a signature that the bundle has.")
    as_json: bool = JSON


@subcommand(
    "sign",
    examples=[
        "stagepack sign net.stagepack --key signer.pem",
        "stagepack sign net.stagepack --key signer.pem --certificate signer.crt",
    ],
)
def command(options: _Options) -> None:
    """Sign a bundle, a delta or an adapter.

    All files are compared with their digests and all rules are checked. Then a signature over all files is written into the bundle, as
    model.sig, by the model signing of OpenSSF: 'model_signing verify key' and 'model_signing verify certificate' verify it too. Every
    change of the bundle makes it invalid. 'stagepack verify --require-signature' verifies it, and so do 'load' and 'serve'.
    """
    refuse_url(options.bundle_path, "a signature is written into the folder")
    bundle = open_listed_argument(options.bundle_path)
    with explain_missing_packages("sign"):
        from stagepack.signing.sign import sign_bundle  # noqa: PLC0415 - model_signing is optional

    with counted_progress("verifying the bundle", sum(file.size for file in bundle.listed)) as count_bytes:
        sign_bundle(
            bundle,
            key=options.key,
            certificate=options.certificate,
            certificate_chain=options.certificate_chain,
            overwrite=options.overwrite,
            progress=count_bytes,
        )
    signature_path = bundle.path / SIGNATURE_NAME
    if options.as_json:
        print_json({"bundle": options.bundle_path, "digest": bundle.digest, "signature": str(signature_path)})
    else:
        print_line(f"signed {len(bundle.files) + 1} files: {signature_path}")
        print_line(f"sha256: {bundle.digest}")
