"""`stagepack push`."""

import click

from stagepack.cli.command import subcommand
from stagepack.cli.failures import fail
from stagepack.cli.output import print_json, print_line
from stagepack.cli.path_options import bundle_argument, open_argument
from stagepack.cli.run_options import json_option
from stagepack.extras import explain_missing_packages
from stagepack.remote.url import HUB_SCHEME, BundleUrl, is_url


@subcommand(
    "push",
    examples=["stagepack push net.stagepack hf://org/name", "stagepack push net.stagepack hf://org/name --private"],
)
@bundle_argument
@click.argument("url")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--message", metavar="TEXT", show_default="the digest of the bundle", help="Message of the commit.")
@json_option
def command(bundle_path: str, url: str, private: bool, message: str | None, as_json: bool) -> None:
    """Upload a bundle to the Hugging Face Hub.

    URL is hf://ORGANIZATION/NAME, with @BRANCH if it is not the main branch, and with a folder if the bundle is not to be the root of the
    repository. The bundle is verified first, and uploaded in one commit. Files of an older bundle are removed; all others stay. A
    repository without a README.md gets a short one. Log in with 'hf auth login', or set HF_TOKEN.
    """
    if not is_url(url) or BundleUrl.parse(url).scheme != HUB_SCHEME:
        raise click.UsageError(f"URL: expected hf://ORGANIZATION/NAME, found {url!r}")
    bundle = open_argument(bundle_path)
    if is_url(bundle_path):
        fail(
            f"{bundle_path}: expected a bundle on this machine: download it first: stagepack pull {bundle_path} -o FOLDER"
        )
    with explain_missing_packages("remote"):
        from stagepack.remote.push import push  # noqa: PLC0415 - huggingface_hub is optional

    # On a terminal, the library of the hub shows the progress.
    commit_url = push(bundle, BundleUrl.parse(url), private=private or None, message=message)
    if as_json:
        print_json({"bundle": bundle_path, "digest": bundle.digest, "url": url, "commit": commit_url})
    else:
        print_line(f"uploaded {bundle_path} to {url}: {commit_url}")
