"""What every way to train on several ranks promises: six properties, each over all faces and methods."""

import copy
import os
import pickle
import warnings

import pytest
import torch
from models import ALL_METHODS
from support.faces import FP16, SGD, SINGAS, Face, Heat, Hook, MLBench, Odd, Singa, same
from support.training import mlp, on_whole_batches

import stenograd
from stenograd.mlbench import SignSGD
from stenograd.testing.methods import by_name
from stenograd.testing.pool import RanksFailed

LONG, SAVED = 12, 8  # steps: more than twice the warm-up of the methods that have one, and when to save
BAD = {3: float("nan"), 6: float("inf")}  # in the warm-up of those methods, and after it
pytestmark = pytest.mark.filterwarnings("ignore:a gradient was not finite")


def case(face, **keys):
    name = " ".join([face.__name__, *map(str, keys.values())])
    return pytest.param(face, keys, id=name)


def cases(face, **choices):
    (key, values), *_ = choices.items()
    return [case(face, **{key: value}) for value in values]


MLBENCHS = [
    *(case(MLBench, kind=kind, by_layer=by_layer) for kind in ("sgd", "adam") for by_layer in (False, True)),
    case(MLBench, kind="sgd", agg_grad=False),
    case(MLBench, kind="custom", inner=(torch.optim.Adam, {"lr": 0.01}), grad_clip=0.5),
    *(case(MLBench, kind="powersgd", reuse_query=reuse) for reuse in (False, True)),
    case(MLBench, kind="sparsified"),
    case(FP16, scale_window=3),
]
MODES = [
    *cases(Singa, mode=SINGAS),
    *(
        case(Singa, mode=mode, kind=kind)
        for mode in ("partial", "top-k")
        for kind in ("adam", "torch's adam")
    ),
]


def _goes_on(rank, world, face, keys):
    """Train in one go, saved on the way; from there in new objects, in copies, and in the same again."""
    whole = face(rank, world, mlp(rank), **keys)
    whole.train(range(SAVED))
    saved, twins = whole.save(), []
    if face in (MLBench, FP16):
        twins = [copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))]
    end, kept = whole.train(range(SAVED, LONG)), whole.kept()
    other = face(rank, world, mlp(9), **keys)
    ends = [(twin.train(range(SAVED, LONG)), twin.kept()) for twin in twins]
    for one in (other, whole):
        one.load(saved)
        ends.append((one.train(range(SAVED, LONG)), one.kept()))
        one.close()
    return end, [same((end, kept), found) for found in ends]


@pytest.mark.parametrize(
    ("face", "keys"),
    [*cases(Face, how=ALL_METHODS), *cases(Hook, how=ALL_METHODS), *MLBENCHS, *MODES]
    + [case(Heat, how="topk:ratio=0.1", blocking=blocking) for blocking in (True, False)],
)
def test_replicas_stay_equal_and_a_saved_training_goes_on_bit_for_bit(pool, face, keys):
    """Nothing brings ranks together again that differ in one bit, so the last step shows every difference.

    What is saved at the end is the same, too: a loss scale of a power of 2 changes no weight.
    """
    world = 2 if face in (Singa, FP16) else 3
    ranks = pool.run(world, _goes_on, world, face, keys)
    for end, ends in ranks:
        assert torch.isfinite(end).all()
        assert torch.equal(end, ranks[0][0]) or keys.get("mode") == "partial"
        assert all(ends)


def _loses(rank, face, keys, broken):
    """Train nine steps, of which two are bad on rank 1, or left out."""
    training = face(rank, 2, mlp(rank), **keys)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        end = training.train([s for s in range(9) if broken or s not in BAD], BAD)
    told = sum("not finite on some rank" in str(w.message) for w in caught)
    training.close()
    return end, training.skipped, told


@pytest.mark.parametrize(
    ("face", "keys"),
    [
        *cases(Face, how=by_name()),
        *cases(Hook, how=by_name()),
        *(case(MLBench, kind="powersgd", reuse_query=reuse) for reuse in (False, True)),
        case(MLBench, kind="sparsified"),
        *cases(Singa, mode=("plain", "half", "top-k", "threshold")),
    ],
)
def test_a_bad_step_on_one_rank_costs_exactly_that_step(pool, face, keys):
    """What all remember is what it would be without: the end is that of a run that leaves those steps out."""
    broken, clean = (pool.run(2, _loses, face, keys, how) for how in (True, False))
    for (end, skipped, told), (wanted, none, _) in zip(broken, clean, strict=True):
        assert torch.equal(end, wanted)
        assert (skipped, none) == (len(BAD), 0)
        assert told == (face in (Face, Hook))


TORCHS = {
    "sgd": (torch.optim.SGD, SGD),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 1e-2, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    # eps keeps the rounding of gradients near 0 from becoming whole steps
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "eps": 1e-3}),
    "signsgd": (SignSGD, {"lr": 0.01, "momentum": 0.5}),
}


def _decay(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def _dense(rank, world, face, keys, name, decays):
    if face in (Face, Hook, Heat) and name != "sgd":
        keys = {**keys, "optimizer": TORCHS[name]}
    training = face(rank, world, mlp(rank), **keys)
    end = training.train(range(8), scheduler=_decay(training.optimizer) if decays else None)
    training.close()
    return end


ORACLES = [
    *((Face, {"bucket_bytes": size}, "sgd", True) for size in (1, 1200, 4 << 20)),
    *((face, {}, name, True) for face in (Face, Hook, Heat) for name in ("sgd", "adam")),
    (Heat, {"blocking": True}, "adam", True),
    *((MLBench, {"kind": "sgd", "by_layer": by_layer}, "sgd", True) for by_layer in (False, True)),
    *((MLBench, {"kind": "adam", "by_layer": by_layer}, "amsgrad", True) for by_layer in (False, True)),
    *(
        (MLBench, {"kind": "custom", "inner": TORCHS[name], "divide_before": divides}, name, True)
        for name in TORCHS
        for divides in (False, True)
    ),
    *(
        (Singa, {"kind": kind, "threshold": n}, "sgd", False)
        for kind in ("singa", "torch")
        for n in (0, 1, 100)
    ),
    (Singa, {"threshold": 2**21}, "sgd", False),
]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    ("face", "keys", "name", "decays"),
    [pytest.param(*one, id=f"{one[0].__name__} {number} {one[2]}") for number, one in enumerate(ORACLES)],
)
def test_dense_training_equals_one_process_on_the_whole_batch(pool, face, keys, name, decays, world):
    """Equal shards, and rates that fall: up to the order in which four gradients are added."""
    kind, arguments = TORCHS[name]
    wanted = on_whole_batches(lambda ps: kind(ps, **arguments), world, 8, _decay if decays else None)
    atol = 2e-5 if name == "signsgd" else 5e-6
    for end in pool.run(world, _dense, world, face, keys, name, decays):
        torch.testing.assert_close(end, wanted, rtol=1e-4, atol=atol)


def _odd(rank, face, keys):
    """Train a model with parameters of every kind; only rank 0 uses one of its layers."""
    training = face(rank, 3, Odd(), **keys)
    model = training.model
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for s in range(4):
        training.step(
            lambda s=s: training.net(torch.full((2, 6), float(rank + s)), rank == 0).square().mean()
        )
    training.weights()
    training.close()
    assert model.unused.weight.grad is None or not model.unused.weight.grad.any()
    assert model.first.weight is model.tied.weight
    after = {n: p.detach().clone() for n, p in model.named_parameters()}
    return after, [n for n in after if torch.allclose(before[n], after[n]) and after[n].numel()]


@pytest.mark.parametrize(
    ("face", "keys"),
    [
        *(
            case(face, how=how, bucket_bytes=100)
            for face in (Face, Hook, Heat)
            for how in ("dense", "topk:ratio=0.5", "powersgd:rank=1", "sign", "fp16")
        ),
        *(
            case(MLBench, kind=kind, by_layer=by_layer, agg_grad=agg)
            for kind in ("sgd", "adam")
            for by_layer in (False, True)
            for agg in (False, True)
        ),
    ],
)
def test_frozen_tied_unused_mixed_scalar_and_empty_parameters(pool, face, keys):
    """Weight decay moves nothing that nobody used, and what one rank uses moves on all."""
    ranks = pool.run(3, _odd, face, keys)
    for after, unmoved in ranks:
        assert set(unmoved) == {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias"}
        for name, value in after.items():
            assert torch.equal(value, ranks[0][0][name]), name


def _dies(rank, face, keys):
    training = face(rank, 3, mlp(0), **keys)
    training.train(range(3))  # DDP itself talks in the second forward pass, when it makes new buckets
    if rank == 1:
        os._exit(9)
    with pytest.raises(stenograd.PeerLost) as caught:
        training.train(range(3, 9))
    assert caught.value.ranks == (1,), caught.value


@pytest.mark.parametrize(
    ("face", "keys"),
    [
        *(
            case(face, how=how, timeout_s=20)
            for face in (Face, Hook)
            for how in ("dense", "topk", "powersgd")
        ),
        case(MLBench, kind="sgd"),
        case(MLBench, kind="sparsified"),
        case(Singa, mode="plain", timeout_s=20),
        case(Singa, mode="top-k", timeout_s=20),
        case(Heat, how="topk", timeout_s=20),
    ],
)
def test_a_dead_rank_is_named_by_all_others(pool, face, keys):
    with pytest.raises(RanksFailed) as failed:
        pool.run(3, _dies, face, keys, timeout_s=60)
    assert list(failed.value.errors) == [1], failed.value
    assert "exit code 9" in failed.value.errors[1]
