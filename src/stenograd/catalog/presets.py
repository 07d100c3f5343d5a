"""Names for a schedule and a compressor with certain values; they print as their long form."""

from __future__ import annotations

__all__ = ["PRESETS"]

# Keys given with the name replace the ones here; a compressor after the slash replaces the one here.
PRESETS = {
    # Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.
    "postlocal": "local:every=16,after=2000",
    # Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706, with the
    # decay of its production runs. The decayed residual takes the place of outer momentum.
    "sparseloco": "diloco:every=30,outer_lr=1,momentum=0/"
    "topk:ratio=0.015625,chunk=4096,values=int2,feedback_decay=0.95,divide=senders",
    # Wang et al., "SlowMo", ICLR 2020; with a slow learning rate of 1.
    "slowmo": "diloco:outer_lr=1,momentum=0.5,nesterov=false",
}
