"""What every schedule keeps: one process's equations, resuming bit for bit, real ranks, bytes, one NaN."""

import copy
import io
import math

import pytest
import torch
from support.copies import Copies, memory
from torch import nn

import stenograd
from stenograd.simulate import ranks
from stenograd.testing.methods import coded, scheduled

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


def batch_norm_adam():
    model = norms()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


TRAININGS = {
    "GPT": (gpt, loss_of_words),
    "batch norm": (batch_norm, loss_of_numbers),
    "AdamW": (batch_norm_adam, loss_of_numbers),
}
TEXTS = ["dense", *scheduled()]
pytestmark = pytest.mark.filterwarnings("ignore:a gradient ")


def trained(driver, text, kind, cut=None):
    """Train one rank; with `cut`, save after so many steps and go on with everything new."""
    (built, loss_of), file = TRAININGS[kind], io.BytesIO()
    for first, last in [(0, STEPS)] if cut is None else [(0, cut), (cut, STEPS)]:
        model, optimizer = built()
        sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
        before = sync.traffic.payload_bytes
        if first:
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            for part, state in zip((sync, model, optimizer), saved, strict=True):
                part.load_state_dict(state)
            sync.after_load()
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(model, sync.rank, step).backward()
            optimizer.step()
        sent = sync.traffic.payload_bytes - before, sync.traffic.collectives
        torch.save([part.state_dict() for part in (sync, model, optimizer)], file)
        own = copy.deepcopy(model.state_dict())
        with sync.consensus():
            common = copy.deepcopy(model.state_dict())
        expect_equal(model.state_dict(), own)
        told = sync.round, sync.left_out, sync.skipped
        sync.close()
    return {"own": own, "common": common, "told": told, "share": sync.share, "sent": sent}


def simulated(world, text, kind, cut=None):
    return ranks(world, lambda driver: trained(driver, text, kind, cut))


def on_rank(rank, text, kind):
    """Train a real rank; tensors of 8 bits come back as integers, since some of their types cannot travel."""
    done = trained(None, text, kind)
    return done | {key: bytewise(done[key]) for key in ("own", "common")}


def bytewise(state):
    return {n: t.view(torch.uint8) if t.itemsize == 1 else t for n, t in state.items()}


def world_of(text, otherwise):
    return 4 if "node_size" in text else otherwise


def expect_equal(found, wanted):
    for name, value in wanted.items():
        same = (found[name] == value) | ((found[name] != found[name]) & (value != value))
        assert bool(same.all()), (name, found[name], value)


def expect_close(found, wanted):
    """Up to float64's roundings; buffers of narrow types exactly."""
    for name, value in wanted.items():
        if value.dtype == torch.float64:
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9, equal_nan=True, msg=name)
        else:
            expect_equal({name: found[name]}, {name: value})


def expect_copies(world, text, kind):
    """Parameters, buffers, consensus, rounds and skipped steps of every rank are those of copies."""
    done = simulated(world, text, kind)
    copies = Copies(text, world, *TRAININGS[kind]).run(STEPS)
    assert [d["told"] for d in done] == [(copies.rounds, 0, skipped) for skipped in copies.skipped]
    assert sum(d["share"] for d in done) == pytest.approx(world)
    together = copies.consensus()
    for rank, found in enumerate(done):
        expect_close(found["own"], copies.models[rank].state_dict())
        expect_close(found["common"], together[rank])


@pytest.mark.parametrize("kind", ["GPT", "batch norm"])
@pytest.mark.parametrize("text", TEXTS)
def test_every_schedule_equals_separate_copies_in_one_process(text, kind):
    """In float64; what is lost in codes is lost in both. One batch of one rank has a NaN."""
    expect_copies(world_of(text, 3), text, kind)


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("text", [text for text in TEXTS if "/" not in text])
def test_so_it_does_with_other_numbers_of_ranks(text, world):
    """One node of two ranks, one peer, a rank without a partner."""
    if world != 2 and "node_size" in text:
        pytest.skip("nodes of two")
    expect_copies(world, text, "batch norm")


@pytest.mark.parametrize("text", dict.fromkeys([*TEXTS, *coded()]))
def test_a_training_that_was_saved_goes_on_bit_for_bit(text):
    """Saved before the first round, in mid-round, with an exchange under way, and between two rounds."""
    whole = simulated(world_of(text, 2), text, "AdamW")
    for cut in (2, 4, 5):
        for found, wanted in zip(simulated(world_of(text, 2), text, "AdamW", cut), whole, strict=True):
            expect_equal(found["own"], wanted["own"])
            expect_equal(found["common"], wanted["common"])
            assert (found["told"][0], found["share"]) == (wanted["told"][0], wanted["share"]), cut


@pytest.mark.parametrize("text", TEXTS)
def test_real_ranks_do_and_send_what_simulated_ones_do(pool, text):
    """Of several tensors in one message each is padded to 8 bytes, so that it can be read in place."""
    world = world_of(text, 2)
    real, simulation = pool.run(world, on_rank, text, "GPT"), simulated(world, text, "GPT")
    for found, wanted in zip(real, simulation, strict=True):
        expect_equal(found["own"], bytewise(wanted["own"]))
        expect_equal(found["common"], bytewise(wanted["common"]))
        assert (found["told"], found["share"]) == (wanted["told"], wanted["share"])
        assert 0 <= found["sent"][0] - wanted["sent"][0] <= 8 * found["sent"][1]
