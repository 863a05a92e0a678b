"""The example that learns by rewards, against a server of two processes that takes each of its steps as a delta."""

import inspect
import re
import textwrap
from pathlib import Path

import pytest

import stagepack
from stagepack.examples import policy
from tests.serve.servers import stagepack_server

STEPS = 18


@pytest.mark.process
@pytest.mark.xdist_group("distributed")
def test_each_step_is_answered_by_its_own_weights_and_rewards_rise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More steps than a chain has; the example compares the version and the bits of the answers."""
    call = policy.inputs()
    bundle = stagepack.export(
        policy.make(), call.args, dynamic_shapes=call.dynamic_shapes, out=tmp_path / "policy.stagepack", stages=2
    )
    folder = tmp_path / "deltas"
    folder.mkdir()
    options = ("--processes", "2", "--update-folder", str(folder), "--model-control", "explicit")
    with stagepack_server([bundle.path], *options) as server:
        model = policy.Server(f"127.0.0.1:{server.http}", "policy")
        rewards = policy.train_policy(bundle.path, folder, model, STEPS)
        with pytest.raises(
            RuntimeError, match="expected the answer of the version step-0, found another one, of step-17"
        ):
            policy.check(model, "step-0", policy.make(), policy.inputs().args[0])
        assert server.stop() == 0
    assert STEPS > policy.CHAIN
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.6
    assert [path.name for path in sorted(folder.glob("*.stagepack"))] == [f"step-{policy.CHAIN - 1}.stagepack"]
    assert capsys.readouterr().out.startswith("step-7: mean reward 0.")


def test_the_loop_of_the_page_is_that_of_the_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "ship-each-step.md").read_text()
    [shown] = re.findall(r"<!-- not run: a part of stagepack.examples.policy -->\n```python\n(.*?)```", page, re.DOTALL)
    assert textwrap.indent(shown, " " * 8) in inspect.getsource(policy.train_policy)
