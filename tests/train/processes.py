"""Processes that train, as torchrun starts them."""

import os
import socket
import subprocess
import sys


def run_workers(module: str, process_count: int, *arguments: object) -> None:
    """Run a module in some processes, with arguments."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(process_count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=environment | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(process_count)
    ]
    outputs = [worker.communicate(timeout=300)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * process_count, "\n".join(outputs)
