"""What does not go together is refused before anything is sent, with what to write instead."""

import copy
import re
import warnings

import pytest
import torch
from compositions import REFUSED
from support.faces import attached
from torch import nn
from torch.nn.utils import prune

import stenograd
from stenograd.catalog.method import for_any_optimizer
from stenograd.errors import ConfigError, MethodError, StenogradError
from stenograd.testing.pool import RanksFailed

TEXTS = {text: message for text, message in REFUSED.values() if text} | {
    # A vote is no mean, and residuals of what is scaled up grow without bound.
    "local/sign:majority=true": "use sign without majority",
    "diloco/sign:majority=true": "use sign without majority",
    "gossip:graph=ring,consensus=0.1/sign:majority=true": "use sign without majority",
    "local/randomk:unbiased=true": "leave out unbiased=true, or use topk",
    "gossip:graph=ring,consensus=0.1/randomk:unbiased=true": "leave out unbiased=true, or use topk",
    # What counts or clips gradients would count or clip rounds.
    "local/topk:clip_value=1": "clip gradients in your loop",
    "diloco/topk:clip_norm=1": "clip gradients in your loop",
    "gossip/topk:clip_norm=1": "clip gradients in your loop",
    "diloco/topk:warmup_steps=9": "write after=9 before the slash",
    "gossip:graph=ring,consensus=0.1/topk:warmup_steps=9": "leave warmup_steps out",
    # Feedback where nothing is lost, or where it is fed back already.
    "dense:feedback=true": "leave feedback out",
    "dgc:feedback=true": "leave feedback out",
    "qsgd:feedback=ef21": "leave feedback out",
    "qsgd:feedback=loco": "leave feedback out",
    "topk:feedback=false,feedback_decay=0.9": "add feedback=true",
    "dgc:nesterov=true,momentum=0": "set momentum=0.9, or leave nesterov off",
    # Methods that keep gradients by themselves.
    "diloco/dgc": "use topk, or leave out what stands before the slash",
    "local/demo": "use topk, or leave out what stands before the slash",
    "diloco/dion": "use topk, or leave out what stands before the slash",
    "diloco/topk:feedback=ef21": "use topk, or leave out what stands before the slash",
    "local/lowbit:feedback=loco": "use topk, or leave out what stands before the slash",
    "gossip:graph=ring,consensus=0.1/demo": "use topk, sign or qsgd",
    # CHOCO.
    "gossip:graph=ring,consensus=0.5": "leave consensus out",
    "gossip:graph=ring/topk": "write consensus=0.4 for sign, 0.04 for topk",
    "gossip:graph=ring,consensus=0.4,lost=drop/sign": "use lost=raise, or leave the codec out",
    "gossip:graph=ring,consensus=0.4,pushsum=on/sign": "leave pushsum out",
    # Fragments, delays and what needs all ranks.
    "diloco:every=31,fragments=4": "use 28",
    "diloco:every=8,fragments=2,delay=4": "use 3",
    "diloco:mix=0.5": "give delay=1, or leave it out",
    "diloco:delay=1,mix=1": "use 0.5",
    "diloco:eager=true,delay=1": "leave them out",
    "diloco:eager=true,lost=drop": "leave one of them out",
    "diloco:lost=drop,inside=dense": "leave those out",
    "local:lost=drop/topk": "use lost=raise, diloco, or leave the codec out",
    "local/topk:divide=senders": "leave out divide=senders, or use diloco",
    "local:node_size=2": "give inside=dense, or leave it out",
    "noloco:eager=true": "leave out eager",
    "noloco:inside=dense": "leave out inside",
    "noloco:states=average": "leave out states",
    # Words and numbers out of their range.
    "gossip:graph=line": "graph must be one of onepeer, exponential, ring, torus, star, complete, got",
    "gossip:every=0": "every must be at least 1",
    "gossip:consensus=1.5": r"consensus must be in \(0, 1\], got 1.5",
    "gossip:consensus=nan": "consensus must be in",
    "gossip:order=both": "order must be one of combine-then-adapt, adapt-then-combine",
    "gossip:lost=ignore": "lost must be one of raise, drop",
    "gossip:pushsum=maybe": "pushsum must be one of auto, on, off",
    "gossip:graph=ring,consensus=1/threshold": "use topk, sign, qsgd, bf16 or fp16",
    "diloco:delay=30": "delay must be below every / fragments = 30",
    "diloco:momentum=1": "momentum must be in",
    "diloco:outer_lr=0": "outer_lr must be positive",
    "diloco:layout=sequential": "layout has no effect with one fragment, got .sequential.",
    "local:states_every=2": "states_every has no effect without states=average, got 2: give",
    "diloco:topology=ring": "topology must be one of all, pairs",
    "diloco:eager=true,fragments=2": "eager needs delay=0 and fragments=1",
    # One schedule and one compressor.
    "diloco/local": "leave out the second",
    "diloco/topk/sign": "leave out the second",
}


def _program(momentum=0.0):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


@pytest.mark.parametrize("text", TEXTS)
def test_a_method_is_refused_with_what_to_write_instead(text):
    with pytest.raises(MethodError, match=TEXTS[text]):
        stenograd.method(text)


@pytest.mark.parametrize("text", ["dgc", "demo", "dion", "topk:feedback=ef21-sgdm"])
def test_momentum_would_act_twice(text):
    with pytest.raises(MethodError, match="set the optimizer's momentum to 0"):
        stenograd.distribute(*_program(momentum=0.9), text)


OWN_MOMENTUM = [text for text in stenograd.methods() if text not in for_any_optimizer()]


@pytest.mark.parametrize("text", [*OWN_MOMENTUM, "topk:feedback=ef21-sgdm"])
def test_adam_has_momentum_of_its_own_too(text):
    """Its first beta; without that, or for vectors that dion averages exactly, it may be used."""
    model, _ = _program()
    with pytest.raises(MethodError, match=r"AdamW has betas=\(0\.9, 0\.999\).*use torch\.optim\.SGD"):
        stenograd.distribute(model, torch.optim.AdamW(model.parameters()), text)
    stenograd.distribute(model, torch.optim.AdamW(model.parameters(), betas=(0.0, 0.999)), text).close()
    vectors = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2])
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.1)
    if text == "dion":
        stenograd.distribute(model, [matrices, vectors], text).close()
    else:
        with pytest.raises(MethodError, match="AdamW"):
            stenograd.distribute(model, [matrices, vectors], text)


@pytest.mark.parametrize("text", ["demo", "dion"])
def test_a_scaler_would_divide_a_direction_by_its_scale(text):
    """Not vectors, of which dion delivers the mean."""
    model, _ = _program()
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.1)
    vectors = torch.optim.SGD([p for p in model.parameters() if p.ndim < 2], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with stenograd.distribute(model, [matrices, vectors], text):
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        if text == "dion":
            scaler.step(vectors)
        with pytest.raises(MethodError, match=f"{text} delivers a direction, which .* by its scale, 1024"):
            scaler.step(matrices)


def _hooked(rank):
    model = nn.parallel.DistributedDataParallel(_program()[0])
    optimizer = torch.optim.AdamW(model.parameters())
    with stenograd.ddp.register(model, "demo", timeout_s=20):
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(MethodError, match=r"demo has momentum of its own, and AdamW has betas"):
            optimizer.step()
        scaler, sgd = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        with pytest.raises(MethodError, match="demo delivers a direction"):
            scaler.step(sgd)


def test_the_hook_refuses_adam_and_a_scaler_at_their_first_steps(pool):
    pool.run(2, _hooked)


def _cycled(rank, face):
    """Attach, and then let a scheduler cycle a momentum that was 0."""
    model, optimizer = _program()
    net, sync = attached(face, model, optimizer, "dgc")
    with sync:
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
        net(torch.ones(2, 3)).sum().backward()
        with pytest.raises(MethodError, match=r"dgc has momentum of its own, and SGD has momentum="):
            optimizer.step()


@pytest.mark.parametrize("face", ["distribute", "ddp"])
def test_a_scheduler_may_not_bring_a_second_momentum(pool, face):
    pool.run(2, _cycled, face)


@pytest.mark.parametrize(
    "text", ["gossip", "noloco", "diloco:every=4,fragments=2", "diloco:eager=true", "local:every=2/topk"]
)
def test_replicas_that_differ_by_design_are_not_compared(text):
    with pytest.raises(ConfigError, match=r"check_every must be 0 with .*replicas differ by design"):
        stenograd.distribute(*_program(), text, check_every=1)


def test_there_are_no_more_fragments_than_tensors():
    with pytest.raises(ConfigError, match="fragments must be at most the number of parameter tensors"):
        stenograd.distribute(*_program(), "diloco:every=10,fragments=5")


@pytest.mark.parametrize("text", ["local", "diloco", "noloco", "gossip"])
def test_programs_that_no_schedule_can_follow(text):
    """Several passes per step, ranks without batches, two owners, a hook that averages gradients."""
    model, optimizer = _program()
    with pytest.raises(ConfigError, match=r"must step once per backward pass.*got LBFGS: use another"):
        stenograd.distribute(model, torch.optim.LBFGS(model.parameters()), text)
    with stenograd.distribute(model, optimizer, text) as sync:
        with pytest.raises(StenogradError, match=r"where join\(\) works"):
            sync.join()
        with sync.join(enable=False):
            pass
        with pytest.raises(ConfigError, match=r"close\(\) the first"):
            stenograd.distribute(model, optimizer, "dense")
    with pytest.raises(MethodError, match=r"pass the model and its optimizer to stenograd\.distribute"):
        stenograd.ddp.register(nn.Linear(1, 1), text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diloco:every=6,delay=2", "give mix=0.5"),
        ("diloco:every=1,outer_lr=1,momentum=0", "local:every=1 does so with less memory"),
        ("diloco:topology=pairs,outer_lr=1,momentum=0.9", "give momentum=0.5"),
        ("diloco:every=4/topk:feedback=false", "is lost for good; leave out feedback=false"),
        ("diloco:every=4/lowbit:format=int2,feedback=no", "is lost for good; leave out feedback=false"),
    ],
)
def test_what_is_hardly_meant_is_warned_of(text, message):
    with pytest.warns(UserWarning, match=message):
        stenograd.distribute(*_program(), text).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fine in (
            "every=6,delay=2,mix=0.5",
            "every=4/topk",
            "every=4/lowbit",
            "every=4/qsgd",
            "every=4/fp16",
        ):
            stenograd.distribute(*_program(), f"diloco:{fine}").close()


def _frozen_parts(rank, kind):
    torch.manual_seed(0)
    frozen = nn.Linear(10, 8 if rank and kind == "shape" else 5).requires_grad_(False)
    model = nn.Sequential(nn.Linear(10, 10), frozen, *([frozen] if rank and kind == "shared" else []))
    if rank and kind == "extra":
        model.append(nn.Linear(5, 5).requires_grad_(False))
    if rank and kind == "thawed":
        frozen.requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    stenograd.distribute(model, optimizer, "dense", timeout_s=20)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "shape",
            r"parameter 1\.weight: rank 0 has \(5, 10\) torch\.float32, not averaged, rank 1 has \(8, 10\)",
        ),
        (
            "extra",
            r"parameter 2\.weight: rank 0 has nothing, rank 1 has \(5, 5\) torch\.float32, not averaged",
        ),
        ("thawed", r"ranks differ in parameters: rank 0 has 2, rank 1 has 4"),
    ],
)
def test_frozen_parameters_that_differ_are_named_before_they_are_broadcast(pool, kind, told):
    with pytest.raises(RanksFailed) as failed:
        pool.run(2, _frozen_parts, kind)
    for rank in range(2):
        assert re.search(told, failed.value.errors[rank]), failed.value.errors[rank]
        assert "MismatchError" in failed.value.errors[rank]


@pytest.mark.parametrize("text", ["topk", "local:every=2", "gossip"])
def test_two_engines_on_one_encoder_are_refused_in_any_order(text):
    """The encoder alone after the whole, two heads on one encoder, and what is apart or over is allowed."""
    encoder, heads = nn.Linear(3, 3), [nn.Linear(3, 2), nn.Linear(3, 2)]
    first, second = (nn.Sequential(encoder, head) for head in heads)

    def attach(model):
        return stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), text)

    with attach(first):
        for other in (encoder, second):
            with pytest.raises(ConfigError, match="averaged already, for another optimizer"):
                attach(other)
        attach(heads[1]).close()
    attach(second).close()
    stenograd.shutdown()


FACES = ["dense", "topk", "local:every=2", "diloco:every=2", "diloco:every=2,fragments=2", "gossip", "noloco"]


def _attached(face):
    model, optimizer = _program()
    if face != "ddp":
        return model, optimizer, model, stenograd.distribute(model, optimizer, face)
    net = nn.parallel.DistributedDataParallel(model)
    return model, optimizer, net, stenograd.ddp.register(net, "topk")


def _assign(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def _assign_inside(model):
    """As accelerate does, past `Module.__setattr__`."""
    model[1]._parameters["bias"] = nn.Parameter(torch.zeros(2))


REPLACED = {
    "assign": (_assign, "parameter 0.weight is not the one that was attached"),
    "inside": (_assign_inside, "parameter 1.bias is not the one"),
    "layer": (lambda m: m.__setitem__(1, nn.Linear(4, 2)), "parameter 1.weight is not the one"),
    "parameter": (lambda m: setattr(m[1], "bias", nn.Parameter(torch.zeros(2))), "parameter 1.bias is not"),
    "type": (lambda m: m.to(torch.float64), "parameter 0.weight was torch.float32 on cpu when"),
}


def _forward(net):
    net(torch.ones(1, 3, dtype=next(net.parameters()).dtype)).sum()


def _replaced(rank, face):
    told = {}
    for kind, (replace, _) in REPLACED.items():
        model, optimizer, net, sync = _attached(face)
        with sync:
            for _ in range(2):
                net(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            replace(model)
            with torch.no_grad():
                _forward(net)  # nothing is trained
            try:
                _forward(net)
            except StenogradError as error:
                told[kind] = str(error)
    return told


@pytest.mark.parametrize("face", [*FACES, "ddp"])
def test_parameters_that_were_replaced_are_named_in_the_next_forward_pass(pool, face):
    (told,) = pool.run(1, _replaced, face)
    for kind, (_, message) in REPLACED.items():
        assert message in told.get(kind, ""), kind


def _tied():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("text", FACES)
def test_what_trains_the_attached_parameters_is_no_replacement(text):
    """Ties, pruning, copies that stand in for a while, compiled or removed layers, other memory."""
    model, optimizer = _tied()
    with stenograd.distribute(model, optimizer, text):

        def step():
            optimizer.zero_grad()
            y = model["a"](torch.ones(1, 3))
            (model["b"](y) if "b" in model else y).sum().backward()
            optimizer.step()

        step()
        model["b"].weight = model["a"].weight
        step()
        prune.l1_unstructured(model["a"], "weight", 0.3)
        step()
        prune.remove(model["a"], "weight")
        step()
        model["a"].weight.data = model["a"].weight.detach().clone()
        step()
        model["a"] = torch.compile(model["a"], backend="eager")
        step()
        del model["b"]
        step()
    model, optimizer = _program()
    with stenograd.distribute(model, optimizer, text):
        other = dict(copy.deepcopy(model).named_parameters())
        torch.func.functional_call(model, other, (torch.ones(1, 3),)).sum().backward()
        model(torch.ones(1, 3)).sum().backward()


def test_a_weight_that_is_untied_is_named():
    model, optimizer = _tied()
    model["b"].weight = model["a"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "dense"):
        model["b"].weight = nn.Parameter(model["b"].weight.detach().clone())
        with pytest.raises(StenogradError, match=r"parameter b\.weight is not the one"):
            model["b"](torch.ones(1, 3))


def _swapped(rank, text):
    """Halve the weights by `load_state_dict` after two steps, by copies or where torch swaps parameters."""
    ends = []
    for swaps in (False, True):
        torch.manual_seed(0)
        model, optimizer = _program(momentum=0.9)
        sync = stenograd.distribute(model, optimizer, text, timeout_s=30)
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        try:
            for step in range(4):
                if step == 2:
                    model.load_state_dict({n: v / 2 for n, v in model.state_dict().items()})
                optimizer.zero_grad()
                model(torch.full((2, 3), 1.0 + rank)).square().mean().backward()
                optimizer.step()
            ends.append([p.detach().clone() for p in model.parameters()])
            if swaps:
                model.to(torch.float64)
                sync.refresh()
                optimizer.zero_grad()
                model(torch.full((2, 3), 1.0 + rank, dtype=torch.float64)).sum().backward()
                assert sync.step == 5
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
            sync.close()
    return ends


@pytest.mark.parametrize("text", ["dense", "topk:ratio=0.5,dense_below=0", "local:every=2", "gossip"])
def test_torch_may_swap_parameters(pool, text):
    """What it swaps has lost its gradient hooks, and must not have a weak reference."""
    for copied, swapped in pool.run(2, _swapped, text):
        assert all(map(torch.equal, copied, swapped))
