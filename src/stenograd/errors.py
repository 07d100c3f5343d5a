"""Every error that Stenograd raises on purpose.

StenogradError
├── ConfigError (ValueError)       an argument, method text or option that breaks its rule
│   └── MethodError                an unknown method, an unknown key, or a value outside its range
├── TensorTypeError (TypeError)    a tensor of a kind that cannot be compressed
├── NonFiniteError (ValueError)    parameters to be averaged hold NaN or infinity
├── DataError                      a data file that is missing, damaged or of another kind
├── CheckpointError                a checkpoint that is unreadable, or of another run
├── LaunchError                    the ranks could not be started or could not find each other
├── MismatchError                  the ranks disagree on the model, the method or a version
├── ReplicaDivergence              the ranks' parameters should be equal, and are not
├── WireError                      a message does not have the form that both sides agreed on
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
    """A method's name or key is unknown, or a value is outside its range."""


class TensorTypeError(StenogradError, TypeError):
    """A tensor is of a kind that cannot be compressed (integer, boolean or complex)."""


class NonFiniteError(StenogradError, ValueError):
    """Parameters to be averaged hold NaN or infinity, on some rank."""


class DataError(StenogradError):
    """A data file is missing, damaged or of another kind than its name says."""


class CheckpointError(StenogradError):
    """A checkpoint cannot be read, or belongs to another run."""


class LaunchError(StenogradError):
    """The ranks could not be started, or could not find each other."""


class MismatchError(StenogradError):
    """The ranks disagree on something that must be equal everywhere."""


class ReplicaDivergence(StenogradError):
    """The ranks' parameters should be equal bit for bit, and are not.

    Attributes:
        step: the step at which it was found, as the caller counts.
        tensors: for each tensor's name the ranks that differ from the majority, ascending; no ranks where
            there is no majority.
    """

    def __init__(
        self, message: str, step: int = 0, tensors: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.tensors = dict(tensors or {})


class WireError(StenogradError):
    """A message does not have the form that both sides agreed on."""


class PeerLost(StenogradError):
    """Another rank died, went silent for longer than the timeout, or was cut off.

    Attributes:
        ranks: the lost ranks, ascending; empty where they are not known.
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
    """Return the first line of an error's message, or its class name; at most 200 characters.

    Example:
        >>> first_line(ValueError("too large" + chr(10) + "and so on"))
        'too large'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def check_count(
    name: str, got: int, advice: str, error: type[ConfigError] = ConfigError, *, most: int = 2**31 - 1
) -> None:
    """Refuse a count outside [1, most].

    The default bound lets kernels add counts to indices in 64 bits without overflow.

    Example:
        >>> check_count("block", 2**40, "use 1024")
        Traceback (most recent call last):
        stenograd.errors.ConfigError: block must be at most 2147483647, got 1099511627776: use 1024
    """
    # Not `got < 1`, which lets NaN pass.
    if not got >= 1:
        raise bad_value(name, "must be at least 1", got, advice, error)
    if got > most:
        raise bad_value(name, f"must be at most {most}", got, advice, error)
