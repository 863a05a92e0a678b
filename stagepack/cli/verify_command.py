"""`stagepack verify`."""

from typing import TYPE_CHECKING, Any

import click

from stagepack.cli.bundle_facts import each_entry_point
from stagepack.cli.command import PathType, flag, only_with, option_object, subcommand
from stagepack.cli.failures import Failure
from stagepack.cli.output import counted_progress, finite, print_json, print_line, progress
from stagepack.cli.run_options import RUNTIMES, runtime_name_of_each_stage
from stagepack.cli.shared_flags import ALLOW_OPS, ATOL, DELTAS, IMPORTS, JSON, RTOL, BundleOptions, open_listed_argument
from stagepack.documents import Listed
from stagepack.errors import FormatError, SignatureError
from stagepack.format.manifest_codec import kind_name
from stagepack.format.reader import Bundle
from stagepack.format.rules import format_names
from stagepack.opening import verify_bundle
from stagepack_loaders.comparison import Difference, check_example_difference, combine_differences, format_difference
from stagepack_loaders.registry import import_runtime

if TYPE_CHECKING:
    from stagepack.signing.verification import VerifiedSignature


@option_object
class _Options(BundleOptions):
    delta_paths: tuple[str, ...] = DELTAS
    with_run: bool = flag("--run", "Also load the bundle and replay its example.")
    signers: tuple[str, ...] = flag(
        "--require-signature PEM",
        "Refuse a bundle that is not signed by a trusted signer: PEM is a file with its public key, or with certificates of authorities. "
        "Repeatable: one of them must verify the signature.",
        default_text="signatures are not verified",
        type=PathType(),
    )
    older_names: tuple[str, ...] = flag("--key, --certificate", "", type=PathType(), hidden=True)
    strict: bool = flag("--strict", "Also refuse files that the manifest does not list, such as README.md.")
    runtimes: tuple[str, ...] = only_with(RUNTIMES, "--run")
    rtol: float | None = only_with(RTOL, "--run")
    atol: float | None = only_with(ATOL, "--run")
    allow_ops: tuple[str, ...] = only_with(ALLOW_OPS, "--run")
    imports: tuple[str, ...] = only_with(IMPORTS, "--run")
    as_json: bool = JSON


@subcommand(
    "verify",
    examples=[
        "stagepack verify net.stagepack",
        "stagepack verify net.stagepack --run --runtime onnxruntime",
        "stagepack verify net.stagepack --require-signature signer.pub",
    ],
)
def command(options: _Options) -> None:
    """Check a bundle, a delta or an adapter by its digests and the rules.

    Every file must have the digest that the manifest lists, and every graph must follow the rules of the format. Needs no torch
    without --run, and does not check rule G16 then: whether the operators return what the graphs state. 'load' checks it.

    Files that the manifest does not list, such as README.md or .git, are named: nothing reads them, and no signature is over them.

    With --run, the bundle is loaded, and the results of the example must have the shapes and types of the recorded ones, NaN only where
    these have NaN, and values within a tolerance that depends on the type: for float32, 1e-3 of each value plus 1e-4.

    With --require-signature, the bundle must be signed by a trusted signer ('stagepack sign' or 'model_signing sign').
    """
    bundle_path = options.bundle_path
    facts: dict[str, Any] = {"bundle": bundle_path, "ok": True, "problems": []}
    bundle, signature = _verified_bundle(options, facts)
    unlisted_files = bundle.unlisted_files()
    difference: Difference | None = None
    if options.with_run and isinstance(bundle, Bundle):
        with progress("replaying the example"):
            difference = combine_differences(_replay(selected, options) for selected in each_entry_point(bundle))
    if options.as_json:
        is_ok = difference is None or difference.within
        facts |= {"ok": is_ok, "digest": bundle.digest, "files": len(bundle.files) + 1, "unlisted": unlisted_files}
        if signature is not None:
            facts["signature"] = {"trusted_file": signature.trusted_file, "subject": signature.subject}
        print_json(facts if difference is None else facts | {"difference": finite(difference.largest)})
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
            print_line(f"replayed the example: largest difference {format_difference(difference.largest)}")
    if difference is not None and isinstance(bundle, Bundle):
        check_example_difference(bundle, difference, cure="--rtol and --atol allow a difference")


def _replay(bundle: Bundle, options: _Options) -> Difference:
    """Load a bundle whose digests are verified already, and run its example."""
    runtimes = runtime_name_of_each_stage(options.runtimes, bundle)
    for runtime in dict.fromkeys(runtimes):
        import_runtime(runtime)  # before all else, so that a missing package is named with its runtime
    from stagepack_loaders.comparison import Tolerance  # noqa: PLC0415 - after the arguments are checked
    from stagepack_loaders.example import replay_example  # noqa: PLC0415 - the same
    from stagepack_loaders.load import load  # noqa: PLC0415 - the same

    pipeline = load(bundle, runtime=runtimes, allow_ops=options.allow_ops, verify="manifest")
    return replay_example(pipeline, Tolerance(options.rtol, options.atol))


def _verified_bundle(options: _Options, facts: dict[str, Any]) -> "tuple[Listed, VerifiedSignature | None]":
    """Open a bundle and verify it; with `--json`, `facts` are printed with the problems if there are any."""
    try:
        bundle = open_listed_argument(options.bundle_path)
        if options.with_run and not isinstance(bundle, Bundle):
            found = kind_name(bundle.document_format)
            raise click.UsageError(f"--run is for bundles, found {found}: load its base with it")
        with counted_progress("verifying the bundle", sum(file.size for file in bundle.listed)) as count_bytes:
            signers = [*options.signers, *options.older_names] or None
            signature = verify_bundle(bundle, require_signature=signers, strict=options.strict, progress=count_bytes)
    except FormatError as error:
        problems = [
            {"rule": problem.rule, "where": problem.where, "message": problem.message} for problem in error.problems
        ]
        refusal: dict[str, Any] = {"problems": problems}
        message = str(error)
    except SignatureError as error:
        message = str(error)
        refusal = {"signature": {"reason": error.reason, "message": message}}
    else:
        return bundle, signature
    if options.as_json:
        print_json(facts | {"ok": False} | refusal)
    raise Failure(message)
