"""What the multi-rank tests share beside `support`; imported by the rank processes."""

import torch
from support.training import SMALL_BUCKETS, flat, mlp, shards, step

from stenograd.testing.methods import suite
from stenograd.wire.requests import Op

__all__ = [
    "ALL_METHODS", "SMALL_BUCKETS", "buckets_of", "flat", "mlp", "shards", "step", "wire_rounding"
]  # fmt: skip
ALL_METHODS = suite()


def wire_rounding(requests):
    """What the order of a sum on the wire may change: 4 roundings of 16 bits, or 0 where sums are finer."""
    types = {t.dtype for request in requests if request.op is Op.MEAN for t in request.tensors}
    eps = max((torch.finfo(dtype).eps for dtype in types), default=0.0)
    return 4 * eps if eps > torch.finfo(torch.float32).eps else 0.0


def buckets_of(sync):
    """How many buckets the ledger tells of."""
    return len({e.bucket for e in sync.traffic.entries() if e.bucket is not None})
