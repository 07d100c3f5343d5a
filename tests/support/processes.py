"""Processes and ports of this machine."""

import socket
from pathlib import Path


def runs(pid):
    """Tell whether a process exists and is no zombie waiting for whoever inherits it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def free_port():
    """Return a port of the loopback interface that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
