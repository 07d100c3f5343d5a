"""How tensors are written on the wire. A compressor is one file here, found by its name in a method's text.

Each class means what its text means: `TopK(ratio=0.05)` is "topk:ratio=0.05", error feedback included.
"""

from stenograd.compressors.cast import Cast
from stenograd.compressors.demo import DeMo
from stenograd.compressors.dgc import DGC
from stenograd.compressors.dion import Dion
from stenograd.compressors.identity import Identity
from stenograd.compressors.lowbit import LowBit
from stenograd.compressors.natural import Natural
from stenograd.compressors.powersgd import PowerSGD
from stenograd.compressors.qsgd import QSGD
from stenograd.compressors.randomblock import RandomBlock
from stenograd.compressors.randomk import RandomK
from stenograd.compressors.sign import Sign
from stenograd.compressors.terngrad import TernGrad
from stenograd.compressors.threshold import Threshold
from stenograd.compressors.topk import TopK

__all__ = [
    "DGC",
    "QSGD",
    "Cast",
    "DeMo",
    "Dion",
    "Identity",
    "LowBit",
    "Natural",
    "PowerSGD",
    "RandomBlock",
    "RandomK",
    "Sign",
    "TernGrad",
    "Threshold",
    "TopK",
]
