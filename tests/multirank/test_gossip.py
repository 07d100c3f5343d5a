"""Gossip and decentralized SGD on real gloo ranks."""

import copy
import pickle
import time

import pytest
import torch
from torch import nn

from stenograd.errors import ConfigError, MismatchError, PeerLost, TensorTypeError
from stenograd.mlbench.backends import global_average, initialize_backends
from stenograd.mlbench.decentralized import DecentralizedAggregation, DecentralizedSGD
from stenograd.mlbench.tracker import Tracker
from stenograd.sync.gossip import Gossip
from stenograd.topology import Complete, DirectedOnePeer, Graph, OnePeer, Ring, mixing_matrix
from stenograd.wire.driver import Driver

TOPOLOGIES = [
    Ring(),
    Complete(),
    OnePeer(),
    DirectedOnePeer(),
    Graph.star(4),
    Graph.star(4, "metropolis"),
    Graph.chain(4),
]
RING = {4: [[1, 3], [0, 2], [1, 3], [0, 2]], 3: [[1, 2], [0, 2], [0, 1]], 2: [[1], [0]]}
STAR = [[1, 2], [0], [0]]


def _values(rank):
    generator = torch.Generator().manual_seed(rank)
    shapes = [(4, 3), (), (0, 2), (7,)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def _mixed(rank, separately):
    """Later ranks are slower, so messages come in every order."""
    out = []
    for topology in TOPOLOGIES:
        time.sleep(0.002 * rank)
        tensors = [*_values(rank), torch.full((3,), float(rank), dtype=torch.float16)]
        gossip = Gossip(Driver(timeout_s=30), topology)
        for _ in range(3):
            gossip.mix(tensors, separately=separately)
        out.append((tensors, gossip.driver.traffic, gossip.state_dict()))
    return out


@pytest.mark.parametrize("separately", [False, True])
def test_gossip_is_the_mixing_matrix_times_the_values(pool, separately):
    """Three mixings: W2 W1 W0 x, for every entry of every tensor."""
    ranks = pool.run(4, _mixed, separately)
    for i, topology in enumerate(TOPOLOGIES):
        product = torch.eye(4, dtype=torch.float64)
        for step in range(3):
            product = mixing_matrix(topology, 4, step) @ product
        for k in range(4):
            start = torch.stack([_values(rank)[k] for rank in range(4)])
            for rank in range(4):
                expected = torch.tensordot(product[rank], start, 1)
                torch.testing.assert_close(ranks[rank][i][0][k], expected, rtol=1e-12, atol=1e-12)
        halves = torch.stack([ranks[rank][i][0][4][0] for rank in range(4)]).double()
        torch.testing.assert_close(halves, product @ torch.arange(4.0).double(), rtol=3e-3, atol=3e-3)


def test_traffic_is_payload_times_peers(pool):
    """12 + 1 + 7 doubles and 3 halves are 166 bytes, padded to 168; a ring of 4 has two neighbours."""
    for rank in pool.run(4, _mixed, False):
        traffic, state = rank[0][1:]
        assert (traffic.payload_bytes, traffic.moved_bytes, traffic.collectives) == (3 * 168, 3 * 336, 3)
        assert traffic.wait_s > 0
        assert state == {"step": 3}


def _refused(rank):
    gossip = Gossip(Driver(timeout_s=30), Ring())
    with pytest.raises(TensorTypeError, match=r"got torch.int64"):
        gossip.mix([torch.zeros(2, dtype=torch.int64)])
    with pytest.raises(ConfigError, match="size must be the graph's, 3, got 2"):
        Gossip(gossip.driver, Graph.star(3))


def test_what_cannot_be_mixed_is_refused(pool):
    pool.run(2, _refused)


class Turning:
    """A ring whose rank 0 forgets rank 1 at a step, while rank 1 still waits for it."""

    def __init__(self, at):
        self.at = at

    def weights(self, rank, size, step):
        row = dict(Ring().weights(rank, size, step))
        if (rank, step) == (0, self.at):
            row[0] += row.pop(1)
        return row


def _asymmetric_later(rank):
    gossip, x = Gossip(Driver(timeout_s=60), Turning(at=2)), torch.tensor([float(rank)])
    gossip.mix([x])
    gossip.mix([x])
    before, moved = x.clone(), gossip.driver.traffic.moved_bytes
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            gossip.mix([x])
    assert time.monotonic() - start < 30  # not the timeout
    assert torch.equal(x, before)
    assert (gossip.step, gossip.driver.traffic.moved_bytes) == (2, moved)
    return str(refused.value)


def test_a_graph_that_is_asymmetric_at_a_later_step_is_refused_on_all_ranks(pool):
    """Rank 3 has nothing to do with it and would go on; ranks 0 and 1 would wait in vain."""
    for told in pool.run(4, _asymmetric_later):
        assert "neighbours at step 2 must be symmetric, got rank 0 among those of rank 1, not" in told


def _different(rank):
    driver = Driver(timeout_s=60)
    for mine, says in [
        (
            OnePeer() if rank == 1 else Complete(),
            r"topology: rank 0 has Complete\(\) .*, rank 1 has OnePeer\(\)",
        ),
        (Graph.chain(2, ["uniform", "metropolis"][rank]), "topology: rank 0 has Graph"),
        (Turning(at=5 + rank), "topology: rank 0 has Turning .*, rank 1 has Turning"),
    ]:
        with pytest.raises(MismatchError, match=says):
            Gossip(driver, mine)
    with pytest.raises(MismatchError, match="lost: rank 0 has raise, rank 1 has drop"):
        Gossip(driver, Ring(), lost=["raise", "drop"][rank])
    Gossip(driver, Turning(at=100)).mix([torch.ones(1)])  # two objects, and equal graphs


def test_ranks_with_different_graphs_are_told_so(pool):
    pool.run(2, _different)


def _lost(rank, folder):
    gossip = Gossip(Driver(timeout_s=1), Ring())
    start = time.monotonic()
    if rank == 1:
        while len(list(folder.iterdir())) < 2 and time.monotonic() - start < 60:
            time.sleep(0.1)
        return None
    x = torch.ones(3)
    with pytest.raises(
        PeerLost, match=r"exchange of 12 bytes with rank\(s\) 1, 2 failed|with rank\(s\) 0, 1"
    ):
        gossip.mix([x])
    assert x.tolist() == [1, 1, 1]
    took = time.monotonic() - start
    (folder / str(rank)).touch()
    return took


def test_a_lost_neighbour_is_an_error_within_the_timeout(pool, tmp_path):
    """One second to wait and two for the roll call, on idle cores; the neighbour stays silent up to 60."""
    took = pool.run(3, _lost, tmp_path)
    assert max(took[0], took[2]) < 20


def _model(rank):
    """One weight that is the rank, and a frozen one, the rank tenfold."""
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor([float(rank)]))
    model.frozen = nn.Parameter(torch.tensor([10.0 * rank]), requires_grad=False)
    return model


def _stepped(rank, neighbors, options):
    model = _model(rank)
    optimizer = DecentralizedSGD(rank, neighbors[rank], model, lr=1.0, timeout_s=30, **options)
    assert optimizer.step(lambda: torch.tensor(7.0)) == 7.0
    return float(model.w), float(model.frozen)


@pytest.mark.parametrize(
    ("size", "neighbors", "options", "expected"),
    [
        (4, RING[4], {}, [4 / 3, 1, 2, 5 / 3]),
        (4, RING[4], {"by_layer": True}, [4 / 3, 1, 2, 5 / 3]),
        (3, STAR, {}, [1, 0.5, 1]),
        (3, STAR, {"weights": "metropolis"}, [1, 2 / 3, 4 / 3]),
        (3, RING[3], {}, [1, 1, 1]),
        (2, RING[2], {}, [0.5, 0.5]),
        (1, [[]], {}, [0]),
    ],
)
def test_weights_after_a_step_without_gradients(pool, size, neighbors, options, expected):
    """Rank r holds r, so rank i ends with the sum over j of W_ij j; a Metropolis star keeps the mean 1."""
    ranks = pool.run(size, _stepped, neighbors, options)
    assert [w for w, _ in ranks] == pytest.approx(expected, rel=1e-6)
    assert [frozen for _, frozen in ranks] == pytest.approx([10 * e for e in expected], rel=1e-6)


def _trained(rank, size, steps):
    """Each rank pulls towards its own target; the momentum is its own."""
    torch.manual_seed(rank)
    model = nn.Linear(3, 1)
    optimizer = DecentralizedSGD(
        None, RING[size][rank], model, 0.05, 0.9, weight_decay=0.01, nesterov=True, timeout_s=30
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    tracker = Tracker([], 0, rank)
    start = [p.detach().clone() for p in model.parameters()]
    grads = []
    for step in range(steps):
        if step == steps // 2:
            model, optimizer = copy.deepcopy((model, optimizer))
            kept = optimizer.state_dict()
            model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
            optimizer.load_state_dict(kept)
            scheduler, old = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), scheduler
            scheduler.load_state_dict(old.state_dict())

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (model(torch.eye(3)) - rank).square().mean()
            loss.backward()
            return loss

        tracker.batch_start()
        loss = optimizer.step(closure, tracker)
        tracker.batch_end()
        assert loss.requires_grad
        grads.append([p.grad.clone() for p in model.parameters()])
        scheduler.step()
    assert tracker.get_total_communication_time() > 0
    assert optimizer.traffic.collectives > 0
    return start, grads, [p.detach() for p in model.parameters()]


def test_training_equals_local_sgd_and_mixing_in_one_process(pool):
    """Copies, pickles and checkpoints on the way change nothing; momentum stays on its rank."""
    size, steps = 3, 6
    ranks = pool.run(size, _trained, size, steps)
    starts, grads, finals = zip(*ranks, strict=True)
    locals_ = [[nn.Parameter(t.clone()) for t in start] for start in starts]
    optimizers = [torch.optim.SGD(ps, 0.05, 0.9, weight_decay=0.01, nesterov=True) for ps in locals_]
    matrix = mixing_matrix(Graph(RING[size]), size).float()
    for step in range(steps):
        for rank, (params, optimizer) in enumerate(zip(locals_, optimizers, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * 0.5 ** (step // 2)
            for p, g in zip(params, grads[rank][step], strict=True):
                p.grad = g
            optimizer.step()
        with torch.no_grad():
            for same in zip(*locals_, strict=True):
                mixed = torch.tensordot(matrix, torch.stack(list(same)), 1)
                for p, value in zip(same, mixed, strict=True):
                    p.copy_(value)
    for params, final in zip(locals_, finals, strict=True):
        for p, value in zip(params, final, strict=True):
            torch.testing.assert_close(p.detach(), value, rtol=1e-5, atol=1e-6)


def _averaged_gradients(rank):
    model = nn.Module()
    model.a, model.b, model.c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    model.a.grad = torch.full((2,), float(rank))
    if rank == 1:
        model.b.grad = torch.ones(2)
    aggregation = DecentralizedAggregation(rank, RING[3][rank], timeout_s=30)
    aggregation.agg_grad(by_layer=rank < 0)(model, "avg_world")
    with pytest.raises(ConfigError, match="op must be 'avg_world'"):
        aggregation.agg_model()(model, "avg_custom", torch.tensor(2.0))
    return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


def test_gradients_can_be_averaged_and_unused_ones_stay_none(pool):
    """Rank r has r: the mean is 1. Only rank 1 has a gradient of b, 1: the mean is 1/3."""
    for a, b, c in pool.run(3, _averaged_gradients):
        assert a == pytest.approx([1, 1])
        assert b == pytest.approx([1 / 3, 1 / 3])
        assert c is None


def _bad_graphs(rank, cases):
    for ranks, neighbors, options, error, says in cases:
        with pytest.raises(error, match=says):
            DecentralizedSGD(ranks[rank], neighbors[rank], _model(rank), 0.1, timeout_s=30, **options[rank])


def test_a_mistake_of_one_rank_is_an_error_on_all(pool):
    own, plain = [0, 1, 2], [{}] * 3
    by_layer = [{"by_layer": rank == 2} for rank in range(3)]
    rule = [{"weights": "metropolis" if rank == 1 else "uniform"} for rank in range(3)]
    cases = [
        (own, [[1], [0, 2], []], plain, ConfigError, "must be symmetric, got rank 2 among those of rank 1"),
        (own, [[1], [0], None], plain, ConfigError, "neighbors of rank 2 must be a list of ranks, got None"),
        (own, [[1], [0], 5], plain, ConfigError, "neighbors of rank 2 must be a list of ranks, got '5'"),
        (own, [[0], [], []], plain, ConfigError, "neighbours of rank 0 must be other ranks"),
        (own, [[], [3], []], plain, ConfigError, "neighbours of rank 1 must be other ranks of 0..2"),
        ([0, 2, 2], RING[3], plain, ConfigError, "rank on rank 1 must be 1 as in the group, got 2"),
        (own, RING[3], rule, ConfigError, "weights on rank 1 must be 'uniform' as on rank 0"),
        (own, RING[3], by_layer, MismatchError, "by_layer"),
    ]
    pool.run(3, _bad_graphs, cases)


def _bad_options(rank):
    for options, says in [
        ({"model": None, "lr": 0.1}, "model must be a module"),
        ({"model": nn.Linear(1, 1)}, "lr must be given"),
        ({"model": nn.Linear(1, 1), "lr": 0.1, "average_world": False}, "average_world must be True"),
    ]:
        with pytest.raises(ConfigError, match=says):
            DecentralizedSGD(rank, [], **options)


def test_bad_options(pool):
    pool.run(1, _bad_options)


def _backends(rank, size):
    with initialize_backends("gloo", seed=3) as (place, world_size, graph):
        assert (place, world_size) == (rank, size)
        assert graph.neighbors == [r for r in range(size) if r != rank]
        first = torch.rand(1).item()
        mean = global_average(torch.tensor(float(rank)), rank).item()
    with pytest.raises(ConfigError, match=r"count must be above 0 on some rank, got 0\.0"):
        global_average(0, 0)  # the group that was there before is there still
    return first, mean


def test_backends_and_the_global_average(pool):
    """Sums 0 + 1 + 2 over counts 0 + 1 + 2."""
    assert {mean for _, mean in pool.run(3, _backends, 3)} == {1.0}
