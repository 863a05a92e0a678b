"""Processes that train, as torchrun starts them."""

import os
import socket
import subprocess
import sys


def start_workers(module: str, process_count: int, *arguments: object) -> list[subprocess.Popen[str]]:
    """Start a module in some processes, with arguments; both outputs of each go to one pipe."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(process_count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(process_count)
    ]


def run_workers(module: str, process_count: int, *arguments: object) -> None:
    """Run a module in some processes, with arguments."""
    workers = start_workers(module, process_count, *arguments)
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * process_count, "\n".join(outputs)
