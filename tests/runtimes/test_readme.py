"""The runtime in ``loaders/README.md`` is a whole one: its code runs as it is printed there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_runtime_of_the_readme_works(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "loaders" / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "tiny_runtime.py").write_text(blocks[0])
    (tmp_path / "use.py").write_text("from tiny_runtime import *\n" + "".join(blocks[1:]))
    done = subprocess.run([sys.executable, tmp_path / "use.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "(array([[ 3.,  6., 12.]], dtype=float32),)\n"
    bundle = ROOT / "schema" / "vectors" / "bundle" / "tiny.stagepack"
    arguments = ["load", str(bundle), "--import", "tiny_runtime", "--runtime", "tiny"]
    code = "from stagepack.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.count(" tiny     cpu ") == 2
    assert "torch" not in done.stdout


def test_every_module_is_in_the_table_of_the_readme() -> None:
    text = (ROOT / "loaders" / "README.md").read_text()
    folder = ROOT / "loaders" / "stagepack_loaders"
    modules = [path.name for path in folder.glob("*.py") if not path.name.startswith("_")]
    assert [name for name in modules if f"\n      {name} " not in text] == []
