"""Hooks as autograd calls them: from several threads, one for each device, and in whatever order."""

import os
import sys
import threading
import time
from collections import Counter

import pytest
import torch
from torch import nn

import stenograd
from stenograd.comm.tensor_exchange import TensorExchange
from stenograd.compression.contract import Site
from stenograd.sync import backward_passes, hooks


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "STENOGRAD_STORE"):
        monkeypatch.delenv(name, raising=False)


def test_threads_of_several_devices_submit_each_bucket_once(alone, monkeypatch):
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
    monkeypatch.setattr(hooks, "_graph_task", lambda: 7)
    monkeypatch.setattr(hooks, "at_end", lambda task, order, action: ends.append(action))
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


def test_a_copy_or_pickle_of_an_attached_model_is_a_plain_model(alone):
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


def test_an_engine_goes_with_its_model(alone):
    import gc
    import weakref

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
def test_a_backward_pass_that_fails_keeps_nothing_alive(alone, text):
    """What waits for its end belongs to the pass, which is gone."""
    import gc
    import weakref

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
    assert not backward_passes._ends
    del model, optimizer
    gc.collect()
    assert engine() is None


class _Injected(Exception):
    """Stands for whatever may go wrong."""


def _failing_at(number):
    """Return a profiler that raises in the so many-th call of the library's, and the calls so far."""
    calls = [0]

    def profile(frame, event, _):
        code = frame.f_code
        if event != "call" or f"{os.sep}stenograd{os.sep}" not in code.co_filename or code.co_name in CALM:
            return
        calls[0] += 1
        if calls[0] == number:
            sys.setprofile(None)
            raise _Injected(code.co_name)

    return profile, calls


CALM = {"__del__", "_remove", "<genexpr>"}  # whose errors nobody hears of


def _left_behind(model, optimizer):
    hooks = [h for p in model.parameters() for h in (p._post_accumulate_grad_hooks or ())]
    hooks += [h for m in model.modules() for h in m._forward_pre_hooks]
    hooks += [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    return [*hooks, *(name for name in vars(optimizer) if name == "add_param_group")]


@pytest.mark.parametrize("text", ["dense", "local:every=2", "diloco:every=2,after=2/sign", "gossip"])
def test_attaching_that_fails_at_any_point_leaves_the_model_as_it_was(alone, text):
    """Errors are injected into every 29th call that the library makes while it attaches."""
    number, ended = 1, False
    while not ended:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        profile, calls = _failing_at(number)
        sys.setprofile(profile)
        try:
            sync = stenograd.distribute(model, optimizer, text)
            sys.setprofile(None)
            sync.close()
        except _Injected as error:
            point = f"call {number}, {error}"
        finally:
            sys.setprofile(None)
        ended = calls[0] < number
        assert not _left_behind(model, optimizer), point
        model(torch.ones(1, 3)).sum().backward()
        number += 29
    assert number > 100
