"""Emulated hosts, under the name that the scripts beside this one use; see `stenograd.emulate.hosts`."""

from stenograd.emulate.hosts import Hosts, HostsError, parse_rate, why_not

__all__ = ["Hosts", "HostsError", "parse_rate", "why_not"]
