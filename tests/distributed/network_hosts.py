"""Hosts that share no network but one link each to a switch: network namespaces of Linux, with names and addresses of their own.

As on Debian, the name of a host stands for a loopback address in its own ``/etc/hosts``; no host can resolve the name of another one.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_PROGRAMS = ("ip", "unshare", "hostname")
_INTERFACE = "link0"
_WITH_HOST_NAME = 'hostname "$1" && shift && exec "$@"'


@dataclass(frozen=True, slots=True)
class NetworkHost:
    """A host.

    Attributes:
        name: its host name.
        address: its address on the link.
        namespace: the name of its network namespace.
    """

    name: str
    address: str
    namespace: str

    def start(
        self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start a program on this host, in a process group of its own. Its process number is that of the program."""
        namespace = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        prefix = [*namespace, "sh", "-c", _WITH_HOST_NAME, "sh", self.name]
        return subprocess.Popen(
            [*prefix, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=_base_environment() | dict(environment or {}),
        )

    def cut_link(self) -> None:
        _run_ip("-n", self.namespace, "link", "set", _INTERFACE, "down")

    def process_ids(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return list(map(int, listed.stdout.split()))

    def kill_processes(self) -> None:
        for process_id in self.process_ids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)


@contextlib.contextmanager
def network_hosts(count: int) -> Iterator[list[NetworkHost]]:
    """Make hosts, and remove them with all their processes. Skips the test where that is not allowed."""
    if reason := _why_no_hosts():
        pytest.skip(reason)
    prefix = f"stagepack-{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts = [
        NetworkHost(f"stagehost-{number}", f"10.77.0.{number + 1}", f"{prefix}-{number}") for number in range(count)
    ]
    _remove_namespaces_of_ended_runs()
    try:
        _run_ip("netns", "add", switch)
        _run_ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run_ip("-n", switch, "link", "set", "bridge0", "up")
        for number, host in enumerate(hosts):
            _add_host(host, switch, f"port{number}")
        yield hosts
    finally:
        for host in hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                host.kill_processes()
        for namespace in (*(host.namespace for host in hosts), switch):
            _remove_namespace(namespace)


def _remove_namespaces_of_ended_runs() -> None:
    """Remove what tests that were killed have left."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    for run_id, namespace in re.findall(r"^((?:stagepack-)\d+)(-\w+)", listed.stdout, re.MULTILINE):
        if not Path("/proc", run_id.removeprefix("stagepack-")).exists():
            _remove_namespace(run_id + namespace)


def _remove_namespace(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
    shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)


def _why_no_hosts() -> str:
    """Why network namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "no network namespaces: the tests do not run as root"
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"no network namespaces: this machine lacks {', '.join(missing)}"
    probe = f"stagepack-{os.getpid()}-probe"
    added = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return "" if added.returncode == 0 else f"no network namespaces: {added.stderr.strip()}"


def _add_host(host: NetworkHost, switch: str, port: str) -> None:
    """Make a host and plug it into the switch. ``ip netns exec`` shows the files of ``/etc/netns/NAMESPACE`` in ``/etc``."""
    folder = Path("/etc/netns") / host.namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
    _run_ip("netns", "add", host.namespace)
    _run_ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", _INTERFACE, "netns", host.namespace)
    _run_ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
    _run_ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", _INTERFACE)
    for interface in ("lo", _INTERFACE):
        _run_ip("-n", host.namespace, "link", "set", interface, "up")


def _run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


def _base_environment() -> dict[str, str]:
    """The environment, with this tree for Python and without what a launcher has set."""
    removed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return kept | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder), "OMP_NUM_THREADS": "1"}
