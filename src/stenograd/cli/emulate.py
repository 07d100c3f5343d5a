"""The command `stenograd emulate`: a user's own training on emulated hosts with slow links."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from stenograd.emulate.hosts import MAX_HOSTS, Hosts, HostsError
from stenograd.errors import ConfigError, LaunchError, bad_value, check_count

__all__ = ["run"]


def run(
    command: Sequence[str],
    hosts: int,
    rate: str,
    delay: str,
    ranks_per_host: int,
    cores_per_host: int,
    timeout_s: float,
) -> int:
    """Run a command on emulated hosts, show rank 0's output while it comes, and what each host sent.

    Args:
        command: program and arguments.
        hosts: number of hosts, 1 to 254.
        rate: of each host's link.
        delay: between two hosts, one way.
        ranks_per_host: number of copies on each host, at least 1.
        cores_per_host: that each host has for itself; 0 where all share all.
        timeout_s: seconds after which all are killed.

    Returns:
        The exit status, 0.

    Raises:
        ConfigError: a number, the rate or the delay is out of range.
        LaunchError: hosts cannot be emulated here, or a rank failed.
    """
    check_count("--hosts", hosts, "use 2", most=MAX_HOSTS)
    check_count("--ranks-per-host", ranks_per_host, "use 1")
    if not 0 < timeout_s < math.inf:
        raise bad_value("--timeout-s", "must be above 0 and finite", timeout_s, "leave it at 3600")
    try:
        with Hosts(hosts, rate, delay=delay, cores_per_host=cores_per_host) as emulated:
            emulated.run(command, ranks_per_host, timeout_s=timeout_s, echo=True)
            for index, sent_bytes in enumerate(emulated.sent_bytes()):
                print(f"host {index} sent {sent_bytes / 1e6:.3f} MB", file=sys.stderr)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except HostsError as error:
        raise LaunchError(str(error)) from None
    return 0
