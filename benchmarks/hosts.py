"""Hosts joined by a slow link, on one machine: a network namespace each, behind a switch that is one too.

::

    host 0 ── tbf ──┐              ┌── tbf ── host 1
    10.77.0.1       └──  switch  ──┘          10.77.0.2
                         (bridge)

Token buckets (``tc tbf``) on both ends of every cable limit what a host sends and what it receives, each by itself: a
full-duplex link. Connections between hosts use CUBIC, Linux's default, whatever this machine prefers: what is measured
is a step, not how BBR probes what the link can carry. Needs root, and ``ip`` and ``tc`` (Debian's iproute2).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from types import TracebackType

_LIBC = ctypes.CDLL(None, use_errno=True)


class Hosts:
    """``count`` hosts with links of ``rate`` (as tc writes it: "1gbit"), or processes on loopback where it is None.

    A context manager: namespaces are made on entry and removed on exit.
    """

    def __init__(self, count: int, rate: str | None) -> None:
        self.count, self.rate = count, rate
        self.interface = "lo" if rate is None else "eth"
        self.prefix = f"zerofx{os.getpid()}"

    def address(self, host: int) -> str:
        return "127.0.0.1" if self.rate is None else f"10.77.0.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """What to put before a command so that it runs on ``host``."""
        return [] if self.rate is None else ["ip", "netns", "exec", f"{self.prefix}-{host}"]

    def enter(self, host: int) -> None:
        """Move this thread, and those that it starts from now on, to ``host``."""
        if self.rate is not None:
            with open(f"/run/netns/{self.prefix}-{host}") as namespace:
                if _LIBC.setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns to host {host}")

    def __enter__(self) -> Hosts:
        if self.rate is None:
            return self
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise RuntimeError(f"no {tool!r}: install iproute2.")
        if os.geteuid() != 0:
            raise RuntimeError("network namespaces with a limited link need root.")
        try:
            switch = f"{self.prefix}-switch"
            _do(f"ip netns add {switch}")
            _do(f"ip -n {switch} link add switch type bridge")
            _do(f"ip -n {switch} link set switch up")
            for host in range(self.count):
                name, port = f"{self.prefix}-{host}", f"port{host}"
                _do(f"ip netns add {name}")
                _do(f"ip link add {self.interface} netns {name} type veth peer name {port} netns {switch}")
                _do(f"ip -n {name} address add {self.address(host)}/24 dev {self.interface}")
                _do(f"ip -n {switch} link set {port} master switch")
                for where, device in ((name, self.interface), (switch, port)):
                    _do(f"tc -n {where} qdisc add dev {device} root tbf rate {self.rate} burst 256k latency 20ms")
                    _do(f"ip -n {where} link set {device} up")
                _do(f"ip -n {name} link set lo up")
                route = f"10.77.0.0/24 dev {self.interface} src {self.address(host)}"
                _do(f"ip -n {name} route change {route} congctl cubic")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.rate is not None:
            self._remove()

    def _remove(self) -> None:
        for name in ["switch", *range(self.count)]:
            subprocess.run(["ip", "netns", "delete", f"{self.prefix}-{name}"], capture_output=True, check=False)


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command!r} failed: {done.stderr.strip()}")
