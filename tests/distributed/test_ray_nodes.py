"""Ray actors on other nodes than the front: the processes listen at the addresses of their nodes, and survive the loss of a node."""

import pytest

from stagepack.format.reader import Bundle
from tests.distributed.bundles import run_python

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

# Two nodes of Ray on this machine, in a process of its own: `Cluster` and `ray.init` of one process exclude each other.
SCRIPT = """
import sys, time
import ray, torch, stagepack
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
node = cluster.add_node(num_cpus=2)
ray.init(cluster.address, log_to_driver=False)
ids = torch.arange(6)
expected = stagepack.load(sys.argv[1])(ids)
with stagepack.ray.launch(sys.argv[1], 2, max_restarts=1) as pipeline:
    assert torch.equal(pipeline(ids), expected)
    options = pipeline.executor.front._membership.options
    assert not options.is_local
    assert options.address == ray.util.get_node_ip_address()
    cluster.remove_node(node)
    try:
        while True:
            pipeline(ids)
    except stagepack.errors.StageLostError as error:
        print(error)
    cluster.add_node(num_cpus=2)
    deadline = time.monotonic() + 60
    while pipeline.restart_count == 0:
        assert time.monotonic() < deadline, pipeline.lost
        time.sleep(0.1)
    assert torch.equal(pipeline(ids), expected)
    print("equal")
ray.shutdown()
cluster.shutdown()
"""


def test_actors_of_another_node_and_its_loss(layers: Bundle) -> None:
    finished = run_python("-c", SCRIPT, str(layers.path), seconds=200)
    assert finished.returncode == 0, finished.stderr
    lost_text, equal_text = finished.stdout.splitlines()[-2:]
    assert "is lost: its actor died" in lost_text
    assert equal_text == "equal"
