"""The compressor contract, what corrects compression errors, and how codes travel."""

from stenograd.compression.codec import Codec
from stenograd.compression.contract import Compressor, Exchange, Feedback, Site, Transport
from stenograd.compression.ef21 import EF21
from stenograd.compression.error_feedback import ErrorFeedback
from stenograd.compression.loco import LoCo

__all__ = [
    "EF21",
    "Codec",
    "Compressor",
    "ErrorFeedback",
    "Exchange",
    "Feedback",
    "LoCo",
    "Site",
    "Transport",
]
