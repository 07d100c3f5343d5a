"""Hooks as autograd calls them: from several threads, one for each device, and in whatever order."""

import gc
import os
import sys
import threading
import time
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.compression.contract import Site
from stenograd.exchange.tensor_exchange import TensorExchange
from stenograd.heat import DASO, DataParallel, DataParallelOptimizer
from stenograd.mlbench import CentralizedSGD, DecentralizedSGD
from stenograd.singa import DistOpt
from stenograd.sync import attached, gradients, steps

pytestmark = pytest.mark.usefixtures("unlaunched")


def test_threads_of_several_devices_submit_each_bucket_once(monkeypatch):
    """Two threads report one pass's gradients, as for a model on two GPUs, while submitting takes long."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    submitted, submit = Counter(), TensorExchange.submit

    def slowly(self, index):
        time.sleep(0.002)
        submitted[index] += 1
        submit(self, index)

    ends = []
    monkeypatch.setattr(TensorExchange, "submit", slowly)
    monkeypatch.setattr(gradients, "_graph_task", lambda: 7)
    monkeypatch.setattr(gradients, "at_end", lambda task, order, action: ends.append(action))
    with stenograd.distribute(model, optimizer, "topk:ratio=0.5", bucket_bytes=64) as sync:
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.ones_like(p)
        errors = []

        def report(part):
            try:
                for p in part:
                    sync._on_gradient(sync._slots[id(p)], p)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=report, args=(parameters[i::2],)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (end,) = ends
        end()
        assert not errors
        assert len(submitted) >= 12
        assert set(submitted.values()) == {1}
        assert sync.step == 1


@pytest.mark.parametrize("text", ["topk:warmup_steps=2", "topk:clip_norm=1.0", "sign:clip_value=1.0"])
def test_clipping_and_warm_up_let_averages_take_the_residuals_memory(text):
    """So a method needs one more tensor like the gradients, not two, with them as without."""
    site = Site(shapes=(torch.Size((5000,)),), world_size=2)
    plain, around = (stenograd.method(t).compressor for t in (text.partition(":")[0], text))
    assert around.facts(site) == plain.facts(site)
    assert plain.facts(site).frees_residual


def test_a_copy_or_pickle_of_an_attached_model_is_a_plain_model():
    import copy
    import io

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "topk") as sync:
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (twin, loaded):
            before = sync.step
            other(torch.ones(1, 3)).sum().backward()
            assert sync.step == before
            assert torch.equal(other.weight, model.weight)


def test_an_engine_goes_with_its_model():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight
    engine = weakref.ref(stenograd.distribute(model, optimizer, "topk"))
    gc.collect()
    assert engine() is not None  # nobody keeps what distribute returned
    model(torch.ones(1, 3)).sum().backward()
    del model, optimizer
    gc.collect()
    assert engine() is None
    with pytest.raises(stenograd.StenogradError, match="model is gone"):
        weight.sum().backward()


@pytest.mark.parametrize("text", ["topk", "local:every=2", "diloco:every=2", "gossip"])
def test_a_backward_pass_that_fails_keeps_nothing_alive(text):
    """What waits for its end belongs to the pass, which is gone."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("no")

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = weakref.ref(stenograd.distribute(model, optimizer, text))
    with pytest.raises(ValueError, match="no"):
        model[1](Fails.apply(model[0](torch.ones(1, 3)))).sum().backward()
    assert not attached._ends
    del model, optimizer
    gc.collect()
    assert engine() is None


class _Injected(Exception):
    """Stands for whatever may go wrong."""


def _mlbench(model, optimizer):
    return CentralizedSGD(1, model, lr=0.1)


def _neighbours(model, optimizer):
    return DecentralizedSGD(0, [], model, lr=0.1)


def _daso(model, optimizer):
    daso = DASO(optimizer, total_epochs=9)
    daso.set_model(model)
    return daso


def _heat(blocking, model, optimizer):
    return DataParallel(
        model, optimizer=DataParallelOptimizer(optimizer), blocking_parameter_updates=blocking
    )


def _singa(model, optimizer):
    """Hooks are set in each step and taken away at its end."""
    found = DistOpt(optimizer)
    found(model(torch.ones(1, 3)).sum())
    return found


def _distribute(text, model, optimizer):
    return stenograd.distribute(model, optimizer, text)


def _register(model, optimizer):
    return stenograd.ddp.register(model, "topk")


TEXTS = ["dense", "local:every=2", "diloco:every=2,after=2/sign", "noloco:every=2", "gossip"]
ATTACH = {text: partial(_distribute, text) for text in TEXTS}
ATTACH |= {"hook": _register, "daso": _daso, "singa": _singa, "mlbench": _mlbench, "neighbours": _neighbours}
ATTACH |= {"heat": partial(_heat, False), "heat, blocking": partial(_heat, True)}
# Errors in these go nowhere, or, on entering the second half of `_wholly`, past what it does in that case.
CALM = {"__del__", "_remove", "<genexpr>", "_wholly"}


def _watching(on_call):
    """Return a profiler that is told where the library calls which of its functions."""

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and f"{os.sep}stenograd{os.sep}" in code.co_filename and code.co_name not in CALM:
            caller = frame.f_back
            on_call((caller.f_code.co_filename, caller.f_lineno, code.co_qualname))

    return profile


def _raising_at(place):
    """Return a profiler that raises at this place, once."""

    def on_call(found):
        if found == place:
            sys.setprofile(None)
            raise _Injected(f"{place[2]}, called by line {place[1]} of {place[0]}")

    return _watching(on_call)


def _profiled(profile, attach, *given):
    gc.disable()  # the ends of what earlier attempts have left are not a part of this one
    sys.setprofile(profile)
    try:
        return attach(*given)
    finally:
        sys.setprofile(None)
        gc.enable()


def _hooks(model, optimizer):
    """All that may be left on them, or on the steps of all optimizers."""
    found = [h for p in model.parameters() for h in (p._post_accumulate_grad_hooks or {}).values()]
    found += [h for p in model.parameters() for h in (p._backward_hooks or {}).values()]
    for name in ("_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"):
        found += [h for m in model.modules() for h in getattr(m, name).values()]
    found += [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return {*map(id, found), *steps._watchers, *({"add_param_group"} & vars(optimizer).keys())}


def _trained(face):
    """A model, as the face takes it, and its optimizer, which has stepped."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    return DistributedDataParallel(model) if face == "hook" else model, optimizer


@pytest.mark.parametrize("face", ATTACH)
def test_attaching_that_fails_at_any_point_leaves_the_model_as_it_was(face):
    """An error is injected into the first call from every line of the library that is run while it attaches.

    Then no hook is left, the model trains as if nothing had been, and can be attached.
    """
    attach, places = ATTACH[face], dict[tuple[str, int, str], None]()
    stenograd.init()
    attach(*_trained(face))  # what is loaded at first use is not looked at
    _profiled(_watching(places.setdefault), attach, *_trained(face))
    assert len(places) > 30
    for place in places:
        model, optimizer = _trained(face)
        before = _hooks(model, optimizer)
        try:
            _profiled(_raising_at(place), attach, model, optimizer)
            continue  # it is only come to the first time
        except _Injected as error:
            point = str(error)
        assert _hooks(model, optimizer) <= before, point
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        wanted = [p.detach() - 0.1 * p.grad for p in model.parameters()]
        optimizer.step()
        assert all(map(torch.allclose, model.parameters(), wanted)), point
        getattr(attach(model, optimizer), "close", bool)()
    stenograd.shutdown()
