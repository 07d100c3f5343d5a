"""Every schedule, with whatever a model carries, equals separate copies that train in one process."""

import math

import pytest
import torch
from copies import Copies, memory
from torch import nn

import stenograd
from stenograd.simulate import ranks
from stenograd.testing.methods import scheduled

WORDS, LENGTH, WIDTH, STEPS = 11, 6, 8, 9
BAD = (1, 2)  # rank and step of a batch with a NaN in it


def seeded(model):
    """Fill the parameters by a generator of their own: ranks in one process share the global one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 3)
    return model


def kept(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


class Layer(nn.Module):
    """Attention of one head behind a causal mask of -inf, as in small GPTs; the mask is a buffer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -math.inf).triu(1))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.mT + self.mask, -1) @ v)


class GPT(nn.Module):
    """Three layers; each rank changes buffers of narrow types, and an expanded one, in its own way."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()
        self.register_buffer("seen", kept(0, 1, 2, dtype=torch.int16))
        self.register_buffer("tiny", torch.arange(4.0).to(torch.float8_e4m3fn))
        self.register_buffer("expanded", torch.full((1, 3), 0.1, dtype=torch.float16).expand(4, 3))
        self.register_buffer("largest", kept(1 / 3, torch.finfo(torch.float32).max, dtype=torch.float32))
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("missing", torch.tensor(math.nan))
        self.register_buffer("bits", kept(1 + 2j, dtype=torch.complex64))
        self.unused = nn.Parameter(torch.ones(0, dtype=torch.float64))
        seeded(self)

    def forward(self, tokens):
        if self.training:
            with torch.no_grad():
                self.seen += 1
                self.tiny.copy_((self.tiny.float() + tokens[0, 0]) % 4)
                memory(self.expanded).add_(float(tokens[0, 1]))
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of_words(model, rank, step):
    """Predict the next word."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(WORDS, (4, LENGTH + 1), generator=generator)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def norms():
    """Return layers with the running statistics of batch norm between them."""
    layers = [
        nn.Linear(6, 20),
        nn.BatchNorm1d(20),
        nn.Tanh(),
        nn.Linear(20, 7),
        nn.BatchNorm1d(7),
        nn.Linear(7, 3),
    ]
    return seeded(nn.Sequential(*layers).double())


def loss_of_numbers(model, rank, step):
    """Bring the mean square of the outputs to zero; one batch of one rank has a NaN."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64) + rank
    if (rank, step) == BAD:
        x[0, 0] = math.nan
    return model(x).square().mean()


def gpt():
    model = GPT()
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def batch_norm():
    model = norms()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


TRAININGS = {"GPT": (gpt, loss_of_words), "batch norm": (batch_norm, loss_of_numbers)}


def trained(driver, text, built, loss_of):
    """Train one rank; return its model, what it has in common with others, and its counters."""
    model, optimizer = built()
    sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, sync.rank, step).backward()
        optimizer.step()
    own = {n: t.clone() for n, t in model.state_dict().items()}
    with sync.consensus():
        common = {n: t.clone() for n, t in model.state_dict().items()}
    told = sync.round, sync.left_out
    sync.close()
    return own, common, told


def expect_close(found, wanted):
    for name, value in wanted.items():
        mine = found[name]
        if value.dtype == torch.float64:
            torch.testing.assert_close(mine, value, rtol=1e-6, atol=1e-9, equal_nan=True, msg=name)
            continue
        same = (mine == value) | ((mine != mine) & (value != value))
        assert bool(same.all()), (name, mine, value)


@pytest.mark.filterwarnings("ignore:a gradient ")
@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize("text", ["dense", *scheduled()])
def test_every_schedule_equals_separate_copies_in_one_process(text, kind):
    """Parameters, buffers and consensus of every rank, in float64; what is lost in codes is lost in both."""
    world = 4 if "node_size" in text else 3
    done = ranks(world, trained, text, *TRAININGS[kind])
    copies = Copies(text, world, *TRAININGS[kind]).run(STEPS)
    assert {told for *_, told in done} == {(copies.rounds, 0)}
    together = copies.consensus()
    for rank, (own, common, _) in enumerate(done):
        expect_close(own, copies.models[rank].state_dict())
        expect_close(common, together[rank])
