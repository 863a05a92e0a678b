"""Wrong usage ends with status 2 and a hint, before anything is read or imported; help is there for each command."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from stagepack.cli import main
from stagepack.format import limits
from stagepack_loaders.registry import runtime_names
from tests.hostile.attack import run

COMMANDS = main.list_commands(click.Context(main))
RUNTIMES = ", ".join(map(repr, ("auto", *runtime_names())))


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_lists_the_commands(flag: str) -> None:
    result = CliRunner().invoke(main, [flag])
    assert result.exit_code == 0
    assert all(f"\n  {command} " in result.output for command in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("verfy m", "No such command 'verfy'. Did you mean stagepack verify?"),
        ("asset add x", "add: name at least one FILE"),
        ("asset list x y", "list takes no FILE"),
        ("asset remove x y --overwrite", "--overwrite is for add"),
        ("export x", "Missing option '-o' / '--out'"),
        ("export x -o y --stages 0", "0 is not in the range 1<=x<=4096"),
        ("export x -o y --stages layer", "'layer' is neither a number nor 'layers'"),
        ("recut x -o y --stages layers --memory 1GiB", "--memory and --speed require a number of --stages"),
        ("export x -o y --stages layers --split-at a", "cannot be used together"),
        ("export x -o y --stages 2 --split-at a", "cannot be used together"),
        ("export x -o y --generate 5", "5 is not in the range x>=6"),
        ("serve --model-repository y --model-control always", "'always' is not one of"),
        ("load x --trace run.json --requests 0", "0 is not in the range"),
        ("profile x -o times.json --runs 0", "0 is not in the range"),
        (["plan", "x", "--stages", "9" * 30], "is not in the range"),
        (
            "export x.py:f -o y --graph-from z",
            "graph_from: expected a checkpoint, or a Hugging Face folder or name, found",
        ),
        (
            "export x -o y --graph-from z --strict",
            "graph_from: nothing is captured: leave out strict and allow_difference",
        ),
        ("export x -o y --generate 64 --part z", "generate: the inputs are made by the export"),
        ("load x --runtime tvm", f"'tvm' is not one of {RUNTIMES}"),
        ("sign x", "Missing option '--key'"),
        ("sign x --key y --certificate-chain z", "--certificate-chain requires --certificate"),
        ("verify x --runtime onnxruntime", "--runtime requires --run"),
        ("serve x --max-delay-ms nan", "nan is not a number"),
        ("serve x --max-value-bytes much", "expected a number of bytes such as 24GiB"),
        ("serve x --deadline-s inf", "inf is not in the range"),
        (["serve", "x", "--max-queue", str(2**31)], "is not in the range"),
        ("serve x --model-repository y", "cannot be used together"),
        ("serve --model-repository y --load-model z", "--load-model requires"),
        ("serve x --poll-s 5", "--poll-s requires --model-control poll"),
        ("serve x --exact --max-batch 8", "--exact cannot be used with --max-batch above 1"),
        (
            "serve x --exact --max-delay-ms 5",
            "--max-delay-ms has no effect with --exact, which batches no requests: leave it out",
        ),
        (
            "serve x --max-batch 1 --max-delay-ms 5",
            "--max-delay-ms has no effect with --max-batch 1, which batches no requests",
        ),
        ("serve --model-repository y --version-policy newest", "expected latest, latest:N, specific:N,N or all"),
        ("serve x --tls-key y", "--tls-certificate and --tls-key require each other"),
        ("serve x --tls-client-ca y", "--tls-client-ca requires --tls-certificate"),
        ("serve x --trace run.json", "--trace requires --processes, or torchrun"),
        ("serve x=a y=b --trace run.json --processes 2", "--trace is of one model"),
        ("triton x -o y --sequence-idle-s 1e30", "1e+30 is not in the range"),
        ("export x -o y --inputs a.py:f --input n=3", "--inputs and --input cannot be used together"),
        ("export x -o y --profile z", "--profile requires --stages"),
        ("recut x -o y --profile z", "--profile requires --stages"),
        ("recut x -o y --split-at a --profile z", "--profile requires --stages"),
        ("recut x -o y", "Missing a cut option"),
        (["recut", "x", "--stages", "2", "-o", ""], "Invalid value for '-o' / '--out': the path is empty"),
        ("plan x --memory 1GiB", "--memory requires --stages"),
        ("plan x --speed 1", "--speed requires --stages"),
        ("plan net.py:make --digest y", "--digest: expected a bundle, found the model net.py:make: leave it out"),
        ("plan BUNDLE --overwrite", "--overwrite requires --out"),
        ("plan BUNDLE --shared transmit", "--shared requires --stages or --split-at for a bundle"),
        ("recut BUNDLE -o out --shared replicate", "--shared requires --stages or --split-at for a bundle"),
        ("recut BUNDLE -o out --plan y --shared transmit", "--shared and --plan cannot be used together"),
        ("export x -o y --allow-ops z", "--allow-ops requires --graph-from"),
        ("export x -o y --generate-batch 8", "--generate-batch requires --generate"),
        ("export x -o y --rtol 1", "--rtol requires --onnx"),
        ("export x -o y --atol 0", "--atol requires --onnx"),
        ("doctor --time-limit 5", "--time-limit requires SOURCE"),
        ("doctor --input x=1", "are for a SOURCE"),
        ("inspect x --flat", "--flat requires --graph"),
        ("load x --requests 8", "--requests requires --trace"),
        ("load x --overwrite", "--overwrite requires --outputs or --trace"),
        ("load BUNDLE --stage 0 --rtol 1", "--rtol and --atol are for the results of the example"),
        ("load BUNDLE --inputs x --atol 1", "--rtol and --atol are for the results of the example"),
        ("verify x --rtol 0", "--rtol requires --run"),
        ("verify x --atol 0", "--atol requires --run"),
        ("verify x --allow-ops y", "--allow-ops requires --run"),
        ("verify x --run --rtol nan", "Invalid value for '--rtol': nan is not a number"),
        ("serve x --poll-s nan", "Invalid value for '--poll-s': nan is not a number"),
        ("verify x --import json", "--import requires --run"),
        ("serve x --overwrite", "--overwrite requires --trace"),
        ("serve x --max-restarts 0", "--max-restarts requires --processes"),
        ("serve x --version-policy all", "--version-policy requires --model-repository"),
        (["plan", "x", "--stages", str(limits.STAGES + 1)], "is not in the range"),
        ("plan BUNDLE --inputs x.py:f", "a bundle contains its example"),
        (["inspect", ""], "Invalid value for 'BUNDLE': the path is empty"),
        ("inspect x --graph --json", "--graph and --json cannot be used together"),
        ("triton BUNDLE -o out --backend onnxruntime", "requires --runtime onnxruntime"),
        (["load", "x", "--inputs", ""], "Invalid value for '--inputs': the path is empty"),
        ("load x --device meta", "tensors on the device meta have no data"),
        ("load BUNDLE --compiled x --runtime onnxruntime", "--compiled requires the runtime torch"),
        ("load BUNDLE --runtime onnxruntime --compile", "leave out --runtime"),
        ("load BUNDLE --stage 1 --inputs x", "leave out --stage"),
        ("load BUNDLE --stage 1 --outputs x", "leave out --stage"),
        ("load BUNDLE --stage 0 --trace x", "--trace runs the whole pipeline: leave out --stage"),
        ("load BUNDLE --stage 1 --device cpu --device cpu", "pass one --device"),
        ("load BUNDLE --stage 1 --runtime torch --runtime torch", "pass one --runtime"),
        (
            "load BUNDLE --runtime torch --runtime onnxruntime",
            "expected one runtime, or one for each of 3 stages, found 2",
        ),
        ("load BUNDLE --stream --processes 2", "--stream cannot be used with --processes or torchrun"),
        ("load BUNDLE --stage 0 --processes 2", "--stage cannot be used with --processes or torchrun"),
        ("load BUNDLE --device-memory 1GB --processes 2", "--device-memory cannot be used with --processes"),
        ("serve BUNDLE --device-memory 1GB --processes 2", "--device-memory cannot be used with --processes"),
        ("serve BUNDLE --device-memory 1GB --copy", "--device-memory cannot be used with --copy"),
        ("serve BUNDLE --compiled x --runtime onnxruntime", "--compiled requires the runtime torch"),
        ("serve BUNDLE more=BUNDLE --compiled x", "--compiled is the native code of one model"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_says_why(arguments: str | list[str], says: str, sound: Path) -> None:
    words = arguments.split() if isinstance(arguments, str) else arguments
    result = CliRunner().invoke(main, [word.replace("BUNDLE", str(sound)) for word in words])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(("Usage: ", "Error: "))
    assert says in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_an_empty_value_is_refused_by_name() -> None:
    """A variable of the shell that is not set is an empty word."""
    refused = 0
    for command in COMMANDS:
        parameters = main.get_command(click.Context(main), command).params  # type: ignore[union-attr]
        arguments = [parameter for parameter in parameters if isinstance(parameter, click.Argument)]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                continue
            words = [
                "" if argument is parameter else "add" if argument.name == "action" else "x" for argument in arguments
            ]
            words += [] if parameter in arguments else [parameter.opts[-1], ""]
            result = CliRunner().invoke(main, [command, *words])
            assert result.exit_code == 2, (command, words, result.stderr)
            assert "Invalid value for" in result.stderr, (command, words, result.stderr)
            refused += 1
    assert refused >= 165


@pytest.mark.parametrize("arguments", [["models"], ["--model-repository", "models"], ["models/tower"]])
def test_a_repository_for_triton_is_not_served(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tower").mkdir(parents=True)
    (tmp_path / "models" / "tower" / "config.pbtxt").write_text("# Written by stagepack.\n")
    result = run("serve", *arguments)
    assert result.exit_code == 2
    says = f"{arguments[-1]}: expected bundles, found a model repository for Triton: start 'tritonserver"
    assert says in result.stderr


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert CliRunner().invoke(main, ["--version"]).output.strip().endswith(version("stagepack"))


def test_an_option_that_is_for_another_one_is_refused_without_it() -> None:
    """The help says of each such option what it is for, such as "With --graph"."""
    refused = []
    for command in COMMANDS:
        parameters = main.get_command(click.Context(main), command).params  # type: ignore[union-attr]
        required = [
            word
            for parameter in parameters
            if parameter.required and parameter.opts[-1].startswith("-")
            for word in (parameter.opts[-1], "y")
        ]
        for option in parameters:
            help_text = str(getattr(option, "help", ""))
            if not help_text.startswith("With --") or help_text.startswith(f"With {option.opts[-1]},"):
                continue
            value = option.type.choices[0] if isinstance(option.type, click.Choice) else "1"
            words = [option.opts[-1], *([] if getattr(option, "is_flag", False) else [value])]
            result = CliRunner().invoke(main, [command, "x", *required, *words])
            assert result.exit_code == 2, words
            assert " require" in result.stderr, (command, words, result.stderr)
            refused.append(option.opts[-1])
    assert len(refused) >= 9, refused
