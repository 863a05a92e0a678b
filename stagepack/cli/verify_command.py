"""`stagepack verify`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from stagepack.cli.bundle_facts import each_entry_point
from stagepack.cli.command import subcommand
from stagepack.cli.failures import fail
from stagepack.cli.output import byte_progress, finite, print_json, print_line, progress
from stagepack.cli.path_options import PathType, bundle_argument, open_argument
from stagepack.cli.run_options import (
    json_option,
    operator_options,
    replay,
    runtime_of_each_stage,
    runtime_option,
    tolerance_options,
)
from stagepack.errors import FormatError, SignatureError
from stagepack.format.reader import Bundle
from stagepack.opening import verify_bundle
from stagepack_loaders.registry import find_runtime

if TYPE_CHECKING:
    from stagepack.signing.verification import VerifiedSignature


@subcommand(
    "verify",
    examples=[
        "stagepack verify net.stagepack",
        "stagepack verify net.stagepack --run --runtime onnxruntime",
        "stagepack verify net.stagepack --key signer.pub",
    ],
)
@bundle_argument
@click.option("--run", "with_run", is_flag=True, help="Also load the bundle and replay its example.")
@click.option(
    "--key",
    "key_files",
    multiple=True,
    type=PathType(),
    metavar="PEM",
    show_default="signatures are not verified",
    help="Verify the signature with this public key of a signer. Repeatable: one of all keys and certificates must verify it.",
)
@click.option(
    "--certificate",
    "certificate_files",
    multiple=True,
    type=PathType(),
    metavar="PEM",
    show_default="signatures are not verified",
    help="Verify the signature with the certificates of the authorities in this file, which are trusted. Repeatable.",
)
@runtime_option
@tolerance_options
@operator_options
@json_option
@click.pass_context
def command(
    context: click.Context,
    bundle_path: str,
    with_run: bool,
    key_files: tuple[str, ...],
    certificate_files: tuple[str, ...],
    runtimes: tuple[str, ...],
    rtol: float | None,
    atol: float | None,
    allow_ops: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check a bundle against its digests and the format rules.

    Every file must have the digest that the manifest lists, and every graph must follow the rules of the format. Needs no torch
    without --run.

    With --run, the results of the example must have the shapes and types of the recorded ones, and NaN only where these have NaN. In
    ONNX Runtime they must also be within a tolerance that depends on the type: for float32, 1e-3 of each value plus 1e-4.

    With --key or --certificate, the bundle must be signed by a trusted signer ('stagepack sign' or 'model_signing sign').
    """
    if context.get_parameter_source("runtimes") is not click.core.ParameterSource.DEFAULT and not with_run:
        raise click.UsageError("--runtime requires --run")
    if (rtol, atol) != (None, None) and not with_run:
        raise click.UsageError("--rtol and --atol require --run")
    facts: dict[str, Any] = {"bundle": bundle_path, "ok": True, "problems": []}
    bundle, signature = _verified_bundle(bundle_path, [*key_files, *certificate_files], facts if as_json else None)
    difference: float | None = None
    is_same = True
    if with_run:
        with progress("replaying the example"):
            outcomes = [_replay(selected, runtimes, allow_ops, rtol, atol) for selected in each_entry_point(bundle)]
        difference, is_same = max(difference for difference, _ in outcomes), all(is_same for _, is_same in outcomes)
    if as_json:
        facts |= {"ok": is_same, "digest": bundle.digest, "files": len(bundle.files) + 1}
        if signature is not None:
            facts["signature"] = {"trusted_file": signature.trusted_file, "subject": signature.subject}
        print_json(facts if difference is None else facts | {"difference": finite(difference)})
    else:
        print_line(f"{bundle_path}: verified {len(bundle.files) + 1} files and all format rules")
        print_line(f"sha256: {bundle.digest}")
        if signature is not None:
            signer = "" if signature.subject is None else f" of {signature.subject}"
            print_line(f"signature{signer}: verified with {signature.trusted_file}")
        if difference is not None:
            print_line(f"replayed the example: largest difference {difference:g}")
    if not is_same:
        fail(f"{bundle_path}: the results of the example have other shapes, types or values than those of the model")


def _replay(
    bundle: Bundle, runtimes: tuple[str, ...], allow_ops: tuple[str, ...], rtol: float | None, atol: float | None
) -> tuple[float, bool]:
    """Replay the example of an entry point; return the largest difference, and whether the results are the recorded ones."""
    stage_runtimes = runtime_of_each_stage(runtimes, len(bundle.stages))
    difference, is_within = replay(bundle, runtimes=stage_runtimes, allow_ops=allow_ops, rtol=rtol, atol=atol)
    is_exact = all(find_runtime(runtime_name).exact for runtime_name in stage_runtimes)
    return difference, finite(difference) is not None and (is_within or is_exact)


def _verified_bundle(
    bundle_path: str, trusted_files: Sequence[str], json_facts: dict[str, Any] | None
) -> "tuple[Bundle, VerifiedSignature | None]":
    """Open a bundle and verify it; `json_facts` are printed with the problems if there are any."""
    try:
        bundle = open_argument(bundle_path)
        with byte_progress("verifying the bundle", sum(file.size for file in bundle.manifest.files)) as count_bytes:
            return bundle, verify_bundle(bundle, require_signature=trusted_files or None, progress=count_bytes)
    except FormatError as error:
        if json_facts is not None:
            problems = [
                {"rule": problem.rule, "where": problem.where, "message": problem.message} for problem in error.problems
            ]
            print_json(json_facts | {"ok": False, "problems": problems})
        fail(f"{bundle_path}: {error}")
    except SignatureError as error:
        if json_facts is not None:
            print_json(json_facts | {"ok": False, "signature": {"reason": error.reason, "message": str(error)}})
        fail(str(error))
