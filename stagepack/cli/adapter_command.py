"""`stagepack adapter`."""

import time

import click

from stagepack.cli.adapter_facts import adapter_facts, adapter_line
from stagepack.cli.bundle_facts import bundle_facts, print_written
from stagepack.cli.command import BundleType, OutputFolderType, argument, flag, option_object, subcommand
from stagepack.cli.failures import shown_warnings
from stagepack.cli.output import print_json, print_line, progress
from stagepack.cli.shared_flags import ALLOW_OPS, DELTAS, DIGEST, IMPORTS, JSON, open_argument
from stagepack.cli.termination import orderly_termination
from stagepack.extras import require_extras
from stagepack.format.quantities import format_bytes
from stagepack.remote.url import is_url
from stagepack.roads.adapter import write_adapter


@option_object
class _Options:
    adapter_path: str = argument("ADAPTER", type=BundleType())
    bundle_path: str = flag("--base BUNDLE", "Bundle of the model that it adapts.", required=True, type=BundleType())
    digest: str | None = DIGEST
    delta_paths: tuple[str, ...] = DELTAS
    out: str = flag(
        "-o, --out FOLDER", "Adapter to write; with --merge, the bundle.", required=True, type=OutputFolderType()
    )
    merge: bool = flag("--merge", "Write a bundle of the merged weights instead; needs torch.")
    allow_ops: tuple[str, ...] = ALLOW_OPS
    imports: tuple[str, ...] = IMPORTS
    overwrite: bool = flag("--overwrite", "Replace an existing output of the same kind.")
    as_json: bool = JSON


@subcommand(
    "adapter",
    examples=[
        "stagepack adapter ./lora --base llama.stagepack -o pirate",
        "stagepack adapter ./lora --base llama.stagepack --merge -o new.stagepack",
    ],
)
def command(options: _Options) -> None:
    """Write an adapter of peft for a bundle, or merge it into one.

    ADAPTER is a folder with adapter_config.json and adapter_model.safetensors, as save_pretrained of peft writes it. LoRA of linear layers,
    Conv1D and embeddings is taken; nothing is captured again, and torch is not needed. The output belongs to this bundle: --adapter of
    'stagepack load' and 'stagepack serve' load it over any placement of the stages. With --merge, ADAPTER may be such
    an output, or its URL.
    """
    if is_url(options.adapter_path) and not options.merge:
        raise click.UsageError("ADAPTER: expected the folder of an adapter of peft, found a URL")
    start_time = time.perf_counter()
    with progress("opening the bundle") as next_step, orderly_termination(), shown_warnings():
        if options.merge:
            require_extras("torch")
        bundle = open_argument(options.bundle_path)
        if options.merge:
            from stagepack.roads.merge import merge_adapter  # noqa: PLC0415 - torch, after the arguments are checked

            written = merge_adapter(
                bundle,
                options.adapter_path,
                out=options.out,
                allow_ops=options.allow_ops,
                overwrite=options.overwrite,
                progress=next_step,
            )
        else:
            adapter = write_adapter(
                bundle, options.adapter_path, out=options.out, overwrite=options.overwrite, progress=next_step
            )
    seconds = time.perf_counter() - start_time
    if options.merge:
        if options.as_json:
            print_json(bundle_facts(written) | {"seconds": round(seconds, 3)})
        else:
            print_written(written, options.out, seconds)
        return
    facts = adapter_facts(adapter)
    if options.as_json:
        print_json(facts | {"seconds": round(seconds, 3)})
        return
    print_line(f"wrote {options.out}: {format_bytes(facts['bytes'])}, in {seconds:.1f} s")
    print_line(adapter_line(facts))
    print_line(f"sha256: {facts['digest']}")
