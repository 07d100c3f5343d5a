"""The compressor contract, what corrects compression errors, and how codes travel."""

from stenograd.compression.blocks import BlockCodec
from stenograd.compression.codec import Additive, Codec
from stenograd.compression.contract import (
    Average,
    Compressor,
    Exchange,
    Facts,
    Feedback,
    Kind,
    Replaced,
    Site,
)
from stenograd.compression.feedback import EF21, ErrorFeedback, LoCo

__all__ = [
    "EF21",
    "Additive",
    "Average",
    "BlockCodec",
    "Codec",
    "Compressor",
    "ErrorFeedback",
    "Exchange",
    "Facts",
    "Feedback",
    "Kind",
    "LoCo",
    "Replaced",
    "Site",
]
