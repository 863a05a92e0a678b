"""`stagepack push`."""

import click

from stagepack.cli.command import argument, flag, option_object, subcommand
from stagepack.cli.output import print_json, print_line
from stagepack.cli.shared_flags import JSON, BundleOptions, open_listed_argument, refuse_url
from stagepack.deltas.delta import Delta
from stagepack.extras import explain_missing_packages
from stagepack.format.manifest_codec import kind_name
from stagepack.remote.url import HUB_SCHEME, BundleUrl, is_url


@option_object
class _Options(BundleOptions):
    url: str = argument()
    private: bool = flag("--private", "Make a new repository private.")
    message: str | None = flag("--message TEXT", "Message of the commit.", default_text="the digest of the bundle")
    by_base: bool = flag(
        "--by-base",
        "Put a delta in the folder URL/DIGEST, where DIGEST is that of its base: 'serve --watch-deltas URL' finds it there, and so does "
        "who loads a bundle whose folder 'deltas' URL is.",
    )
    as_json: bool = JSON


@subcommand(
    "push",
    examples=[
        "stagepack push net.stagepack hf://org/name",
        "stagepack push net.stagepack hf://org/name --private",
        "stagepack push step.delta hf://org/name/deltas --by-base",
    ],
)
def command(options: _Options) -> None:
    """Upload a bundle, a delta or an adapter to the Hugging Face Hub.

    URL is hf://ORGANIZATION/NAME, with @BRANCH if it is not the main branch, and with a folder if the bundle is not to be the root of the
    repository. The bundle is verified first, and uploaded in one commit. Files of an older bundle are removed; all others stay. A
    repository without a README.md gets a short one. Log in with 'hf auth login', or set HF_TOKEN.
    """
    if not is_url(options.url) or BundleUrl.parse(options.url).scheme != HUB_SCHEME:
        raise click.UsageError(f"URL: expected hf://ORGANIZATION/NAME, found {options.url!r}")
    bundle = open_listed_argument(options.bundle_path)
    refuse_url(options.bundle_path, "expected a bundle on this machine")
    with explain_missing_packages("remote"):
        from stagepack.remote.push import push  # noqa: PLC0415 - huggingface_hub is optional

    # On a terminal, the library of the hub shows the progress.
    url = BundleUrl.parse(options.url)
    if options.by_base:
        if not isinstance(bundle, Delta):
            raise click.UsageError(
                f"--by-base: expected a delta, found {kind_name(bundle.document_format)}: {options.bundle_path}"
            )
        url = url.child(bundle.base)
    commit_url = push(bundle, url, private=options.private or None, message=options.message)
    if options.as_json:
        facts = {"bundle": options.bundle_path, "digest": bundle.digest, "url": str(url), "commit": commit_url}
        print_json(facts)
    else:
        print_line(f"uploaded {options.bundle_path} to {url}: {commit_url}")
