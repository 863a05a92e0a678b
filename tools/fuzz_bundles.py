"""Change bundles at random, and do with each all that users do: ``python -m tools.fuzz_bundles --cases 1000``.

The structure of one file of a bundle is changed, or one statement of several that must agree, and the digests are made right, so that the
checks behind the digests are reached. All roads to an answer must then give the same one, or refuse the bundle (``tests.fuzz.roads``).
Prints how the actions ended, by kind, and one line for each distinct finding: anything but an end in order or a typed error. The exit
status is 1 if there are findings. ``--only MODEL:SEED`` repeats a case.
"""

import argparse
import contextlib
import functools
import importlib
import os
import pkgutil
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}  # forked processes must not wait for threads that they do not have

import torch

import stagepack
import stagepack.cli
from stagepack.roads.onnx.conversion import convert_stage
from stagepack.torch_internals import onnx_functions_read_once
from stagepack_loaders.example import read_example
from tests.bundle_editor import MANIFEST_NAME, BundleEditor
from tests.fuzz.actions import ACTIONS, Case, Outcome, run_apart
from tests.fuzz.mutation import mutate_alike, mutate_file, operators_of
from tests.fuzz.statements import change_statements

FROZEN = Path("schema/frozen/1.0")
# Models of the zoo that together have every kind of content that a bundle may have, and frozen bundles, which have ONNX models.
MODELS = (
    "frozen-counting",
    "frozen-tower",
    "containers-containers",
    "containers-dicts-with-odd-keys",
    "aliasing-inputs-written",
    "aliasing-views-of-views-written",
    "operators-draws-of-every-kind",
    "operators-factories-with-a-device",
    "operators-text-arguments",
    "operators-recurrent-layers",
    "operators-int8-weights",
    "regions-no-grad-in-autocast-in-no-grad",
    "regions-branches-and-loops",
    "regions-scan",
    "regions-map-over-rows",
    "regions-invoke-subgraph",
    "regions-flex-attention",
    "shapes-arithmetic-on-sizes",
    "shapes-nonzero",
    "shapes-strided-convolutions",
    "state-batch-norm-that-trains",
    "state-caches-of-several-layers",
    "values-odd-constants",
    "values-lazy-conjugates-cross",
    "weights-views-of-one-storage",
    "weights-more-dtypes",
    "decoders-llama-tied",
    "vision-resnet",
    "onnx-aliasing-inputs-written",
    "onnx-shapes-strided-convolutions",
    "onnx-state-caches-of-several-layers",
)
FINDINGS = ("exception", "lie", "signal", "hang", "memory")


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    parser.add_argument("--only", metavar="MODEL:SEED", help="run one case, and print all outcomes")
    parser.add_argument("--bundles", type=Path, default=Path("build/fuzz/bundles"), help="where the bundles are kept")
    parser.add_argument("--models", nargs="+", default=MODELS, help="of the zoo, or frozen-NAME")
    parser.add_argument(
        "--without",
        nargs="+",
        choices=ACTIONS,
        default=(),
        help="actions to leave out: onnx takes up to 10 s, compile 50 s",
    )
    parser.add_argument("--actions", nargs="+", choices=ACTIONS, default=ACTIONS, help="actions; all by default")
    options = parser.parse_args()
    chosen_names = [action_name for action_name in options.actions if action_name not in options.without]
    actions = {action_name: ACTIONS[action_name] for action_name in chosen_names}
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ends the campaign, in the background too
    write_bundles(options.bundles, options.models)
    import_commands()
    with onnx_functions_read_once():
        convert_stage(
            stagepack.open(FROZEN / "tower.stagepack"), 0, ()
        )  # so that forked processes need not read the functions
        sys.exit(run(options, actions))


def run(options: argparse.Namespace, actions: Mapping[str, Callable[[Case, Path], str | None]]) -> int:
    """Run a case or the campaign; return the exit status."""
    originals = {model: original(options.bundles / f"{model}.stagepack") for model in options.models}
    if options.only:
        model, seed = options.only.rsplit(":", 1)
        shutil.rmtree(kept := Path("build/fuzz/case"), ignore_errors=True)
        change_bundle(originals[model], int(seed), kept)
        for _, action, outcome in run_cases(originals, [(model, int(seed))], actions):
            print(f"{action:18} {outcome.kind:10} {outcome.detail}")
        return 0
    return run_campaign(originals, actions, range(options.seed, options.seed + options.cases), options.seconds)


def import_commands() -> None:
    """Import what the commands import, so that forked processes need not."""
    for module in pkgutil.iter_modules(stagepack.cli.__path__):
        importlib.import_module(f"stagepack.cli.{module.name}")
    for package_name in ("stagepack.roads.onnx", "stagepack.remote", "stagepack_loaders.onnxruntime"):
        for module in pkgutil.walk_packages(importlib.import_module(package_name).__path__, f"{package_name}."):
            importlib.import_module(module.name)
    for module_name in ("stagepack_serving.triton.repository", "torch._dynamo"):
        importlib.import_module(module_name)


def write_bundles(folder: Path, models: list[str]) -> None:
    """Export the models that are not in a folder, each in three stages, in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        path = folder / f"{model}.stagepack"
        if path.exists():
            continue
        if model.startswith("frozen-"):
            shutil.copytree(FROZEN / path.name.removeprefix("frozen-"), path)
        elif model.startswith("onnx-"):
            shutil.copytree(folder / path.name.removeprefix("onnx-"), path)
            subprocess.run([sys.executable, "-m", "stagepack", "onnx", str(path)], check=True)
        else:
            subprocess.run([sys.executable, "-m", "tools.fuzz_bundle_export", model, str(path)], check=True)


def original(path: Path) -> Case:
    """A bundle that was not changed, with its example."""
    bundle = stagepack.open(path)
    inputs = {}
    for entry_point in bundle.entry_points:
        selected = bundle.select(entry_point.name)
        inputs[entry_point.name] = read_example(stagepack.load(selected))[0]
    return Case(path, path, inputs)


def run_campaign(
    originals: Mapping[str, Case],
    actions: Mapping[str, Callable[[Case, Path], str | None]],
    seeds: range,
    seconds: float,
) -> int:
    """Run cases, print the findings; return the exit status."""
    counts: Counter[str] = Counter()
    seen: Counter[tuple[str, str]] = Counter()
    roads: Counter[str] = Counter()
    digests: set[str] = set()
    start = time.monotonic()
    names = list(originals)
    cases = [(names[seed % len(names)], seed) for seed in seeds]
    with contextlib.suppress(KeyboardInterrupt):
        for (model, seed), action, outcome in run_cases(originals, cases, actions):
            if action == "change":
                digests.add(outcome.detail)
                if time.monotonic() - start > seconds:
                    break
                continue
            counts[outcome.kind] += 1
            if outcome.kind == "ok" and outcome.detail:
                roads.update(outcome.detail.split(", "))
            if outcome.kind in FINDINGS:
                finding = (outcome.kind, _summary(outcome))
                seen[finding] += 1
                if seen[finding] == 1:
                    print(f"{outcome.kind}: {model}:{seed} {action}: {outcome.detail}", flush=True)
    print(f"{len(digests)} bundles, {counts.total()} actions in {time.monotonic() - start:.0f} s")
    for kind, count in (*counts.most_common(), *sorted(roads.items())):
        print(f"{kind:30} {count:7,}")
    for (kind, summary), count in seen.most_common():
        print(f"{count:6} {kind}: {summary}")
    return bool(seen)


def _summary(outcome: Outcome) -> str:
    """The detail without what differs from case to case: for an exception its type and line."""
    if outcome.kind == "exception":
        return outcome.detail.split(":")[0] + outcome.detail[outcome.detail.rfind("(") :]
    if outcome.kind == "lie":
        return ": ".join(outcome.detail.split(": ")[:2])
    return outcome.detail


def run_cases(
    originals: Mapping[str, Case],
    cases: Sequence[tuple[str, int]],
    actions: Mapping[str, Callable[[Case, Path], str | None]],
) -> Iterator[tuple[tuple[str, int], str, Outcome]]:
    """Change bundles, each by a model and a seed, and yield how the change and each action on it ended."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.lru_cache(maxsize=1)  # of the process that acts on it
        def changed(model: str, seed: int) -> Case:
            shutil.rmtree(path := Path(folder) / "changed.stagepack", ignore_errors=True)
            return change_bundle(originals[model], seed, path)

        def act(model: str, seed: int, action: str, scratch: Path) -> str | None:
            case = changed(model, seed)
            return case.digest if action == "change" else actions[action](case, scratch)

        jobs = [(*case, action) for case in cases for action in ("change", *actions)]
        outcomes = run_apart([(job[2], functools.partial(act, *job)) for job in jobs])
        for (model, seed, action), outcome in zip(jobs, outcomes, strict=False):
            yield (model, seed), action, outcome


def change_bundle(case: Case, seed: int, path: Path) -> Case:
    """Write a changed bundle."""
    generator = random.Random(f"{case.original.name} {seed}")  # noqa: S311 - repeatable
    editor = BundleEditor.copy(case.original, path)
    original_manifest = (path / MANIFEST_NAME).read_bytes()
    while (path / MANIFEST_NAME).read_bytes() == original_manifest:  # some changes find nothing to change
        # Half of the cases change what must agree with something else, the others the form of one file.
        if generator.random() < 0.5:
            change_statements(editor, generator)
        else:
            _change_file(editor, case, generator)
    return Case(path, case.original, case.inputs)


def _change_file(editor: BundleEditor, case: Case, generator: random.Random) -> None:
    """Change the structure of one file."""
    file_names = [
        file.name
        for file in sorted(editor.path.iterdir())
        if file.suffix in (".msgpack", ".safetensors", ".onnx", ".index.json")
    ]
    onnx_names, graph_names = ([name for name in file_names if name.endswith(end)] for end in (".onnx", ".msgpack"))
    chance = generator.random()
    chosen = graph_names if chance < 0.6 else onnx_names if chance < 0.75 else []
    file_name = generator.choice(chosen or ["manifest.json", *file_names])
    operators = operators_of(case.original)
    alike = generator.random() < 0.8
    change_one = functools.partial(mutate_alike, generator=generator, operators=operators) if alike else None
    mutate_file(editor, file_name, generator, change_one)


if __name__ == "__main__":
    main()
