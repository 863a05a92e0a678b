"""`stagepack bench`."""

import asyncio
import contextlib
import json
import resource
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from stagepack.cli.command import argument, flag, option_object, subcommand
from stagepack.cli.failures import fail
from stagepack.cli.model_loading import bundle_paths_by_name
from stagepack.cli.output import count_of, format_time, print_json, print_line, print_table, progress
from stagepack.cli.shared_flags import JSON, Amount, Count, require_packages
from stagepack.cli.termination import orderly_termination
from stagepack.opening import open_bundle
from stagepack.remote.url import WEB_SCHEMES
from stagepack_loaders.python_process import kept_signal_handlers, module_command, module_environment

if TYPE_CHECKING:
    from stagepack_serving.bench.http_client import ServerUrl
    from stagepack_serving.bench.load_generator import LoadOptions
    from stagepack_serving.bench.request_source import DrawOptions

_PICOSECONDS = 1e12  # in a second
_PATIENCE_SECONDS = 60.0
_MOST_UNDER_WAY = 4096


class _Shape(click.ParamType[tuple[str, tuple[int, ...]]]):
    """The sizes of an input, such as ``input_ids=1,128``."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name of the input and its sizes."""
        input_name, _, sizes = value.rpartition("=")
        try:
            shape = tuple(int(size) for size in sizes.split(","))
        except ValueError:
            shape = ()
        if not input_name or not shape or min(shape) < 0:
            self.fail(f"expected NAME=SIZE,SIZE such as input_ids=1,128, found {value!r}.", param, ctx)
        return input_name, shape


@option_object
class _Options:
    source: str = argument("URL|BUNDLE")
    serve_arguments: tuple[str, ...] = argument("[-- SERVE_OPTION...]", required=False)
    model: str | None = flag("--model NAME", "Model to ask.", default_text="the only one of the server")
    api: Literal["infer", "completions", "chat"] | None = flag(
        "--api",
        "What is asked: inferences over REST, or texts over OpenAI's API, which come as streams.",
        default_text="completions if the server says that the model writes texts, else infer",
    )
    requests_file: Path | None = flag(
        "--requests FILE",
        "Send these requests in turn: a file with the JSON of a request on each line, with the fields of /v2/models/NAME/infer, "
        "/v1/completions or /v1/chat/completions.",
        default_text="drawn from what the server says of the model",
    )
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = flag(
        "--shape NAME=SIZES",
        "Sizes of an input whose shape is dynamic, such as input_ids=1,128. Repeatable.",
        default_text="1 for each dynamic size",
        type=_Shape(),
    )
    prompt_tokens: int = flag("--prompt-tokens N", "Tokens of a drawn prompt.", type=Count(), default=64)
    output_tokens: int = flag("--output-tokens N", "Most tokens of a text that is drawn.", type=Count(), default=32)
    clients: int | None = flag(
        "--clients N",
        "Closed loop: clients that each send a request when they have the answer to the one before. With --rate: the largest number of "
        "requests under way.",
        default_text=f"1, with --rate {_MOST_UNDER_WAY}",
        type=Count(),
    )
    rate: float | None = flag(
        "--rate R",
        "Open loop: send R requests a second, whatever became of those before. Latencies count from the time at which a request was to be "
        "sent.",
        default_text="closed loop",
        type=click.FloatRange(min=0, min_open=True),
    )
    arrivals: Literal["poisson", "constant"] = flag(
        "--arrivals",
        "With --rate: whether intervals are drawn, as those of independent users, or equal.",
        default="poisson",
    )
    seconds: float = flag("--seconds S", "How long is measured.", type=Amount(minimum=0.1), default=10)
    warmup: float = flag("--warmup-s S", "How long requests are sent before that.", type=Amount(), default=1)
    deadline: float | None = flag(
        "--deadline-ms MS",
        "Goodput: count the answers that came in this time.",
        default_text="every answer counts",
        type=Amount(minimum=1e-3, unit=1e-3),
    )
    retries: int = flag(
        "--retry N",
        "How often a client asks again after it has given up, has lost its connection, or was told that the server is busy; then it "
        "waits as long as Retry-After says.",
        type=click.IntRange(0),
        default=0,
    )
    timeout: float | None = flag(
        "--timeout-s S",
        "When a client gives up a request, and closes its connection.",
        default_text="the deadline with --retry, else 60",
        type=Amount(minimum=1e-3),
    )
    tells_timeout: bool = flag(
        "--send-timeout", "Tell the server in drawn inferences when the client gives up, by the parameter 'timeout'."
    )
    token_file: Path | None = flag(
        "--token-file FILE",
        "File whose first token requests have, as --token-file of stagepack serve reads it.",
        default_text="no token",
    )
    authority_file: Path | None = flag(
        "--tls-ca FILE",
        "PEM file with the authorities that may sign the certificate of the server.",
        default_text="those of this machine",
    )
    seed: int = flag("--seed N", "Seed of what is drawn.", type=click.IntRange(0), default=0)
    as_json: bool = JSON

    @property
    def given_up_after(self) -> float:
        """The seconds after which a client gives up."""
        return self.timeout or (self.deadline if self.deadline and self.retries else _PATIENCE_SECONDS)

    def load_options(self) -> "LoadOptions":
        """Return what the clients do."""
        from stagepack_serving.bench.load_generator import LoadOptions  # noqa: PLC0415 - after the arguments are checked

        return LoadOptions(
            clients=self.clients or (1 if self.rate is None else _MOST_UNDER_WAY),
            rate=self.rate,
            is_poisson=self.arrivals == "poisson",
            seconds=self.seconds,
            warmup=self.warmup,
            deadline=self.deadline,
            timeout=self.given_up_after,
            retries=self.retries,
            seed=self.seed,
        )

    def draw_options(self) -> "DrawOptions":
        """Return how requests are drawn."""
        from stagepack_serving.bench.request_source import DrawOptions  # noqa: PLC0415 - after the arguments are checked

        return DrawOptions(
            model=self.model,
            api=self.api,
            shapes=dict(self.shapes),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            timeout=self.given_up_after if self.tells_timeout else None,
            seed=self.seed,
        )


@subcommand(
    "bench",
    examples=[
        "stagepack bench net.stagepack --clients 8",
        "stagepack bench net.stagepack --clients 8 -- --max-batch 64 --processes 2",
        "stagepack bench http://server:8000 --rate 200 --deadline-ms 100",
        "stagepack bench http://server:8000 --rate 900 --deadline-ms 500 --retry 3",
        "stagepack bench llama.stagepack --prompt-tokens 512 --output-tokens 64",
    ],
)
def command(options: _Options) -> None:
    """Measure how fast a server answers.

    SOURCE is the URL of a server, or a bundle, for which 'stagepack serve' is started with the options after '--'. Of a server of
    another kind, OpenAI's API or that of the Open Inference Protocol is measured. Counts and latencies are of the requests that were to be
    sent in the time that is measured; rates count what ended in it. An answer counts if it has the status 200 and is whole.
    """
    # Each request under way has a connection.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    is_server = options.source.partition("://")[0].lower() in WEB_SCHEMES
    if options.serve_arguments and not options.serve_arguments[0].startswith("-"):
        raise click.UsageError(f"Got unexpected extra argument ({options.serve_arguments[0]})")
    if is_server and options.serve_arguments:
        raise click.UsageError(
            f"{options.source} is a server: options after '--' are those of one that is started for a bundle"
        )
    require_packages([] if is_server else [options.source], "serve")
    if not is_server:  # the server would say what is wrong, and this command that it has ended
        [bundle_path] = bundle_paths_by_name((options.source,)).values()
        open_bundle(bundle_path)
    from stagepack_serving.bench.http_client import ServerUrl  # noqa: PLC0415 - after the arguments are checked

    with orderly_termination(), contextlib.ExitStack() as closing:
        url = (
            options.source if is_server else closing.enter_context(_own_server(options.source, options.serve_arguments))
        )
        token = None if options.token_file is None else _read_token(options.token_file)
        authority_file = None if options.authority_file is None else str(options.authority_file)
        facts = {"server": url} | _measure(ServerUrl.parse(url, token, authority_file), options)
    if options.as_json:
        print_json(facts)
    else:
        _print_facts(facts)


def _read_token(path: Path) -> str:
    """Return the first token of a file; its other lines are empty, or start with '#'."""
    lines = (line.strip() for line in path.read_text("latin-1").splitlines())
    token = next((line for line in lines if line and not line.startswith("#")), "")
    if not token.isascii() or not token.isprintable() or not token:
        fail(f"{path}: expected a token on a line, in ASCII, found none")
    return token


@contextlib.contextmanager
def _own_server(bundle: str, serve_arguments: Sequence[str]) -> Iterator[str]:
    """Start a server for a bundle; yield its URL."""
    defaults = ("--http-port", "0", "--grpc-port", "0", "--linger-s", "0", "--log-level", "warning")
    command_line = module_command("stagepack", "serve", bundle, *defaults, *serve_arguments, "--json")
    with subprocess.Popen(  # noqa: S603 - this program
        command_line, env=module_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            with progress("starting the server"):
                facts = _read_facts(process)
            host = f"[{facts['host']}]" if ":" in facts["host"] else facts["host"]
            yield f"http://{host}:{facts['http_port']}"
        finally:
            process.terminate()
            process.wait()  # the end of the context does not, after an interrupt


def _read_facts(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the server prints when it accepts requests."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or lines[-1] != "}\n":
        lines.append(process.stdout.readline())
        if not lines[-1]:
            fail(f"the server that was started for the bundle has ended with the exit status {process.wait()}")
    facts: dict[str, Any] = json.loads("".join(lines))
    return facts


def _measure(url: "ServerUrl", options: _Options) -> dict[str, Any]:
    """Measure a server."""
    import uvloop  # noqa: PLC0415 - after the arguments are checked

    from stagepack_serving.bench import request_source  # noqa: PLC0415 - after the arguments are checked
    from stagepack_serving.bench.http_client import http_client  # noqa: PLC0415 - the same
    from stagepack_serving.bench.load_generator import measurement_facts, run_load  # noqa: PLC0415 - the same

    async def measure() -> dict[str, Any]:
        async with http_client(url) as client:
            if options.requests_file is None:
                source = await request_source.draw_requests(client, url, options.draw_options())
            else:
                source = request_source.read_requests(options.requests_file, url, options.model)
            await request_source.check_requests(client, source)
            load_options = options.load_options()
            record = await run_load(client, source, load_options)
            return measurement_facts(record, source, load_options)

    async def measure_until_stopped() -> dict[str, Any]:
        measuring = asyncio.ensure_future(measure())

        def stop(stop_signal: signal.Signals) -> None:
            received_signals.append(stop_signal)
            measuring.cancel()

        for stop_signal in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(stop_signal, stop, stop_signal)
        return await measuring

    # What a handler of Python raises in a callback of the event loop, that drops.
    received_signals: list[signal.Signals] = []
    try:
        with progress(f"measuring {options.seconds:g} s"), kept_signal_handlers():
            return uvloop.run(measure_until_stopped())
    finally:
        for stop_signal in received_signals:
            signal.raise_signal(stop_signal)


def _print_facts(facts: dict[str, Any]) -> None:
    """Print what was measured as tables."""
    loop = (
        count_of("client", facts["clients"])
        if facts["rate"] is None
        else f"{facts['rate']:g} requests a second, {'drawn' if facts['is_poisson'] else 'equal'} intervals"
    )
    print_line(
        f"{facts['model']} ({facts['api']}) at {facts['server']}: {facts['loop']} loop, {loop}, {facts['seconds']:g} s"
    )
    outcome_rows = [
        [outcome, str(count), f"{count / facts['requests']:.1%}"] for outcome, count in facts["outcomes"].items()
    ]
    print_table("answers", ["status", "#requests", "#share"], outcome_rows)
    print_table("rates", ["of", "#in a second"], _rate_rows(facts))
    text = facts["text"] or {}
    timed = {"latency": facts["latency"], **{name: text.get(name) for name in ("ttft", "tpot", "itl")}}
    rows = [[name, *_time_cells(summary)] for name, summary in timed.items() if summary is not None]
    if rows:
        columns = [f"#{column_name}" for column_name in next(filter(None, timed.values()))]
        print_table("times", ["of", *columns], rows)
    client = facts["client"]
    waiting = "" if client["waiting"] is None else f", waited for one for {client['waiting']:.0%} of the time"
    late = "" if client["late"] is None else f", sent 99 % of requests at most {_time_text(client['late']['p99'])} late"
    print_line(f"client: busy {client['busy']:.0%} of a processor{waiting}{late}")
    if client["is_bottleneck"]:
        print_line("warning: the client had too little of a processor: the server may be faster than what is shown")


def _rate_rows(facts: dict[str, Any]) -> list[list[str]]:
    rows = [["answers", f"{facts['throughput']:.1f}"]]
    if facts["deadline"] is not None:
        rows.append([f"answers within {_time_text(facts['deadline'])}", f"{facts['goodput']:.1f}"])
    if facts["text"] is not None:
        rows.append(["tokens of answers", f"{facts['text']['output_tokens_per_second']:.1f}"])
        rows.append(["tokens of prompts", f"{facts['text']['prompt_tokens_per_second']:.1f}"])
    return rows


def _time_cells(summary: dict[str, float]) -> list[str]:
    return [_time_text(seconds) for seconds in summary.values()]


def _time_text(seconds: float) -> str:
    return format_time(seconds * _PICOSECONDS)
