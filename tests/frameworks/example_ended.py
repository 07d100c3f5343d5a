"""Runs an example and prints what of Stenograd's is left while its variables are still alive."""

import json
import runpy
import sys

from left_over import left_over
from torch import nn

kept = runpy.run_path(sys.argv[1], run_name="__main__")
net = kept.get("net")
model = kept.get("model") or getattr(net, "module_", nn.Identity())
worlds = "stenograd-failure-detector"  # ends with stenograd.shutdown(), as the world does
print(json.dumps([what for what in left_over(model) if what != worlds]), flush=True)
