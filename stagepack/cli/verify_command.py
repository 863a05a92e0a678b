"""`stagepack verify`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

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
    runtime_option,
    tolerance_options,
)
from stagepack.errors import FormatError, SignatureError
from stagepack.format.reader import Bundle
from stagepack.format.rules import format_names
from stagepack.opening import verify_bundle
from stagepack_loaders.comparison import Difference, combine_differences

if TYPE_CHECKING:
    from stagepack.signing.verification import VerifiedSignature


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flags:
    """The options of the command; their help has what they mean."""

    with_run: bool
    trusted_files: tuple[str, ...]
    older_names: tuple[str, ...]
    strict: bool
    runtimes: tuple[str, ...]
    rtol: float | None
    atol: float | None
    allow_ops: tuple[str, ...]
    as_json: bool


@subcommand(
    "verify",
    examples=[
        "stagepack verify net.stagepack",
        "stagepack verify net.stagepack --run --runtime onnxruntime",
        "stagepack verify net.stagepack --require-signature signer.pub",
    ],
)
@bundle_argument
@click.option("--run", "with_run", is_flag=True, help="Also load the bundle and replay its example.")
@click.option(
    "--require-signature",
    "trusted_files",
    multiple=True,
    type=PathType(),
    metavar="PEM",
    show_default="signatures are not verified",
    help="Refuse a bundle that is not signed by a trusted signer: PEM is a file with its public key, or with certificates of authorities. "
    "Repeatable: one of them must verify the signature.",
)
@click.option("--key", "--certificate", "older_names", multiple=True, type=PathType(), hidden=True)
@click.option("--strict", is_flag=True, help="Also refuse files that the manifest does not list, such as README.md.")
@runtime_option
@tolerance_options
@operator_options
@json_option
@click.pass_context
def command(context: click.Context, /, bundle_path: str, **arguments: Any) -> None:
    """Check a bundle against its digests and the format rules.

    Every file must have the digest that the manifest lists, and every graph must follow the rules of the format. Needs no torch
    without --run, and does not check rule G16 then: whether the operators return what the graphs state. 'load' checks it.

    Files that the manifest does not list, such as README.md or .git, are named: nothing reads them, and no signature is over them.

    With --run, the bundle is loaded, and the results of the example must have the shapes and types of the recorded ones, NaN only where
    these have NaN, and values within a tolerance that depends on the type: for float32, 1e-3 of each value plus 1e-4.

    With --require-signature, the bundle must be signed by a trusted signer ('stagepack sign' or 'model_signing sign').
    """
    flags = _Flags(**arguments)
    if context.get_parameter_source("runtimes") is not click.core.ParameterSource.DEFAULT and not flags.with_run:
        raise click.UsageError("--runtime requires --run")
    if (flags.rtol, flags.atol) != (None, None) and not flags.with_run:
        raise click.UsageError("--rtol and --atol require --run")
    facts: dict[str, Any] = {"bundle": bundle_path, "ok": True, "problems": []}
    bundle, signature = _verified_bundle(
        bundle_path, [*flags.trusted_files, *flags.older_names], facts if flags.as_json else None, strict=flags.strict
    )
    unlisted_files = bundle.unlisted_files()
    difference: float | None = None
    is_within = True
    if flags.with_run:
        with progress("replaying the example"):
            difference, is_within = _replay_examples(bundle, flags.runtimes, flags.allow_ops, flags.rtol, flags.atol)
    if flags.as_json:
        facts |= {"ok": is_within, "digest": bundle.digest, "files": len(bundle.files) + 1, "unlisted": unlisted_files}
        if signature is not None:
            facts["signature"] = {"trusted_file": signature.trusted_file, "subject": signature.subject}
        print_json(facts if difference is None else facts | {"difference": finite(difference)})
    else:
        print_line(f"{bundle_path}: verified {len(bundle.files) + 1} files and all format rules that need no torch")
        print_line(f"sha256: {bundle.digest}")
        if unlisted_files:
            print_line(
                f"not of the bundle, and read by nothing: {format_names(unlisted_files)} (--strict refuses them)"
            )
        if signature is not None:
            signer = "" if signature.subject is None else f" of {signature.subject}"
            print_line(f"signature{signer}: verified with {signature.trusted_file}")
        if difference is not None:
            print_line(f"replayed the example: largest difference {difference:g}")
    if difference is not None and not is_within:
        _refuse_results(bundle_path, difference)


def _replay_examples(
    bundle: Bundle, runtimes: tuple[str, ...], allow_ops: tuple[str, ...], rtol: float | None, atol: float | None
) -> Difference:
    """Replay the example of each entry point."""
    return combine_differences(
        replay(
            selected,
            runtimes=runtimes,
            allow_ops=allow_ops,
            rtol=rtol,
            atol=atol,
        )
        for selected in each_entry_point(bundle)
    )


def _refuse_results(bundle_path: str, difference: float) -> NoReturn:
    outcome = (
        "other shapes, types or special values" if finite(difference) is None else f"a difference of {difference:g}"
    )
    fail(
        f"{bundle_path}: expected the recorded results of the example, found {outcome}: the bundle is damaged, or this device computes "
        "otherwise (--rtol and --atol allow a difference)"
    )


def _verified_bundle(
    bundle_path: str, trusted_files: Sequence[str], json_facts: dict[str, Any] | None, *, strict: bool
) -> "tuple[Bundle, VerifiedSignature | None]":
    """Open a bundle and verify it; `json_facts` are printed with the problems if there are any."""
    try:
        bundle = open_argument(bundle_path)
        with byte_progress("verifying the bundle", sum(file.size for file in bundle.manifest.files)) as count_bytes:
            signers = trusted_files or None
            return bundle, verify_bundle(bundle, require_signature=signers, strict=strict, progress=count_bytes)
    except FormatError as error:
        if json_facts is not None:
            problems = [
                {"rule": problem.rule, "where": problem.where, "message": problem.message} for problem in error.problems
            ]
            print_json(json_facts | {"ok": False, "problems": problems})
        fail(str(error))
    except SignatureError as error:
        if json_facts is not None:
            print_json(json_facts | {"ok": False, "signature": {"reason": error.reason, "message": str(error)}})
        fail(str(error))
