"""`stagepack asset`."""

from typing import Literal

import click

from stagepack.cli.command import BundleType, PathType, argument, flag, option_object, subcommand
from stagepack.cli.failures import shown_warnings
from stagepack.cli.output import print_json, print_line, print_table
from stagepack.cli.shared_flags import DIGEST, JSON, open_argument, refuse_url
from stagepack.cli.termination import orderly_termination
from stagepack.format.quantities import format_bytes
from stagepack.roads.assets import add_assets, asset_names_of, remove_assets


@option_object
class _Options:
    action: Literal["add", "list", "remove"] = argument()
    bundle_path: str = argument("BUNDLE", type=BundleType())
    digest: str | None = DIGEST
    files: tuple[str, ...] = argument("[FILE]...", type=PathType())
    overwrite: bool = flag("--overwrite", "With add: replace assets of the same names.")
    as_json: bool = JSON


@subcommand(
    "asset",
    examples=[
        "stagepack asset add llama.stagepack llama/tokenizer.json",
        "stagepack asset list llama.stagepack",
        "stagepack asset remove llama.stagepack tokenizer.json",
    ],
)
def command(options: _Options) -> None:
    """Add files such as a tokenizer to a bundle, list or remove them.

    Weights are neither read nor copied, where the file system has hard links. The manifest lists the files with their digests, so the
    digest of the bundle changes: a signature is removed, with a warning, and code of 'stagepack compile' does not fit any more.
    """
    action, files = options.action, options.files
    if (action == "list") == bool(files):
        raise click.UsageError("list takes no FILE" if files else f"{action}: name at least one FILE")
    if options.overwrite and action != "add":
        raise click.UsageError("--overwrite is for add")
    if action != "list":
        refuse_url(options.bundle_path, "assets are written into the bundle")
    bundle = open_argument(options.bundle_path)
    with orderly_termination(), shown_warnings():
        if action == "add":
            bundle = add_assets(bundle, files, overwrite=options.overwrite)
        elif action == "remove":
            bundle = remove_assets(bundle, files)
    sizes = {file_name: bundle.files[file_name].size for file_name in asset_names_of(bundle)}
    if options.as_json:
        print_json({"bundle": options.bundle_path, "digest": bundle.digest, "assets": sizes})
        return
    print_table("assets", ["name", "#size"], [[file_name, format_bytes(size)] for file_name, size in sizes.items()])
    print_line(f"sha256: {bundle.digest}")
