"""What methods do to learning: virtual workers against a plain loop, and what may be said of it."""

import math

import pytest
import torch
from torch import nn

from stenograd.errors import ConfigError
from stenograd.planning.learn import Learned, Learning, learn, sentence
from stenograd.planning.trial import Trial

STEPS = 12


def batch(number):
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(6, 5, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def trial(lr=0.02, count=64, momentum=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return Trial(
        model, optimizer, [batch(i) for i in range(count)], lambda m, b: (m(b[0]) - b[1]).square().mean()
    )


def test_dense_is_a_loop_over_all_workers_batches():
    """The oracle: one model, the mean of two losses, dropout drawn from a seed for each batch."""
    found = learn(trial(count=32), ["dense"], workers=2, steps=STEPS, seeds=2)
    assert found.results[0].differences == (0.0, 0.0)
    lasts, firsts = [], []
    for seed in range(2):
        plain, losses = trial(count=32), []
        order = torch.randperm(32, generator=torch.Generator().manual_seed(seed)).tolist()
        for step in range(STEPS):
            both = []
            for number in (2 * step, 2 * step + 1):
                torch.manual_seed((seed << 32) + number)
                both.append(plain.loss(plain.model, plain.batches[order[number]]))
            losses.append(sum(both).item() / 2)
            plain.optimizer.zero_grad()
            (sum(both) / 2).backward()
            plain.optimizer.step()
        lasts.append(losses[-1])
        firsts.append(losses[0])
    assert found.first == pytest.approx(sum(firsts) / 2, rel=1e-6)
    assert found.last == pytest.approx(sum(lasts) / 2, rel=1e-5)


def test_nothing_of_the_users_changes():
    given = trial(momentum=0.9)
    before = {key: value.clone() for key, value in given.model.state_dict().items()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    learn(given, ["topk:ratio=0.1", "local:every=4"], workers=3, steps=10, seeds=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert given.optimizer.state_dict()["state"] == {}
    for key, value in given.model.state_dict().items():
        assert torch.equal(value, before[key])


def test_equal_calls_give_equal_answers_with_dropout_and_threads():
    methods = ["topk:ratio=0.1", "qsgd", "gossip"]
    first, second = (learn(trial(), methods, workers=4, steps=10, seeds=2) for _ in range(2))
    assert first == second
    assert [row.diverged for row in first.results] == [0, 0, 0]


def test_a_method_that_diverges_is_said_to():
    """At this rate dense learns; random-k returns what is owed forty steps late, and all at once."""
    found = learn(trial(lr=0.3), ["randomk:ratio=0.025", "fp16"], workers=2, steps=40, seeds=2)
    assert found.last < found.first
    bad, good = found.results
    assert (bad.diverged, good.diverged) == (2, 0)
    assert "diverged in 2 of 2 seeds" in sentence(found, bad)
    assert bad.error > 0.5 > 1e-4 > good.error > 0


def test_few_batches_are_dealt_out_again():
    found = learn(trial(count=3), ["sign"], workers=2, steps=10, seeds=2)
    assert (found.batches, found.workers, found.asked) == (3, 2, 2)
    assert math.isfinite(found.results[0].mean)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"workers": 0}, "workers"),
        ({"steps": 5}, "steps"),
        ({"seeds": 1}, "seeds"),
        ({"count": 0}, "batches"),
    ],
)
def test_wrong_numbers_are_refused(more, named):
    given = trial(count=more.pop("count", 4))
    with pytest.raises(ConfigError, match=named):
        learn(given, ["sign"], **{"workers": 2, "steps": 10, "seeds": 2} | more)


def test_sentences_claim_no_more_than_was_seen():
    """Student's t by hand: 0.02 +- 4.303 * 0.01 / sqrt(3) = 0.0248 is no difference, 0.03 is one."""
    tried = Learning(
        workers=4, steps=300, seeds=3, asked=8, batches=9, first=2.0, last=1.0, noise=0.1, results=()
    )
    unclear = Learned(method="topk", differences=(0.01, 0.02, 0.03), diverged=0)
    worse = Learned(method="topk", differences=(0.02, 0.03, 0.04), diverged=0)
    better = Learned(method="topk", differences=(-0.02, -0.03, -0.04), diverged=0)
    assert sentence(tried, unclear) == "topk: loss +0.02 +- 0.025 against dense: no difference seen"
    assert sentence(tried, worse).endswith("a higher loss than dense")
    assert sentence(tried, better).endswith("a lower loss than dense")
    assert "nothing can be said" in sentence(tried, Learned(method="topk", differences=(), diverged=0))
    assert math.isinf(Learned(method="topk", differences=(0.1,), diverged=0).margin)
