"""Networks: this machine's loopback, or a link of a given rate between two hosts that are made for the run.

A host is a network namespace of the kernel: its processes reach the other host by the link only. Making them needs root
and iproute2. They are removed when the context ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000  # from <sched.h>: the kind of namespace that setns expects


class NoNetworkError(Exception):
    """A network that cannot be made here, and why, in a sentence."""


@dataclass(frozen=True)
class Network:
    """A network interface. ``hosts``: namespaces that ranks enter in turn; empty for that of this process."""

    name: str
    interface: str
    hosts: tuple[str, ...] = ()

    def enter(self, rank: int) -> None:
        """Move this process, which must have no other thread yet, to the host of ``rank``."""
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        if not self.hosts:
            return
        namespace = os.open(f"/run/netns/{self.hosts[rank % len(self.hosts)]}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "a rank cannot enter the network namespace made for it")
        finally:
            os.close(namespace)


@contextlib.contextmanager
def connect(name: str) -> Iterator[Network]:
    """Make a network: ``"loopback"``, or two hosts connected at a rate as ``tc`` writes it, such as ``"2gbit"``.

    Raises ``NoNetworkError``.
    """
    if name == "loopback":
        yield Network("loopback", "lo")
        return
    _check_able()
    hosts = tuple(f"spmd-bench-{os.getpid()}-{number}" for number in range(2))
    with contextlib.ExitStack() as made:
        for host in hosts:
            made.callback(_ip, "netns", "del", host, check=False)  # registered first: an interrupt can come at any time
            _ip("netns", "add", host)
        _link(hosts, name)
        yield Network(f"two hosts, {name}", "eth0", hosts)


def _check_able() -> None:
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise NoNetworkError(f"two hosts need iproute2: there is no {' and no '.join(missing)} on the path")
    if os.geteuid() != 0:
        raise NoNetworkError("two hosts need root, to make network namespaces: run this as root")


def _link(hosts: tuple[str, ...], rate: str) -> None:
    """A virtual cable, each end of which sends at ``rate``.

    By Reno, which any namespace may take: a machine may have BBR, which sends next to nothing for 200 ms every 10 s.
    """
    _ip("-n", hosts[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", hosts[1])
    for number, host in enumerate(hosts):
        _ip("-n", host, "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _ip("-n", host, "link", "set", interface, "up")
        queue = ("dev", "eth0", "root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
        _run("tc", "-n", host, "qdisc", "add", *queue)
        _ip("netns", "exec", host, "sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")


def _ip(*words: str, check: bool = True) -> None:
    _run("ip", *words, check=check)


def _run(*words: str, check: bool = True) -> None:
    """Run a program in a session of its own: Ctrl-C ends all programs of a session, but not the removal."""
    done = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    if check and done.returncode:
        message = done.stderr.strip() or f"exit status {done.returncode}"
        raise NoNetworkError(f"two hosts cannot be made here: `{' '.join(words)}` failed: {message}")


def left_over() -> list[str]:
    """The hosts of this process that were not removed."""
    return [path.name for path in Path("/run/netns").glob(f"spmd-bench-{os.getpid()}-*")]
