"""What else ordinary programs do beside the engine: unused layers, hooks, wrappers, bad steps, mistakes."""

import gc
import warnings

import pytest
import torch
from models import SMALL_BUCKETS, flat, mlp, shards, step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stenograd


class _Calls(nn.Module):
    """Calls a model that is no part of it."""

    def __init__(self, called):
        super().__init__()
        self.last, self.called = nn.Linear(3, 1), [called]

    def forward(self, x):
        return self.last(self.called[0](x))


def _double(rank):
    """Both orders of wrapping; and a model that DDP only looks at without averaging."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 10)
    wrapped = DistributedDataParallel(model)
    with stenograd.distribute(wrapped.module, optimizer, "topk", timeout_s=30):
        with wrapped.no_sync():
            wrapped(x).sum().backward()  # DDP averages nothing here
        with pytest.raises(stenograd.errors.ConfigError, match=r"stenograd\.ddp\.register"):
            wrapped(x)
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "topk", timeout_s=30) as sync:
        later = DistributedDataParallel(model)
        with pytest.raises(stenograd.errors.ConfigError, match="inside DistributedDataParallel"):
            later(x)
        other = DistributedDataParallel(mlp(1))
        other(x).sum().backward()  # another model of the program's
        around = DistributedDataParallel(_Calls(model))
        around(x)
        assert [*sync._wrapping._harmless] == [around]
        del around
        gc.collect()
        assert not sync._wrapping._harmless  # the next one may come to lie there
    with pytest.raises(stenograd.errors.ConfigError, match=r"stenograd\.ddp\.register"):
        stenograd.distribute(wrapped, optimizer, "topk")


def test_averaging_twice_is_refused_in_both_orders(pool):
    pool.run(2, _double)


def _torchs_way(rank):
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "dense", skip_bad_steps=False, timeout_s=30):
        (model(torch.ones(1, 10)).sum() * (float("nan") if rank else 1.0)).backward()
        optimizer.step()
    return bool(flat(model).isnan().any())


def test_bad_steps_are_taken_where_that_is_asked_for(pool):
    assert pool.run(2, _torchs_way) == [True, True]


class _Branches(nn.Module):
    """The issue of DDP with unused parameters: layers, the first and the last, that alternate steps use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Linear(24, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.branch = nn.Linear(24, 24)

    def forward(self, x, use):
        x = self.front(x) if use else x
        for layer in self.layers:
            x = layer(x).relu()
        return self.branch(x) if use else x


def _unused(rank, method, options, uses):
    model = DistributedDataParallel(_Branches(), bucket_cap_mb=0.004, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hook = stenograd.ddp.register(model, method, timeout_s=30) if method else None
    for s in range(8):
        optimizer.zero_grad()
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * s + rank))
        if s % 3 == 2:
            with model.no_sync():
                model(x, uses[s % len(uses)]).square().mean().backward()
        model(x, uses[s % len(uses)]).square().mean().backward()
        optimizer.step()
    if hook is not None:
        hook.close()
    return flat(model)


@pytest.mark.parametrize(
    ("options", "uses"),
    [
        ({"find_unused_parameters": True}, [True, False]),
        ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, [False, True, True]),
        ({"find_unused_parameters": True, "skip_all_reduce_unused_params": True}, [True, False]),
        ({"find_unused_parameters": True, "skip_all_reduce_unused_params": True}, [False, True, True]),
        ({"static_graph": True}, [True]),
        ({"static_graph": True}, [False]),
        ({"gradient_as_bucket_view": True}, [True]),
    ],
)
def test_ddp_with_unused_parameters_and_its_other_options(pool, options, uses):
    """DDP all-reduces its map of used parameters itself; dense equals plain DDP, all keep replicas equal."""
    plain = pool.run(2, _unused, None, options, uses)
    for method in ("dense", "topk:ratio=0.1", "sign", "powersgd:rank=1"):
        first, second = pool.run(2, _unused, method, options, uses, timeout_s=60)
        assert torch.equal(first, second)
        if method == "dense":
            assert torch.equal(first, plain[0])
        if method == "topk:ratio=0.1" and options.pop("skip_all_reduce_unused_params", False):
            asked, _ = pool.run(2, _unused, method, options, uses, timeout_s=60)
            assert torch.equal(first, asked)  # what is owed to layers that were skipped is kept
            options["skip_all_reduce_unused_params"] = True


def _second_derivatives(rank, method):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(10, 5, bias=False))  # DDP itself fails with several parameters
    if method:
        stenograd.ddp.register(model, method, timeout_s=30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: the graph makes a cycle
        model(torch.randn(4, 10, generator=torch.Generator().manual_seed(rank))).square().mean().backward(
            create_graph=True
        )
    grads = [p.grad.detach().clone() for p in model.parameters()]
    model.zero_grad()
    return torch.cat([g.flatten() for g in grads])


def test_gradients_with_a_graph_are_averaged_as_ddp_does(pool):
    """DDP averages first-order gradients; a hook that multiplies into its own memory must not mind."""
    plain, dense, topk = (pool.run(2, _second_derivatives, how) for how in (None, "dense", "topk:ratio=0.5"))
    assert torch.equal(plain[0], dense[0])
    assert torch.equal(topk[0], topk[1])


def _breaks_off(rank, face):
    """A hook of the user's raises in the middle of a backward pass."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001) if face == "hook" else model
    if face == "hook":
        stenograd.ddp.register(wrapped, "topk", timeout_s=4)
    else:
        stenograd.distribute(model, optimizer, "topk", bucket_bytes=SMALL_BUCKETS, timeout_s=4)
    wrapped(torch.ones(1, 10)).sum().backward()

    def fails(grad):
        raise ValueError("the user's own")

    handle = model[0].weight.register_hook(fails)
    with pytest.raises(ValueError, match="the user's own"):
        wrapped(torch.ones(1, 10)).sum().backward()
    handle.remove()
    with pytest.raises((stenograd.StenogradError, RuntimeError), match=r"did not finish|prior iteration"):
        wrapped(torch.ones(1, 10)).sum().backward()


@pytest.mark.parametrize("face", ["distribute", "hook"])
def test_an_error_inside_a_backward_pass_is_named_in_the_next(pool, face):
    pool.run(2, _breaks_off, face)


def _codec_fails(rank):
    """An error in a bucket's encoding, in the thread or not, ends the exchange and is named afterwards."""
    from stenograd.compressors.sign import Sign

    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stenograd.distribute(model, optimizer, "sign:dense_below=20", bucket_bytes=SMALL_BUCKETS, timeout_s=5)
    encode, calls = Sign.encode_error, []

    def fails(self, *args):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no more")
        return encode(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sign, "encode_error", fails)
        with pytest.raises(MemoryError, match="no more"):
            model(torch.ones(1, 10)).sum().backward()
    with pytest.raises(stenograd.StenogradError, match="restart from a checkpoint"):
        model(torch.ones(1, 10)).sum().backward()


def test_an_error_in_an_exchange_ends_it(pool):
    pool.run(2, _codec_fails)


def _mistakes(rank):
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "dense", timeout_s=30) as sync:
        xs, ys = shards(0, 2)
        model.to(torch.float64)
        with pytest.raises(stenograd.StenogradError, match=r"sync\.refresh\(\)"):
            model(xs[rank].double()).sum().backward()
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "dense", timeout_s=30) as sync:
        model.to(torch.float64)
        sync.refresh()
        step(model, optimizer, xs[rank].double(), ys[rank].double())
        optimizer.zero_grad()
        params = list(model.parameters())
        for p, g in zip(params, torch.autograd.grad(model(xs[rank].double()).sum(), params), strict=True):
            p.grad = g
        with pytest.warns(RuntimeWarning, match=r"torch\.autograd\.grad"):
            optimizer.step()


def test_changed_types_and_gradients_made_by_hand_are_told(pool):
    pool.run(2, _mistakes)


def _other_kernels(rank):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("STENOGRAD_KERNELS", "reference")
        with pytest.raises(stenograd.errors.MismatchError, match="kernels"):
            stenograd.ddp.register(DistributedDataParallel(mlp(0)), "powersgd", timeout_s=30)


def test_the_ddp_hook_compares_kernels(pool):
    pool.run(2, _other_kernels)


def _loaded(rank, method):
    """Every version of every kernel that the first steps call was there when attaching returned."""

    gc.unfreeze()  # get_objects leaves out what ranks have imported before they were forked

    def known():
        compiled = [o for o in gc.get_objects() if type(o).__name__ == "CPUDispatcher"]
        return {(id(d), signature) for d in compiled for signature in d.signatures}

    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=60)
    before = known()
    for s in range(3):
        xs, ys = shards(s, 2)
        step(model, optimizer, xs[rank], ys[rank])
    sync.close()
    return len(before), len(known() - before)


@pytest.mark.parametrize("method", ["topk:ratio=0.1", "sign", "qsgd", "powersgd:rank=2"])
def test_the_first_step_finds_its_kernels_loaded(pool, method):
    for before, new in pool.run(2, _loaded, method):
        assert before > 0
        assert new == 0


def _local_after_bad(rank):
    """A bad exchange, then a pass that exchanges nothing, as DASO makes them between its own exchanges."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "topk", timeout_s=30) as sync:
        (model(torch.ones(1, 10)).sum() * float("nan")).backward()
        optimizer.step()
        before = flat(model)
        sync.enabled = False
        optimizer.zero_grad()
        model(torch.ones(1, 10)).sum().backward()
        optimizer.step()
        return torch.equal(before, flat(mlp(0))), torch.equal(before, flat(model)), sync.skipped


@pytest.mark.filterwarnings("ignore:a gradient was not finite")
def test_a_bad_exchange_costs_no_step_after_a_later_pass_without_one(pool):
    """The first step changes nothing; the second, on this rank's own finite gradients, does."""
    assert pool.run(2, _local_after_bad) == [(True, False, 1)] * 2
