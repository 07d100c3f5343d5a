"""A worker of an open run: trains until the last round was held, and notes what each of them left."""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import stenograd
from stenograd.errors import StenogradError
from stenograd.sync import open_rounds
from stenograd.sync.open_rounds import OpenRounds


def _falter(spec):
    """Die or freeze when a method is called for the nth time, or give a wrong digest."""
    if spec["do"] == "lie":
        right, calls = open_rounds._digest, [0]

        def wrong(tensors):
            calls[0] += 1
            return "wrong" if calls[0] == spec["nth"] else right(tensors)

        open_rounds._digest = wrong
        return
    plain, left = getattr(OpenRounds, spec["at"]), [spec["nth"]]

    def faltering(self, *args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and spec.get("when", "before") == "before":
            os.kill(os.getpid(), getattr(signal, spec["do"]))
        result = plain(self, *args, **kwargs)
        if left[0] == 0 and spec.get("when") == "after":
            os.kill(os.getpid(), getattr(signal, spec["do"]))
        return result

    setattr(OpenRounds, spec["at"], faltering)


def _over(folder, state):
    """Whether the last round was held, which the file says once it is there."""
    try:
        with open(f"{folder}/end") as file:
            return state >= int(file.read())
    except OSError:
        return False


def _final(model, sync):
    with sync.consensus():
        refused = not isinstance(sync, OpenRounds)
        try:
            if not refused:
                sum(p.sum() for p in model.parameters()).backward()
        except StenogradError as error:
            refused = "inside consensus()" in str(error)
        assert refused
        held = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(held).hexdigest()[:16]


def main(folder, method, step_s):
    if "FALTER" in os.environ:
        _falter(json.loads(os.environ["FALTER"]))
    faulthandler.dump_traceback_later(95)  # before the test gives up
    world = stenograd.init(timeout_s=60)
    torch.manual_seed(world.rank)
    layers = [nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 4)]
    model = nn.Sequential(*layers)
    model.register_buffer("repeated", torch.zeros(1).expand(3))  # its elements share memory
    model.register_buffer("grown", torch.zeros(1))  # has another form in workers that have trained
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=1000, timeout_s=60)
    log = Path(f"{folder}/log-{world.rank}-{os.getpid()}").open("w")  # noqa: SIM115 (ends with the process)
    data = torch.Generator().manual_seed(100 + world.rank)
    slower = float(os.environ.get("SLOWER", "1"))
    state = None
    while True:
        if getattr(sync, "_state", sync.round) != state:
            state = getattr(sync, "_state", sync.round)
            held = [t.numpy().tobytes() for part in sync._parts for t in part.common()]
            digest = hashlib.sha256(b"".join(held)).hexdigest()[:16]
            row = {"state": state, "digest": digest, "step": sync.step, "members": sync.members}
            print(json.dumps(row | {"at": time.time()}), file=log, flush=True)
        if _over(folder, state) or sync.stopping:
            break
        x = torch.randn(8, 16, generator=data)
        optimizer.zero_grad()
        if "WEIGH" in os.environ:
            sync.weight(8 + world.rank)
        (model(x) - x[:, :4]).square().mean().backward()
        model.grown = torch.zeros(2)
        if sync.step == int(os.environ.get("SPOIL", "-1")):
            nn.init.constant_(model[0].bias, torch.nan)
        optimizer.step()
        time.sleep(step_s * slower)
    end = {"steps": sync.step, "tokens": sync.tokens, "events": sync.events, "final": _final(model, sync)}
    end["brought"] = getattr(sync, "_counted_at", {})
    print(json.dumps({"end": end, "stopping": sync.stopping}), file=log, flush=True)
    sync.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
