"""DeMo against plain loops: the definition of the DCT, block by block, rank by rank."""

import math

import pytest
import torch
from support.gradients import ranks_of

import stenograd
from stenograd.compression import Kind
from stenograd.compressors.demo import DeMo, cosines
from stenograd.errors import MethodError
from stenograd.simulate import exchange

SHAPES = [torch.Size(s) for s in [(6, 10), (7,), (0, 3), (4, 2, 3), ()]]
NUMELS = [s.numel() for s in SHAPES]
SIDES = [(3, 2), (1, 1), None, (4, 3), (1, 1)]  # largest divisors up to 4; 7 is prime


def transform(block):
    """X[k, l] = c(k) c(l) sum_ij x[i, j] cos(pi (i + 1/2) k / n) cos(pi (j + 1/2) l / m)."""
    n, m = block.shape
    c = lambda k, size: math.sqrt((1 if k == 0 else 2) / size)  # noqa: E731
    basis = lambda k, size: torch.tensor(  # noqa: E731
        [c(k, size) * math.cos(math.pi * (i + 0.5) * k / size) for i in range(size)], dtype=torch.float64
    )
    rows = [torch.outer(basis(k, n), basis(j, m)) for k in range(n) for j in range(m)]
    return torch.stack([(row * block).sum() for row in rows]), rows


def plain(world, steps, keep, decay):
    """Return what each step delivers and the momenta after it, in float64."""
    delta = [torch.zeros(sum(NUMELS), dtype=torch.float64) for _ in range(world)]
    delivered = []
    for step in range(steps):
        for rank, g in enumerate(ranks_of(world, sum(NUMELS), step)):
            delta[rank] = decay * delta[rank] + g.double()
        out, at = torch.zeros(sum(NUMELS), dtype=torch.float64), 0
        for shape, sides in zip(SHAPES, SIDES, strict=True):
            if not shape.numel():
                continue
            rows = shape[0] if len(shape) > 1 else 1
            places = torch.arange(at, at + shape.numel()).view(rows, -1)
            height, width = sides
            for top in range(0, rows, height):
                for left in range(0, places.shape[1], width):
                    where = places[top : top + height, left : left + width]
                    total, senders = torch.zeros(where.numel()).double(), torch.zeros(where.numel()).double()
                    for rank in range(world):
                        found, basis = transform(delta[rank][where])
                        best = found.abs().topk(min(keep, where.numel())).indices
                        total[best] += found[best]
                        senders[best] += 1
                        delta[rank][where] -= sum(found[i] * basis[i] for i in best)
                    mean = total / senders.clamp(min=1)
                    out[where] = sum(mean[i] * basis[i] for i in range(where.numel()))
            at += shape.numel()
        delivered.append(out)
    return delivered, delta


@pytest.mark.parametrize("world", [1, 3])
def test_it_is_the_definition_block_by_block(world):
    codec, states = DeMo(chunk=4, keep=3, decay=0.9), None
    wanted, momenta = plain(world, 5, 3, 0.9)
    for step, expected in enumerate(wanted):
        out = exchange(codec, ranks_of(world, sum(NUMELS), step), states, shapes=SHAPES, step=step)
        states = [e.state for e in out]
        assert all(torch.equal(e.average, out[0].average) for e in out)
        clear = expected.abs() > 1e-4  # the sign of what is nearly zero may be either
        assert torch.equal(out[0].average[clear].double(), expected[clear].sign())
        assert clear.float().mean() > 0.9
    for mine, momentum in zip(states, momenta, strict=True):
        assert torch.allclose(mine["demo_momentum"].double(), momentum, atol=1e-4)


def test_sending_all_coefficients_empties_the_momentum():
    out = exchange(DeMo(chunk=8, keep=64), ranks_of(2, sum(NUMELS), 0), shapes=SHAPES)
    mean = sum(ranks_of(2, sum(NUMELS), 0)) / 2
    clear = mean.abs() > 1e-4
    assert torch.equal(out[0].average[clear], mean[clear].sign())
    assert max(float(e.state["demo_momentum"].abs().max()) for e in out) < 1e-5


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_matrix_is_orthonormal(size):
    m = cosines(size, torch.zeros(1, dtype=torch.float64))
    assert torch.allclose(m @ m.T, torch.eye(size, dtype=torch.float64), atol=1e-12)


def test_bytes_and_rules():
    sent = []
    exchange(
        DeMo(), [torch.randn(64 * 64)] * 2, shapes=[torch.Size((64, 64))], spy=lambda r: sent.append(r.nbytes)
    )
    assert sent[0] == 32 * (2 + 4)  # 32 indices of 16 bits and values of 32
    assert DeMo.state_kinds == {"demo_momentum": Kind.SUM}
    for text, message in {
        "demo:chunk=1": "chunk must be at least 2",
        "demo:chunk=129": "chunk must be at most 128",
        "demo:decay=1": r"decay must be in \[0, 1\)",
        "diloco/demo": "it accumulates gradients by itself",
    }.items():
        with pytest.raises(MethodError, match=message):
            stenograd.method(text)


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [((257,), 257 * 4), ((67, 71), 67 * 71 * 4), ((257, 64), 257 * 32 * 6), ((3,), 3 * 6)],
)
def test_blocks_of_one_element_need_no_numbers(shape, nbytes):
    """As sides without a divisor give: more than a dense float32 would be a loss."""
    sent = []
    xs = [torch.randn(math.prod(shape))] * 2
    exchange(DeMo(), xs, shapes=[torch.Size(shape)], spy=lambda r: sent.append(r.nbytes))
    assert sent[0] == nbytes


def test_an_optimizer_with_momentum_is_refused():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with pytest.raises(stenograd.errors.ConfigError, match="momentum"):
        stenograd.distribute(model, optimizer, "demo")
