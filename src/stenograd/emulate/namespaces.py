"""Network namespaces through the commands `ip` and `tc`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

__all__ = ["HostsError", "command", "ip", "names", "remove", "require_rights", "sent_bytes"]


class HostsError(RuntimeError):
    """Hosts cannot be emulated here, or a rank on them failed."""


def require_rights() -> None:
    """Check what can be checked before anything is made.

    Raises:
        HostsError: this is not Linux, a command is missing, or this process is not root.
    """
    if sys.platform != "linux":
        raise HostsError(f"emulated hosts need Linux's network namespaces, this is {sys.platform}")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise HostsError(
                f"emulated hosts need the command {program!r}: install Debian's package iproute2"
            )
    if os.geteuid() != 0:
        raise HostsError("emulated hosts need root to make network namespaces: run this as root (sudo)")


def names(prefix: str) -> list[str]:
    """Return the namespaces whose names start so."""
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line.startswith(prefix)]


def remove(prefix: str) -> None:
    """Remove the namespaces whose names start so, and kill the processes in them."""
    for name in names(prefix):
        for pid in ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", name)  # its interfaces and queues go with it


def sent_bytes(*where: str) -> int:
    """Return the bytes that eth0 has sent, packet headers included.

    An interface counts a piece of several packets with a single header, a token bucket with all of them.

    Args:
        where: `-n` and a namespace; this process's own if there is nothing.
    """
    buckets = json.loads(command("tc", *where, "-s", "-j", "qdisc", "show", "dev", "eth0", "root"))
    if buckets and buckets[0]["kind"] == "tbf":
        return int(buckets[0]["bytes"])
    told = json.loads(ip(*where, "-s", "-j", "link", "show", "dev", "eth0"))
    return int(told[0]["stats64"]["tx"]["bytes"])


def ip(*arguments: str) -> str:
    """Run `ip` and return its output."""
    return command("ip", *arguments)


def command(*words: str) -> str:
    """Run a command and return its output.

    Raises:
        HostsError: it failed.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsError(
            f"`{' '.join(words)}` failed: {done.stderr.strip()}: emulated hosts need network namespaces, "
            "bridges and token buckets, which some containers forbid"
        )
    return done.stdout
