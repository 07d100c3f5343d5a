"""Graphs of neighbours: their matrices by hand, what gossip on them does, and what is refused."""

import math

import pytest
import torch

from stenograd.errors import ConfigError, WireError
from stenograd.simulate import run
from stenograd.sync.mixing import mixing
from stenograd.topology import (
    Checked,
    Complete,
    DirectedOnePeer,
    Graph,
    OnePeer,
    Ring,
    check,
    mixing_matrix,
    second_eigenvalue,
)
from stenograd.wire.requests import Op, Request, exchange, together

TOPOLOGIES = [
    (Complete(), 5),
    (Ring(), 1),
    (Ring(), 2),
    (Ring(), 7),
    (OnePeer(), 8),
    *(
        (graph, len(graph.neighbours))
        for rule in ("uniform", "metropolis")
        for graph in (
            Graph([[]], rule),
            Graph.star(5, rule),
            Graph.chain(4, rule),
            Graph.torus(3, 4, rule),
            Graph.torus(2, 2, rule),
            Graph.hypercube(3, rule),
            Graph.exponential(6, rule),
        )
    ),
]


def _gossip(values, topology, steps=1):
    """Values of the simulated ranks after some mixings."""
    xs = [torch.tensor([value], dtype=torch.float64) for value in values]
    checked = Checked(topology, len(xs))
    for step in range(steps):
        rows = [checked.row(rank, step) for rank in range(len(xs))]
        run([mixing([x], rows[rank], rank, checked.targets(rank, step)) for rank, x in enumerate(xs)])
    return [float(x) for x in xs]


@pytest.mark.parametrize(("topology", "size"), TOPOLOGIES)
def test_rows_sum_to_one_and_the_relation_is_symmetric(topology, size):
    check(topology, size)
    matrix = mixing_matrix(topology, size)
    torch.testing.assert_close(matrix.sum(1), torch.ones(size, dtype=torch.float64))
    assert torch.equal(matrix != 0, matrix.t() != 0)
    assert bool((matrix >= 0).all())
    assert 0 <= second_eigenvalue(topology, size) < 1 or isinstance(topology, OnePeer)


@pytest.mark.parametrize(("topology", "size"), TOPOLOGIES)
def test_mixing_is_the_matrix_times_the_values(topology, size):
    values = [float(rank**2) for rank in range(size)]
    expected = mixing_matrix(topology, size) @ torch.tensor(values, dtype=torch.float64)
    assert _gossip(values, topology) == pytest.approx(expected.tolist(), rel=1e-12)


def test_a_ring_of_four():
    """Rank 0 has (3 + 0 + 1) / 3, rank 3 has (2 + 3 + 0) / 3."""
    assert _gossip([0, 1, 2, 3], Ring()) == pytest.approx([4 / 3, 1, 2, 5 / 3])


def test_uniform_weights_move_the_mean_of_a_star_and_metropolis_weights_keep_it():
    """Values 0, 1, 2: the centre has 1, the leaves (1 + 0) / 2 and (2 + 0) / 2, so the mean falls to 5/6."""
    assert _gossip([0, 1, 2], Graph.star(3)) == pytest.approx([1, 0.5, 1])
    for steps in (1, 2, 50):
        assert sum(_gossip([0, 1, 2], Graph.star(3, "metropolis"), steps)) / 3 == pytest.approx(1, abs=1e-6)


def test_a_ring_of_eight_converges_as_the_second_eigenvalue_predicts():
    """The distance from the mean shrinks by (1 + 2 cos(pi/4)) / 3 = 0.8047 a step."""
    values = torch.randn(8, generator=torch.Generator().manual_seed(0)).tolist()
    mean = math.fsum(values) / 8

    def distance(steps):
        return math.dist(_gossip(values, Ring(), steps), [mean] * 8)

    rate = (distance(40) / distance(10)) ** (1 / 30)
    assert second_eigenvalue(Ring(), 8) == pytest.approx(0.804738, abs=1e-6)
    assert rate == pytest.approx(second_eigenvalue(Ring(), 8), rel=0.1)


def test_one_peer_reaches_the_mean_in_log2_steps():
    assert _gossip(range(8), OnePeer(), steps=3) == [3.5] * 8


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 8, 13])
def test_the_directed_one_peer_graph_is_doubly_stochastic_for_any_number_of_ranks(size):
    for step in range(8):
        matrix = mixing_matrix(DirectedOnePeer(), size, step)
        ones = torch.ones(size, dtype=torch.float64)
        assert torch.equal(matrix.sum(0), ones)
        assert torch.equal(matrix.sum(1), ones)
        for rank in range(size):
            sent = [other for other in range(size) if matrix[other, rank] and other != rank]
            assert sent == list(DirectedOnePeer().targets(rank, size, step))
            assert len(sent) == min(size - 1, 1)
        values = [float(rank**2) for rank in range(size)]
        found = _gossip(values, DirectedOnePeer(), step + 1)
        assert sum(found) == pytest.approx(sum(values), rel=1e-12)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_the_directed_one_peer_graph_reaches_the_mean_in_log2_steps(size):
    """Sums of 2^k neighbours around the ring, divided by 2^k: exact in binary."""
    steps = size.bit_length() - 1
    assert _gossip(range(size), DirectedOnePeer(), steps) == [(size - 1) / 2] * size
    assert len(set(_gossip(range(size), DirectedOnePeer(), steps - 1))) > 1


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_the_directed_one_peer_graph_comes_to_the_mean_for_other_numbers(size):
    found = _gossip(range(size), DirectedOnePeer(), 60)
    assert found == pytest.approx([(size - 1) / 2] * size, abs=1e-9)


class _Arrows:
    """A directed graph given by its rows and, if they are not what the rows say, its targets."""

    def __init__(self, rows, targets=None):
        self.rows, self.named = rows, targets

    def weights(self, rank, size, step):
        return self.rows[rank]

    def targets(self, rank, size, step):
        if self.named is not None:
            return self.named[rank]
        return [other for other in range(size) if rank in self.rows[other] and other != rank]


AROUND = [{0: 0.5, 2: 0.5}, {0: 0.5, 1: 0.5}, {1: 0.5, 2: 0.5}]
UNEVEN = [{0: 1 / 3, 1: 0.5}, {0: 1 / 3, 1: 0.5, 2: 0.5}, {0: 1 / 3, 2: 0.5}]  # 0 sends to 1 and 2


def test_a_directed_graph_is_checked():
    check(_Arrows(AROUND), 3)
    check(_Arrows(UNEVEN), 3, push_sum=True)
    with pytest.raises(ConfigError, match="weights of rank 0 at step 0 must sum to 1"):
        check(_Arrows(UNEVEN), 3)
    tilted = [{0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}, {1: 0.5, 2: 0.5}]
    with pytest.raises(ConfigError, match="weights that ranks give to rank 1 at step 0 must sum to 1, got"):
        check(_Arrows(tilted), 3)
    with pytest.raises(
        ConfigError, match=r"targets of rank 0 at step 0 must be .* name it, \[1\], got \[2\]"
    ):
        check(_Arrows(AROUND, [[2], [2], [0]]), 3)
    with pytest.raises(ConfigError, match="targets of rank 0 at step 1 must be"):
        check(_Arrows(AROUND, [[2], [2], [0]]), 3, step=1, known=AROUND)
    with pytest.raises(ConfigError, match="weights that ranks give to rank 0 at step 0 must sum to 1"):
        check(Graph.star(3), 3, push_sum=True)


def test_push_sum_keeps_the_mean_where_ranks_send_to_unequally_many():
    """x <- A x and w <- A w with columns that sum to 1; x / w comes to the mean 3 of 0, 2 and 7."""
    zs = [torch.tensor([value], dtype=torch.float64) for value in (0.0, 2.0, 7.0)]
    ws = [torch.ones((), dtype=torch.float64) for _ in zs]
    graph, matrix = _Arrows(UNEVEN), mixing_matrix(_Arrows(UNEVEN), 3)
    x, w = torch.tensor([0.0, 2.0, 7.0], dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for step in range(80):
        run([mixing([zs[r]], UNEVEN[r], r, graph.targets(r, 3, step), ws[r]) for r in range(3)])
        x, w = matrix @ x, matrix @ w
        torch.testing.assert_close(torch.cat(zs), x / w, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.stack(ws), w, rtol=1e-12, atol=0)
        assert float(torch.stack(ws).sum()) == pytest.approx(3, rel=1e-12)
    assert [float(z) for z in zs] == pytest.approx([3.0] * 3, rel=1e-9)
    assert float(w[1]) > 1.1  # so the weights did matter


def test_push_sum_leaves_out_a_rank_that_is_not_finite():
    """Rank 1 has NaN: its weight goes, rank 2 keeps half of its own, and the mean of 0 and 4 is kept."""
    zs = [torch.tensor([value], dtype=torch.float64) for value in (0.0, math.nan, 4.0)]
    ws = [torch.ones((), dtype=torch.float64) for _ in zs]
    graph = _Arrows(AROUND)
    told = run([mixing([zs[r]], AROUND[r], r, graph.targets(r, 3, 0), ws[r]) for r in range(3)])
    assert told == [True, False, False]
    assert [float(z) for z in zs] == [2.0, 0.0, 4.0]
    assert [float(w) for w in ws] == [1.0, 0.5, 0.5]
    assert sum(float(w * z) for w, z in zip(ws, zs, strict=True)) / 2 == 2.0


def test_a_rank_that_is_not_finite_leaves_its_weight_to_whoever_would_have_taken_it():
    """Ranks 0 and 2 have 0 and 6: each keeps 2/3 of its own; rank 1, with NaN, gets the mean of both."""
    xs = [torch.tensor([value]) for value in (0.0, math.nan, 6.0)]
    told = run([mixing([x], dict.fromkeys(range(3), 1 / 3), rank) for rank, x in enumerate(xs)])
    assert told == [False] * 3
    torch.testing.assert_close(torch.cat(xs), torch.tensor([2.0, 3.0, 4.0]))


def test_tensors_of_several_types_go_in_one_message_a_neighbour():
    """Ranks hold r in float32 and 2r in bfloat16; rank 0 gets the means of 3, 0, 1: 4/3 and 8/3."""
    requests = []
    ranks = [
        (torch.full((2, 3), float(r)), torch.full((5,), 2.0 * r, dtype=torch.bfloat16)) for r in range(4)
    ]
    run([mixing(ts, Ring().weights(r, 4, 0), r) for r, ts in enumerate(ranks)], spy=requests.append)
    assert [(request.op, request.peers, request.nbytes) for request in requests] == [
        (Op.EXCHANGE, (1, 3), 34)
    ]
    torch.testing.assert_close(ranks[0][0], torch.full((2, 3), 4 / 3))
    torch.testing.assert_close(ranks[0][1], torch.full((5,), 8 / 3, dtype=torch.bfloat16))


def test_exchanges_are_merged_by_their_peers():
    def rank(r):
        parts = [exchange([torch.tensor([10.0 * r + i])], [1 - r]) for i in range(2)]
        return together([*parts, exchange([torch.tensor([r])], [])])

    for r, (first, second, alone) in enumerate(run([rank(0), rank(1)])):
        assert float(first[1 - r][0]) == 10 * (1 - r)
        assert float(second[1 - r][0]) == 10 * (1 - r) + 1
        assert alone == {}


@pytest.mark.parametrize(
    ("peers", "says"),
    [
        ([[1], []], r"rank 0 exchanges with rank 1, whose peers are \[\]: the relation must be symmetric"),
        ([[0], [0]], "rank 0 of 2 cannot exchange with rank 0"),
        ([[2], [0]], "rank 0 of 2 cannot exchange with rank 2"),
    ],
)
def test_simulated_ranks_refuse_what_would_hang_real_ones(peers, says):
    with pytest.raises(WireError, match=says):
        run([exchange([torch.zeros(1)], theirs) for theirs in peers])


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ([([1], []), ([], [])], r"rank 0 sends to rank 1, whose sources are \[\]"),
        ([([], [1]), ([], [])], r"rank 0 waits for rank 1, which sends to \[\]"),
        ([([], [0]), ([], [])], "rank 0 of 2 cannot exchange with rank 0"),
    ],
)
def test_simulated_ranks_refuse_directed_exchanges_that_would_hang_real_ones(ends, says):
    with pytest.raises(WireError, match=says):
        run([exchange([torch.zeros(1)], *theirs) for theirs in ends])


def test_peers_are_ascending_and_belong_to_an_exchange():
    for op, peers in ((Op.MEAN, (1,)), (Op.EXCHANGE, (2, 1)), (Op.EXCHANGE, (1, 1))):
        with pytest.raises(WireError, match="peers are ascending ranks of an EXCHANGE"):
            Request(op, (), peers)
    with pytest.raises(WireError, match="sources are ascending ranks of an EXCHANGE"):
        Request(Op.EXCHANGE, (), (1,), (2, 1))


@pytest.mark.parametrize(
    ("neighbours", "says"),
    [
        ([[1], []], "neighbours must be symmetric, got rank 1 among those of rank 0"),
        ([[0]], r"neighbours of rank 0 must be other ranks of 0..0, each once, got \[0\]"),
        ([[1, 1], [0]], "each once"),
        ([[1.0], [0]], "must be other ranks"),
        ({0: [2], 2: [0]}, r"must be given for ranks 0..size-1, got \[0, 2\]"),
        ([], "must be given for ranks"),
    ],
)
def test_bad_neighbours(neighbours, says):
    with pytest.raises(ConfigError, match=says):
        Graph(neighbours)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Graph([[]], "equal"), "weights must be one of uniform, metropolis, got 'equal'"),
        (lambda: Graph.star(3).weights(0, 4, 0), "size must be the graph's, 3, got 4"),
        (lambda: Ring().weights(4, 4, 0), "rank must be in 0..3, got 4"),
        (lambda: OnePeer().weights(0, 6, 0), "must be a power of 2"),
    ],
)
def test_bad_arguments(call, says):
    with pytest.raises(ConfigError, match=says):
        call()


class _Rows:
    def __init__(self, rows):
        self.rows = rows

    def weights(self, rank, size, step):
        return self.rows[rank]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{0: 0.5, 1: 0.4}, {0: 0.5, 1: 0.5}], "weights of rank 0 at step 0 must sum to 1"),
        ([{1: 1.0}, {0: 1.0}], "its own included"),
        ([{0: 0.5, 1: 0.5}, {1: 1.0}], "neighbours at step 0 must be symmetric, got rank 1 among"),
        ([{0: 0.5, 2: 0.5}, {1: 1.0}], "must be other ranks of 0..1"),
    ],
)
def test_a_users_topology_is_checked(rows, says):
    with pytest.raises(ConfigError, match=says):
        check(_Rows(rows), 2)


def test_a_mapping_and_a_graph_object_give_the_same_graph():
    class LikeNetworkx:
        def __iter__(self):
            return iter([2, 0, 1])

        def __getitem__(self, node):
            return [{1: {}}, {0: {}, 2: {}}, {1: {}}][node]

    assert (
        Graph(LikeNetworkx()).neighbours
        == Graph({1: [2, 0], 0: [1], 2: [1]}).neighbours
        == ((1,), (0, 2), (1,))
    )
