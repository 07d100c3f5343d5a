"""The simulated network: real ranks' results, and an error where real ranks would hang."""

import numpy as np
import pytest
import torch

from stenograd.compression.contract import Site, average_of
from stenograd.compressors.identity import Identity
from stenograd.compressors.powersgd import PowerSGD
from stenograd.errors import WireError
from stenograd.simulate import exchange, ranks, run
from stenograd.wire.requests import gather, mean


def test_the_average_is_numpys_mean():
    xs = [torch.from_numpy(np.random.default_rng(r).standard_normal((4, 3))) for r in range(5)]
    for e in exchange(Identity(), xs):
        assert np.allclose(e.average.numpy(), np.mean([x.numpy().reshape(-1) for x in xs], axis=0))


def test_division_comes_before_summing():
    """Four times 40,000 in float16: the sum would be infinite."""
    out = exchange(Identity(), [torch.tensor([40000.0], dtype=torch.float16)] * 4)
    assert out[0].average.tolist() == [40000]


def test_inputs_are_not_modified():
    xs = [torch.ones(3), torch.zeros(3)]
    exchange(Identity(), xs)
    assert [x.tolist() for x in xs] == [[1, 1, 1], [0, 0, 0]]


def test_ranks_do_not_share_memory():
    first, second = exchange(Identity(), [torch.ones(2), torch.zeros(2)])
    first.average.zero_()
    assert second.average.tolist() == [0.5, 0.5]


def test_the_spy_sees_every_request():
    requests = []
    x = torch.ones(30, 20)
    exchange(PowerSGD(rank=1), [x, x], spy=requests.append)
    assert [r.nbytes for r in requests] == [60, 40]


def test_different_shapes_are_an_error():
    with pytest.raises(WireError, match="all must ask for the same"):
        run([mean(torch.zeros(2)), mean(torch.zeros(3))])


def test_different_collectives_are_an_error():
    with pytest.raises(WireError, match="all must ask for the same"):
        run([mean(torch.zeros(2)), gather(torch.zeros(2))])


def test_a_rank_that_ends_early_is_an_error():
    def silent():
        return
        yield

    with pytest.raises(WireError, match="1 of 2 ranks ended"):
        run([mean(torch.zeros(1)), silent()])


def test_the_mean_of_no_tensors_is_refused():
    with pytest.raises(ValueError, match="give at least one"):
        average_of([])


def test_generators_are_shared_or_private_and_never_global():
    before = torch.random.get_rng_state()
    sites = [Site(shapes=(), rank=r, step=s, key=k) for r in (0, 1) for s in (0, 1) for k in (0, 1)]
    private = [torch.rand(1, generator=site.generator(7, shared=False)).item() for site in sites]
    shared = [torch.rand(1, generator=site.generator(7, shared=True)).item() for site in sites]
    assert len(set(private)) == 8
    assert shared[:4] == shared[4:]
    assert len(set(shared)) == 4
    assert not set(shared) & set(private)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_each_rank_runs_its_backward_passes_itself():
    """With autograd's one thread for a device, the first rank that waits there would block the others."""

    def passes(driver):
        seen = []
        w = torch.ones(1, requires_grad=True)
        w.register_hook(lambda grad: seen.append(torch._C._is_multithreading_enabled()))
        w.sum().backward()
        return seen

    assert ranks(2, passes) == [[False], [False]]
    assert torch._C._is_multithreading_enabled()
