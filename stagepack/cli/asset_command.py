"""`stagepack asset`."""

import click

from stagepack.bundle_assets import add_assets, asset_names_of, remove_assets
from stagepack.cli.command import subcommand
from stagepack.cli.failures import fail, shown_warnings
from stagepack.cli.output import format_bytes, print_json, print_line, print_table
from stagepack.cli.path_options import PathType, bundle_argument, open_argument
from stagepack.cli.run_options import json_option
from stagepack.cli.termination import orderly_termination
from stagepack.remote.url import is_url


@subcommand(
    "asset",
    examples=[
        "stagepack asset add llama.stagepack llama/tokenizer.json",
        "stagepack asset list llama.stagepack",
        "stagepack asset remove llama.stagepack tokenizer.json",
    ],
)
@click.argument("action", type=click.Choice(["add", "list", "remove"]))
@bundle_argument
@click.argument("files", nargs=-1, metavar="[FILE]...", type=PathType())
@click.option("--overwrite", is_flag=True, help="With add: replace assets of the same names.")
@json_option
def command(action: str, bundle_path: str, files: tuple[str, ...], overwrite: bool, as_json: bool) -> None:
    """Add files such as a tokenizer to a bundle, list or remove them.

    Weights are neither read nor copied, where the file system has hard links. The manifest lists the files with their digests, so the
    digest of the bundle changes: a signature is removed, with a warning, and code of 'stagepack compile' does not fit any more.
    """
    if (action == "list") == bool(files):
        raise click.UsageError("list takes no FILE" if files else f"{action}: name at least one FILE")
    if overwrite and action != "add":
        raise click.UsageError("--overwrite is for add")
    if action != "list" and is_url(bundle_path):
        fail(
            f"{bundle_path}: assets are written into the bundle: download it first: stagepack pull {bundle_path} -o FOLDER"
        )
    bundle = open_argument(bundle_path)
    with orderly_termination(), shown_warnings():
        if action == "add":
            bundle = add_assets(bundle, files, overwrite=overwrite)
        elif action == "remove":
            bundle = remove_assets(bundle, files)
    sizes = {file_name: bundle.files[file_name].size for file_name in asset_names_of(bundle)}
    if as_json:
        print_json({"bundle": bundle_path, "digest": bundle.digest, "assets": sizes})
        return
    print_table("assets", ["name", "#size"], [[file_name, format_bytes(size)] for file_name, size in sizes.items()])
    print_line(f"sha256: {bundle.digest}")
