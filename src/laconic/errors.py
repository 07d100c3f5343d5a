"""Every error that Laconic raises on purpose.

LaconicError
├── ConfigError (ValueError)       an argument, method text or option that breaks its rule
│   └── MethodError                an unknown method, an unknown key, or a value outside its range
├── TensorTypeError (TypeError)    a tensor of a kind that cannot be compressed
├── NonFiniteError (ValueError)    parameters that should be averaged hold NaN or infinity
├── DataError                      a data file that is missing, truncated or foreign
├── CheckpointError                a checkpoint that is unreadable, foreign or of another run
├── LaunchError                    the ranks could not be started or could not find each other
├── MismatchError                  the ranks disagree on the model, the method or a version
├── WireError                      a payload that does not have the form it should have
└── PeerLost                       another rank died, went silent or was cut off
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LaconicError",
    "LaunchError",
    "MethodError",
    "MismatchError",
    "NonFiniteError",
    "PeerLost",
    "TensorTypeError",
    "WireError",
    "bad_value",
]


class LaconicError(Exception):
    """Base of every error that Laconic raises on purpose."""


class ConfigError(LaconicError, ValueError):
    """An argument breaks its rule."""


class MethodError(ConfigError):
    """A method's name, key or value is not one that Laconic knows."""


class TensorTypeError(LaconicError, TypeError):
    """A tensor is of a kind that cannot be compressed (integer, boolean or complex)."""


class NonFiniteError(LaconicError, ValueError):
    """Parameters that should be averaged hold NaN or infinity, on whichever rank."""


class DataError(LaconicError):
    """A data file is missing, truncated or not what its name says."""


class CheckpointError(LaconicError):
    """A checkpoint cannot be read, or belongs to another run."""


class LaunchError(LaconicError):
    """The ranks could not be started, or could not find each other."""


class MismatchError(LaconicError):
    """The ranks disagree on something that must be equal everywhere."""


class WireError(LaconicError):
    """A payload does not have the form that both sides agreed on."""


class PeerLost(LaconicError):
    """Another rank died, went silent for longer than the timeout, or was cut off."""


def bad_value(
    name: str, rule: str, got: object, advice: str, error: type[ConfigError] = ConfigError
) -> ConfigError:
    """Build the error for a value outside its range: name, rule, value got, what to do.

    Example:
        >>> print(bad_value("ratio", "must be in (0, 1]", 1.5, "use 0.01 to send 1 %"))
        ratio must be in (0, 1], got 1.5: use 0.01 to send 1 %
    """
    return error(f"{name} {rule}, got {got!r}: {advice}")
