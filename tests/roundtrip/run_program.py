"""Call a ``.pt2`` file in a fresh process: ``python run_program.py FOLDER``.

The process imports torch and nothing else. It calls ``m.pt2`` with its own example inputs, in which the leaves of ``inputs-0.safetensors``
and so on take the place of those with their numbers, and prints whether each answer is ``expected-0.safetensors`` and so on, bit for bit.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.utils import _pytree as pytree


def main(folder: Path) -> None:
    """Call the program with all inputs."""
    program = torch.export.load(folder / "m.pt2")
    assert program.example_inputs is not None
    leaves, spec = pytree.tree_flatten(program.example_inputs)
    module = program.module()
    for number, path in enumerate(sorted(folder.glob("inputs-*.safetensors"))):
        given = load_file(path)
        args, kwargs = pytree.tree_unflatten([given.get(str(index), leaf) for index, leaf in enumerate(leaves)], spec)
        torch.manual_seed(0)
        with torch.no_grad():
            answer = pytree.tree_leaves(module(*args, **kwargs))
        wanted = load_file(folder / f"expected-{number}.safetensors")
        is_right = all(
            torch.allclose(answer[int(index)], leaf, rtol=0, atol=0, equal_nan=True) for index, leaf in wanted.items()
        )
        sys.stdout.write("right\n" if is_right else "wrong\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
