"""Networks: this machine's loopback, or a link between two hosts that are made for the run.

A host is a network namespace of the kernel: its processes reach the other host by the link only, and share no memory
with it, since they cannot reach its Unix sockets. A process keeps each namespace, by doing nothing: with it, and with
the ranks that have entered, the kernel removes the host, however this process ends. Making hosts needs iproute2, and
root or the right to make user namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # from <sched.h>: the kinds of namespace that setns expects


class NoNetworkError(Exception):
    """A network that cannot be made here, and why, in a sentence."""


@dataclass(frozen=True)
class Network:
    """A network interface. ``hosts``: keepers of namespaces, which ranks enter in turn; empty for that of this process.

    A keeper is the id of a process. ``as_user``: it also has a user namespace, in which this user may do what root may.
    """

    name: str
    interface: str
    hosts: tuple[int, ...] = ()
    as_user: bool = False

    def enter(self, rank: int) -> None:
        """Move this process, which must have no other thread yet, to the host of ``rank``."""
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        if not self.hosts:
            return
        keeper = os.pidfd_open(self.hosts[rank % len(self.hosts)])
        try:
            if ctypes.CDLL(None, use_errno=True).setns(keeper, CLONE_NEWNET | (CLONE_NEWUSER if self.as_user else 0)):
                raise OSError(ctypes.get_errno(), "a rank cannot enter the network namespace made for it")
        finally:
            os.close(keeper)

    def on(self, host: int, *words: str) -> str:
        """Run a program on a host, by its number; return what it prints. Raises ``NoNetworkError`` if it fails."""
        return _run(*self._inside(self.hosts[host]), *words)

    def _inside(self, keeper: int) -> tuple[str, ...]:
        user = ("--user", "--preserve-credentials") if self.as_user else ()
        return "nsenter", "--target", str(keeper), *user, "--net", "--"


@contextlib.contextmanager
def connect(name: str) -> Iterator[Network]:
    """Make a network: ``"loopback"``, or two hosts connected at a rate as ``tc`` writes it, such as ``"2gbit"``.

    Raises ``NoNetworkError``.
    """
    if name == "loopback":
        yield Network("loopback", "lo")
        return
    with two_hosts(name) as network:
        yield network


@contextlib.contextmanager
def two_hosts(rate: str | None = None) -> Iterator[Network]:
    """Make two hosts, connected at a rate as ``tc`` writes it, or as fast as the machine is.

    Raises ``NoNetworkError``.
    """
    programs = ("ip", "unshare", "nsenter", *(["tc"] if rate else []))
    if missing := [program for program in programs if shutil.which(program) is None]:
        raise NoNetworkError(f"two hosts need iproute2: there is no {' and no '.join(missing)} on the path")
    as_user = os.geteuid() != 0
    with contextlib.ExitStack() as kept:
        first = kept.enter_context(_keeper("unshare", *(["--user", "--map-root-user"] if as_user else []), "--net"))
        network = Network(f"two hosts, {rate}" if rate else "two hosts", "eth0", (first,), as_user)
        second = kept.enter_context(_keeper(*network._inside(first), "unshare", "--net"))
        network = Network(network.name, network.interface, (first, second), as_user)
        _link(network, rate)
        yield network


@contextlib.contextmanager
def _keeper(*words: str) -> Iterator[int]:
    """A process in the namespaces that a command makes; it ends when this one closes its input, or ends.

    In a session of its own: Ctrl-C ends all programs of a session, but hosts are to last as long as their ranks.
    """
    command = [*words, "sh", "-c", "echo made && exec cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as keeper:
        assert keeper.stdout is not None and keeper.stderr is not None
        if not keeper.stdout.readline():
            raise NoNetworkError(_failure(command, keeper.stderr.read(), keeper.wait()))
        yield keeper.pid


def _link(network: Network, rate: str | None) -> None:
    """A virtual cable, each end of which sends at ``rate``.

    By Reno, which any namespace may take: a machine may have BBR, which sends next to nothing for 200 ms every 10 s.
    """
    other = str(network.hosts[1])
    network.on(0, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", other)
    for number in range(2):
        network.on(number, "ip", "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            network.on(number, "ip", "link", "set", interface, "up")
        if rate:
            queue = ("dev", "eth0", "root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
            network.on(number, "tc", "qdisc", "add", *queue)
        network.on(number, "sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")


def _run(*words: str) -> str:
    """Run a program in a session of its own, as Ctrl-C is for this process."""
    done = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise NoNetworkError(_failure(words, done.stderr, done.returncode))
    return done.stdout


def _failure(words: list[str] | tuple[str, ...], errors: str, status: int) -> str:
    message = errors.strip() or f"exit status {status}"
    return f"two hosts cannot be made here: `{' '.join(words)}` failed: {message}"
