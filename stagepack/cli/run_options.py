"""The options shared by the subcommands that run bundles, and what these subcommands do with them.

Runtimes are imported when they are needed.

- The option for stages in processes of their own, and the same under torchrun.
- The options that trace a run, and the run of several requests that is traced.
"""

# Long because a function for each option that several commands take.

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagepack.capture.imports import import_user_module
from stagepack.capture.torch_messages import describe_error
from stagepack.cli.failures import Failure
from stagepack.cli.output import count_of, print_line, progress
from stagepack.cli.path_options import PathType, folder_name, remember_trusted_files
from stagepack.cli.trace_facts import trace_facts
from stagepack.errors import StageLostError
from stagepack.format.dtypes import parse_byte_size
from stagepack.format.reader import Bundle
from stagepack.opening import split_entry_point
from stagepack_loaders.call_limits import Limits
from stagepack_loaders.distributed.launch_environment import is_launched_group
from stagepack_loaders.options import LoadOptions, ProcessOptions
from stagepack_loaders.registry import DEFAULT_RUNTIME, choose_runtime, find_runtime, import_runtime, runtime_names
from stagepack_loaders.registry import runtimes as registered_runtimes
from stagepack_serving.server.limits import ServerLimits

if TYPE_CHECKING:
    from stagepack_loaders.comparison import Difference
    from stagepack_loaders.distributed.pipeline import DistributedPipeline
    from stagepack_loaders.pipeline import CallablePipeline

_MAX_COUNT = 2**31 - 1
_DAY = 86_400  # seconds
_MOST_REQUESTS = 10_000
_DEFAULT_REQUESTS = 8


def device_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--device`, passed as `devices`."""
    return click.option(
        "--device",
        "devices",
        multiple=True,
        default=("cpu",),
        show_default=True,
        metavar="DEVICE",
        callback=_check_devices,
        help="Device for each stage, in order; with fewer devices, consecutive stages share one. "
        "Such as cpu, cuda or cuda:1. Repeatable.",
    )(function)


def _check_devices(_context: click.Context, _option: click.Parameter, devices: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse the device of torch that holds shapes and no numbers; the runtimes check all else."""
    if any(device.partition(":")[0] == "meta" for device in devices):
        raise click.BadParameter("tensors on the device meta have no data.")
    return devices


class RuntimeName(click.ParamType):  # type: ignore[type-arg]
    """The name of a registered runtime. Modules that `--import` names may have registered it just before."""

    name = "runtime"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name if it is that of a runtime."""
        if value not in (names := (DEFAULT_RUNTIME, *runtime_names())):
            self.fail(f"{value!r} is not one of {', '.join(map(repr, names))}.", param, ctx)
        return value


def runtime_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--runtime`, passed as `runtimes`."""
    return click.option(
        "--runtime",
        "runtimes",
        multiple=True,
        default=(DEFAULT_RUNTIME,),
        show_default=True,
        type=RuntimeName(),
        metavar="NAME",
        help=f"Runtime that executes the stages: one for all stages, or one for each stage in order. Repeatable. NAME is "
        f"{', '.join(runtime_names())}, a runtime that a module of --import registers, or auto: the first of them that is installed and "
        "that the bundle has files for.",
    )(function)


def compiled_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--compiled`, passed as `compiled_folder`."""
    return click.option(
        "--compiled",
        "compiled_folder",
        type=PathType(),
        metavar="FOLDER",
        show_default="off",
        help="Run the native code in this folder, written by 'stagepack compile'. The code is executed as it is: use only "
        "folders that you trust.",
    )(function)


def verify_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--verify`, passed as `verify`."""
    return click.option(
        "--verify",
        type=click.Choice(["full", "manifest", "off"]),
        default="full",
        show_default=True,
        help="What is compared with the digests of the bundle. full: every file that is read. manifest: all but the content of weight "
        "files. off: only the manifest. The rules of the format are checked in any case.",
    )(function)


def signature_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--require-signature`, which `open_argument` reads."""
    return click.option(
        "--require-signature",
        "trusted_files",
        multiple=True,
        type=PathType(),
        metavar="PEM",
        show_default="not required",
        expose_value=False,
        callback=remember_trusted_files,
        help="Refuse a bundle that is not signed by a trusted signer: PEM is a file with its public key, or with certificates of "
        "authorities. Repeatable: one of them must verify the signature. Requires --verify full.",
    )(function)


def byte_size(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """Parse the value of an option that is a number of bytes, as a callback of the option."""
    try:
        return None if value is None else parse_byte_size(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


def device_memory_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--device-memory`, passed as `device_memory`."""
    return click.option(
        "--device-memory",
        metavar="SIZE",
        show_default="no limit",
        help="Memory for weights on each device, such as 8GiB: weights that do not fit pass through it in each call.",
    )(function)


def operator_options(function: Callable[..., Any], *, pass_imports: bool = False) -> Callable[..., Any]:
    """Add the options for operators that do not run by default: `--allow-ops`, passed as `allow_ops`, and `--import`.

    The modules are imported while the command line is parsed, since they may register the runtime that another option names. With
    `pass_imports` their names are passed as `imports`.
    """
    allow_option = click.option(
        "--allow-ops",
        multiple=True,
        metavar="NAME",
        show_default="none",
        help="Allow these operators to run: a namespace of custom ones, or one of ATen or prims that does not run by default. Repeatable.",
    )
    import_option = click.option(
        "--import",
        "imports",
        multiple=True,
        metavar="MODULE",
        show_default="none",
        is_eager=True,
        callback=_import_modules,
        expose_value=pass_imports,
        help="Import this Python module first, such as one that registers custom operators or a runtime. Repeatable.",
    )
    return allow_option(import_option(function))


def _import_modules(
    _context: click.Context, _option: click.Parameter, module_names: tuple[str, ...]
) -> tuple[str, ...]:
    """Import the modules that the caller names, with the current folder on the path, as ``python -m`` does."""
    for module_name in module_names:
        if module_name.endswith(".py"):
            module = module_name.removesuffix(".py").replace("/", ".").strip(".")
            raise Failure(
                f"--import {module_name}: expected the name of a module, found a file: write it without .py: --import {module}"
            )
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is for our facts alone
                import_user_module(module_name)
        except (Exception, SystemExit) as error:
            raise Failure(f"--import {module_name}: {describe_error(error)}") from error
    return module_names


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--json`, passed as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(function)


def limit_option(
    flag: str,
    field: str,
    *,
    metavar: str,
    description: str,
    unit: float = 1.0,
    minimum: float = 0,
    maximum: float = _DAY,
    default: float | None = None,
) -> Callable[..., Any]:
    """Return a decorator that adds an option for a field of `ServerLimits`.

    unit: what a value of 1 is in the unit of the field: 1e-3 for milliseconds, where the field has seconds.
    """
    field_default = getattr(ServerLimits(), field)
    is_count = isinstance(field_default, int) and unit == 1
    shown_default = field_default if is_count else _integer_if_whole(field_default / unit)
    value_type = click.IntRange(min=int(minimum)) if is_count else click.FloatRange(minimum, maximum)

    def in_unit_of_field(_context: click.Context, _option: click.Parameter, value: float) -> float:
        if math.isnan(value):  # comparisons do not find it out of range
            raise click.BadParameter("nan is not a number.")
        if is_count and value > _MAX_COUNT:
            raise click.BadParameter(f"{value} is not in the range x<={_MAX_COUNT}.")
        return type(field_default)(value * unit)  # type: ignore[no-any-return]

    return click.option(
        flag,
        field,
        default=shown_default if default is None else default,
        show_default=True,
        type=value_type,
        metavar=metavar,
        callback=in_unit_of_field,
        help=description,
    )


def _integer_if_whole(quantity: float) -> float:
    """Return 60 for 60.0, which the help shows without decimals."""
    return int(quantity) if quantity.is_integer() else quantity


def check_stage_number(stage_number: int | None, bundle: Bundle) -> None:
    """Refuse a `--stage` that the bundle does not have."""
    if stage_number is not None and not 0 <= stage_number < len(bundle.stages):
        raise Failure(f"--stage: expected a stage from 0 to {len(bundle.stages) - 1}, found {stage_number}")


def runtime_of_each_stage(runtimes: Sequence[str], bundle: Bundle) -> list[str]:
    """Return the name of the runtime of each stage."""
    stage_count = len(bundle.stages)
    if len(runtimes) not in (1, stage_count):
        raise click.UsageError(
            f"--runtime: expected one runtime, or one for each of {stage_count} stages, found {len(runtimes)}"
        )
    named = [choose_runtime(name, bundle, range(stage_count)).name for name in runtimes]
    return named if len(named) == stage_count else named * stage_count


def check_runtimes_compile(flag: str, runtimes: Sequence[str]) -> None:
    """Refuse an option for compiled stages with a runtime that does not run them."""
    if not all(name == DEFAULT_RUNTIME or find_runtime(name).compiles for name in runtimes):
        compiling_runtimes = " or ".join(runtime.name for runtime in registered_runtimes() if runtime.compiles)
        raise click.UsageError(f"{flag} requires the runtime {compiling_runtimes} for all stages: leave out --runtime")


def dtype_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--dtype`: the dtype of the weights of a Hugging Face model."""
    return click.option(
        "--dtype",
        type=click.Choice(["float64", "float32", "float16", "bfloat16"]),
        metavar="DTYPE",
        show_default="that of the checkpoint",
        help="For a Hugging Face folder or hub name: convert the weights to float64, float32, float16 or bfloat16.",
    )(function)


def tolerance_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options `--rtol` and `--atol`: how far results may be from the expected ones."""
    default = "by dtype"
    options = (
        click.option(
            "--rtol",
            type=click.FloatRange(min=0.0),
            metavar="R",
            show_default=default,
            help="Difference from the expected results that is allowed relative to each value.",
        ),
        click.option(
            "--atol",
            type=click.FloatRange(min=0.0),
            metavar="A",
            show_default=default,
            help="Absolute difference that is allowed in addition.",
        ),
    )
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), function)


def replay(
    bundle: Bundle,
    *,
    runtimes: Sequence[str] = (DEFAULT_RUNTIME,),
    allow_ops: Collection[str] = (),
    rtol: float | None = None,
    atol: float | None = None,
) -> "Difference":
    """Load a bundle whose digests are verified already, and run its example."""
    runtimes = runtime_of_each_stage(runtimes, bundle)
    for runtime in dict.fromkeys(runtimes):
        import_runtime(runtime)  # before all else, so that a missing package is that of the runtime
    from stagepack_loaders.comparison import Tolerance  # noqa: PLC0415 - after the arguments are checked
    from stagepack_loaders.example import replay_example  # noqa: PLC0415 - the same
    from stagepack_loaders.load import load  # noqa: PLC0415 - the same

    pipeline = load(bundle, runtime=runtimes, allow_ops=allow_ops, verify="manifest")
    return replay_example(pipeline, bundle, Tolerance(rtol, atol))


def default_model_name(bundle_path: str) -> str:
    """Return the name by which clients call a bundle: that of its folder without ``.stagepack``, and after ``_`` its entry point."""
    folder = folder_name(bundle_path).removesuffix(".stagepack")
    _, entry_point = split_entry_point(bundle_path)
    return folder if entry_point is None else f"{folder}_{entry_point}"


def batching_text(max_batch: int, reason_without: str) -> str:
    """Describe whether requests are combined into batches; if they are not, `reason_without` says why."""
    if max_batch > 1:
        return f"batches of up to {max_batch}"
    return f"no batching: {reason_without}" if reason_without else "no batching"


def processes_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--processes`, passed as `processes`."""
    return click.option(
        "--processes",
        type=click.IntRange(1),
        metavar="N",
        show_default="all stages in this process",
        help="Run the stages in N processes of their own on this machine; with fewer processes than stages, consecutive stages share one. "
        "Under torchrun, whose processes are used instead, leave it out.",
    )(function)


def start_processes(
    bundle: Bundle,
    process_count: int | None,
    options: LoadOptions,
    processes: ProcessOptions,
    limits: Limits | None = None,
) -> "DistributedPipeline | None":
    """Start processes on this machine, or take those that torchrun has started.

    process_count: the number of processes on this machine; None under torchrun.
    The result is the pipeline; None in a process that torchrun started to run stages, when the pipeline is closed.
    """
    if process_count is None:
        from stagepack_loaders.distributed.connect import connect_launched  # noqa: PLC0415 - imports torch

        return connect_launched(bundle, options, processes, (), limits or Limits())
    if is_launched_group():
        raise click.UsageError("torchrun has started the processes: leave out --processes")
    from stagepack_loaders.load import load_in_processes  # noqa: PLC0415 - imports torch

    return load_in_processes(bundle, process_count, options, processes, (), limits or Limits())


def trace_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options `--trace` and `--requests`, passed as `trace_file` and `request_count`."""
    trace_option = click.option(
        "--trace",
        "trace_file",
        type=PathType(Path),
        metavar="FILE",
        show_default="not written",
        help="After the first answer, run the inputs again, and write to FILE when each process computed, waited and transferred for each "
        "request: a trace that https://ui.perfetto.dev shows, and 'stagepack report --trace'.",
    )
    count_option = click.option(
        "--requests",
        "request_count",
        type=click.IntRange(1, _MOST_REQUESTS),
        metavar="N",
        default=_DEFAULT_REQUESTS,
        show_default=True,
        help="With --trace: how often the inputs are run; with several processes, at the same time.",
    )
    return trace_option(count_option(function))


def trace_requests(
    pipeline: "CallablePipeline", inputs: Mapping[str, Any], request_count: int, trace_file: Path, *, at_once: int
) -> dict[str, Any]:
    """Run a pipeline several times on the same inputs, and write a trace of it.

    at_once: how many calls are in flight at most.
    """
    from stagepack_loaders import example  # noqa: PLC0415 - after the arguments are checked
    from stagepack_loaders.run_trace import write_trace  # noqa: PLC0415 - the same

    def run_request(_: int) -> None:
        # A copy, since a model may write into its inputs.
        example.run_on_inputs(pipeline, {edge_name: pipeline.arrays.copy(array) for edge_name, array in inputs.items()})

    with progress("tracing"), pipeline.trace() as run_trace:
        if at_once == 1:
            for request in range(request_count):
                run_request(request)
        else:
            with ThreadPoolExecutor(min(at_once, request_count), thread_name_prefix="caller") as executor:
                list(executor.map(run_request, range(request_count)))
    write_trace(run_trace, trace_file)
    return {"file": str(trace_file)} | trace_facts(run_trace)


def trace_until_closed(pipeline: "CallablePipeline", trace_file: Path, closing: ExitStack, *, quiet: bool) -> None:
    """Trace a pipeline from now on, and write the trace when `closing` is closed, or say why there is none."""
    from stagepack_loaders.run_trace import write_trace  # noqa: PLC0415 - after the arguments are checked

    traced = ExitStack()
    run_trace = traced.enter_context(pipeline.trace())

    def finish() -> None:
        try:
            traced.close()
        except StageLostError as error:
            click.echo(f"{trace_file}: not written: {error}", err=True)
            return
        write_trace(run_trace, trace_file)
        if not quiet:
            print_trace({"file": str(trace_file)} | trace_facts(run_trace))

    closing.callback(finish)


def print_trace(facts: Mapping[str, Any]) -> None:
    """Print for people what was traced; `facts` are those of `trace_facts`."""
    requests = count_of("request", facts["requests"])
    computing = [process for process in facts["processes"] if process["compute_share"]]
    busy = "; ".join(f"{process['name']}: {process['compute_share']:.0%}" for process in computing)
    print_line(f"traced {requests} in {facts['seconds']:.3f} s: wrote {facts['file']}")
    print_line(f"computing: {busy}; without work {facts['idle']:.0%} of the time")
