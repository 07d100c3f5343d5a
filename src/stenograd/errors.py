"""Every error that Stenograd raises on purpose.

StenogradError
├── ConfigError (ValueError)       an argument, method text or option that breaks its rule
│   └── MethodError                an unknown method, an unknown key, or a value outside its range
├── TensorTypeError (TypeError)    a tensor of a kind that cannot be compressed
├── NonFiniteError (ValueError)    parameters that should be averaged hold NaN or infinity
├── DataError                      a data file that is missing, truncated or foreign
├── CheckpointError                a checkpoint that is unreadable, foreign or of another run
├── LaunchError                    the ranks could not be started or could not find each other
├── MismatchError                  the ranks disagree on the model, the method or a version
├── ReplicaDivergence              the ranks' parameters, which should be equal, are not
├── WireError                      a payload that does not have the form it should have
└── PeerLost                       another rank died, went silent or was cut off
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LaunchError",
    "MethodError",
    "MismatchError",
    "NonFiniteError",
    "PeerLost",
    "ReplicaDivergence",
    "StenogradError",
    "TensorTypeError",
    "WireError",
    "bad_value",
    "check_count",
    "first_line",
]


class StenogradError(Exception):
    """Base of every error that Stenograd raises on purpose."""


class ConfigError(StenogradError, ValueError):
    """An argument breaks its rule."""


class MethodError(ConfigError):
    """A method's name, key or value is not one that Stenograd knows."""


class TensorTypeError(StenogradError, TypeError):
    """A tensor is of a kind that cannot be compressed (integer, boolean or complex)."""


class NonFiniteError(StenogradError, ValueError):
    """Parameters that should be averaged hold NaN or infinity, on whichever rank."""


class DataError(StenogradError):
    """A data file is missing, truncated or not what its name says."""


class CheckpointError(StenogradError):
    """A checkpoint cannot be read, or belongs to another run."""


class LaunchError(StenogradError):
    """The ranks could not be started, or could not find each other."""


class MismatchError(StenogradError):
    """The ranks disagree on something that must be equal everywhere."""


class ReplicaDivergence(StenogradError):
    """The ranks' parameters should be equal bit for bit, and are not.

    Attributes:
        step: when it was found, as the caller counts.
        tensors: by name, the ranks that differ from the majority, ascending; none where there is no majority.
    """

    def __init__(
        self, message: str, step: int = 0, tensors: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.tensors = dict(tensors or {})


class WireError(StenogradError):
    """A payload does not have the form that both sides agreed on."""


class PeerLost(StenogradError):
    """Another rank died, went silent for longer than the timeout, or was cut off.

    Attributes:
        ranks: the lost ones, ascending; empty where it is not known which.
    """

    ranks: tuple[int, ...] = ()


def bad_value(
    name: str, rule: str, got: object, advice: str, error: type[ConfigError] = ConfigError
) -> ConfigError:
    """Build the error for a value outside its range: name, rule, value got, what to do.

    Example:
        >>> print(bad_value("ratio", "must be in (0, 1]", 1.5, "use 0.01 to send 1 %"))
        ratio must be in (0, 1], got 1.5: use 0.01 to send 1 %
    """
    return error(f"{name} {rule}, got {got!r}: {advice}")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its name, at most 200 characters.

    Example:
        >>> first_line(ValueError("too large" + chr(10) + "and so on"))
        'too large'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def check_count(
    name: str, got: int, advice: str, error: type[ConfigError] = ConfigError, *, most: int = 2**31 - 1
) -> None:
    """Refuse a count outside [1, most]; kernels add such counts to places in 64 bits without wrapping.

    Example:
        >>> check_count("block", 2**40, "use 1024")
        Traceback (most recent call last):
        stenograd.errors.ConfigError: block must be at most 2147483647, got 1099511627776: use 1024
    """
    if not got >= 1:
        raise bad_value(name, "must be at least 1", got, advice, error)
    if got > most:
        raise bad_value(name, f"must be at most {most}", got, advice, error)
