"""The memory that launchers reserve for a process covers what it uses, and says what it counts."""

from pathlib import Path

import pytest

from stagepack.format.graph import value_bytes
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.process_memory import estimate_memory
from tests.distributed.bundles import in_processes, process_ids


def test_it_counts_weights_activations_buffers_and_state(layers: Bundle, counting: Bundle) -> None:
    (symbol,) = layers.entry_point.symbols
    alone = estimate_memory(layers, (1, 2, 3), 2)
    assert alone.weights == layers.stages[1].weight_bytes
    assert alone.state == 0
    received = [edge for edge in layers.edges if edge.producer in (None, 0) and 1 in edge.consumers]
    assert alone.buffers == 16 * sum(value_bytes(edge, {symbol.name: 5}) for edge in received)
    assert alone.total == alone.weights + alone.activations + alone.buffers + alone.process

    larger = estimate_memory(layers, (1, 2, 3), 2, sizes={symbol.name: 500}, in_flight=1)
    assert larger.activations == 100 * alone.activations
    assert larger.buffers == 100 * alone.buffers / 16

    both = estimate_memory(layers, (1, 1, 2), 1)
    assert both.weights == layers.stages[0].weight_bytes + layers.stages[1].weight_bytes

    # `Counting` has two buffers of four float32, one in each stage.
    assert estimate_memory(counting, (1, 2), 1, sequences=3).state == 3 * 16


def test_another_device_has_the_weights_and_the_activations(layers: Bundle) -> None:
    on_gpu = estimate_memory(layers, (1, 1, 2), 1, devices=["cuda"])
    on_cpu = estimate_memory(layers, (1, 1, 2), 1)
    assert on_gpu.weights == max(stage.weight_bytes for stage in layers.stages[:2])
    assert (on_gpu.activations, on_gpu.state) == (0, 0)
    assert on_gpu.process > on_cpu.process


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from Linux")
def test_a_process_uses_less(layers: Bundle) -> None:
    estimated = {rank: estimate_memory(layers, (1, 2, 3), rank).total for rank in (1, 2, 3)}
    with in_processes(layers) as pipeline:
        for rank, number in process_ids(pipeline).items():
            lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
            (resident,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
            assert resident < estimated[rank]
