"""SINGA's optimizers: the documents' numbers, oracles, schedules, states, parameters found from the loss."""

import numpy as np
import pytest
import torch
from singa_training import MAKERS, batch, leaf, model, train, updated

from stenograd.errors import ConfigError, TensorTypeError
from stenograd.singa.optimizers import SGD, AdaGrad, Adam, Optimizer, RMSProp
from stenograd.singa.schedules import Constant, DecayScheduler, ExponentialDecay

# The documents' numbers


def test_schedules_of_the_documents():
    decay = ExponentialDecay(0.1, 2, 0.5, staircase=True)
    assert [decay(torch.tensor([float(i)])) for i in range(5)] == [0.1, 0.1, 0.05, 0.05, 0.025]
    smooth = ExponentialDecay(0.1, 2, 0.5)
    assert [smooth(i) for i in range(5)] == pytest.approx([0.1 * 0.5 ** (i / 2) for i in range(5)])
    assert Constant(0.2)(torch.tensor(3)) == 0.2


@pytest.mark.parametrize(
    ("optimizer", "value", "gradient", "steps", "expected"),
    [
        (SGD(lr=0.1), 0.1, 0.1, 1, 0.09),
        (RMSProp(lr=0.1), 0.1, 0.1, 1, -0.216226),  # .1 - .01 / sqrt(.1 * .01 + 1e-8)
        (AdaGrad(lr=0.1), 0.1, 0.1, 1, 0.1 - 0.01 / (0.01 + 1e-8) ** 0.5),
        (Adam(lr=0.1), 1.0, 0.1, 1, 0.9),
        (SGD(lr=0.1, momentum=0.9), 0.1, 0.01, 1, 0.099),
        (SGD(lr=0.1, momentum=0.9), 0.1, 0.01, 2, 0.0971),  # v = .9 * .01 + .01
        (SGD(lr=0.1, weight_decay=0.2), 0.1, 0.01, 1, 0.097),  # g = .01 + .2 * .1
        (SGD(lr=0.1, momentum=0.9, nesterov=True), 0.1, 0.1, 1, 0.081),  # .1 - .1 * 1.9 * .1
    ],
)
def test_updates_of_the_documents(optimizer, value, gradient, steps, expected):
    assert updated(optimizer, value, gradient, steps) == pytest.approx(expected, abs=1e-6)


def test_counter_of_the_documents():
    optimizer = SGD()
    optimizer.step()
    optimizer.step()
    assert optimizer.get_states()["step_counter"] == 2
    optimizer.set_states({"step_counter": 5.0})
    assert optimizer.step_counter == 5


# Formulas


def sgd_oracle(p, g, s, t, lr=0.05, mu=0.9, tau=0.1, wd=0.01, nesterov=False):
    g = g + wd * p
    s["v"] = mu * s["v"] + (1 - tau) * g if "v" in s else g
    return p - lr * (g + mu * s["v"] if nesterov else s["v"])


def rmsprop_oracle(p, g, s, t):
    g = g + 0.01 * p
    s["a"] = 0.9 * s.get("a", 0) + 0.1 * g**2
    return p - 0.01 * g / np.sqrt(s["a"] + 1e-8)


def adagrad_oracle(p, g, s, t):
    g = g + 0.01 * p
    s["h"] = s.get("h", 0) + g**2
    return p - 0.1 * g / np.sqrt(s["h"] + 1e-8)


def adam_oracle(p, g, s, t):
    g = g + 0.01 * p
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g**2
    m, v = s["m"] / (1 - 0.9 ** (t + 1)), s["v"] / (1 - 0.999 ** (t + 1))
    return p - 0.01 * 0.9 ** (t / 5) * m / (np.sqrt(v) + 1e-8)


ORACLES = {
    "sgd": lambda p, g, s, t: p - 0.1 * g,
    "momentum": sgd_oracle,
    "nesterov": lambda p, g, s, t: sgd_oracle(p, g, s, t, tau=0, nesterov=True),
    "fading": lambda p, g, s, t: sgd_oracle(p, g, s, t, mu=0.9 * 0.5 ** (t / 3), tau=0, wd=0),
    "rmsprop": rmsprop_oracle,
    "adagrad": adagrad_oracle,
    "adam": adam_oracle,
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_twenty_steps_equal_the_formula(name, dtype):
    rng, state, optimizer = np.random.default_rng(0), {}, MAKERS[name]()
    expected = rng.normal(size=(3, 5))
    w = torch.tensor(expected, dtype=dtype)
    for t in range(20):
        g = rng.normal(size=(3, 5))
        expected = ORACLES[name](expected, g, state, t)
        optimizer.update(w, torch.tensor(g, dtype=dtype))
        optimizer.step()
    np.testing.assert_allclose(w, expected, rtol=1e-12 if dtype == torch.float64 else 2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance"),
    [
        (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (
            SGD(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
            0,
        ),
        (
            SGD(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
            0,
        ),
        (Adam(lr=0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1), 1e-6),
    ],
)
def test_equal_to_pytorch(ours, theirs, tolerance):
    """SGD bit for bit; Adam orders its divisions differently."""
    net = model()
    other = theirs(net.parameters())
    for step in range(20):
        other.zero_grad()
        net(batch(step)).square().mean().backward()
        other.step()
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.testing.assert_close(train(model(), ours, range(20)), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_parameters_have_wide_states(name, dtype):
    """A zero gradient in float16: epsilon 1e-8 would be 0 there, and 0 / 0 is NaN."""
    optimizer, w = MAKERS[name](), torch.ones(3, dtype=dtype)
    optimizer.update(w, torch.tensor([0.0, 1.0, -1.0], dtype=dtype))
    assert w.dtype == dtype
    assert w.isfinite().all()
    kinds = optimizer.state_names
    assert all(s.dtype == torch.float32 for k in kinds for s in optimizer.get_states()[k].values())


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_are_left_alone(name):
    optimizer, w, g = MAKERS[name](), torch.ones(3), torch.tensor([1.0, -2.0, 3.0])
    for _ in range(3):
        optimizer.update(w, g)
    assert g.tolist() == [1, -2, 3]


def test_permuted_memory():
    """A channels-last weight updates as the same values in plain order do."""
    w, g = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    permuted = w.clone(memory_format=torch.channels_last)
    for name in MAKERS:
        MAKERS[name]().update(w, g)
        MAKERS[name]().update(permuted, g)
    torch.testing.assert_close(permuted, w)


# Schedules and settings


def test_update_t_uses_the_schedule_at_t():
    """lr 1, 1/2, 1/4 at gradient 1: 0, -1, -1.5, -1.75."""
    optimizer, w, seen = SGD(lr=ExponentialDecay(1.0, 1, 0.5)), torch.zeros(1), []
    for _ in range(3):
        optimizer.update(w, torch.ones(1))
        optimizer.step()
        seen.append(w.item())
    assert seen == [-1, -1.5, -1.75]
    assert optimizer.lr_value == 0.125
    assert optimizer.lr(0) == 1


def test_momentum_that_starts_at_zero_is_momentum():
    """mu 0 then 1 at gradients 1, 1: v = 1, then 2."""

    class Switch(DecayScheduler):
        def call(self, step):
            return float(step > 0)

    assert updated(SGD(lr=1, momentum=Switch(0)), 0.0, 1.0, steps=2) == -3


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(lr=-0.1),
        lambda: SGD(lr=float("nan")),
        lambda: SGD(momentum=-0.9),
        lambda: SGD(weight_decay=-1),
        lambda: SGD(nesterov=True),
        lambda: SGD(momentum=0.9, dampening=0.1, nesterov=True),
        lambda: SGD(momentum=Constant(-0.5)),
        lambda: SGD(dampening=float("inf")),
        lambda: RMSProp(rho=1.0),
        lambda: RMSProp(epsilon=-1e-8),
        lambda: AdaGrad(lr=-1),
        lambda: AdaGrad(epsilon=-1),
        lambda: Adam(beta_1=1.0),
        lambda: Adam(beta_2=-0.1),
        lambda: Adam(weight_decay=ExponentialDecay(-1, 2, 0.5)),
        lambda: ExponentialDecay(0.1, 0, 0.5),
        lambda: ExponentialDecay(0.1, 2, -0.5),
        lambda: Constant(float("inf")),
        lambda: Constant(1)(torch.zeros(2)),
        lambda: SGD(dtype="float32"),
        lambda: Adam(dtype=torch.int32),
    ],
)
def test_senseless_settings_are_refused(make):
    with pytest.raises(ValueError, match="got"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(lr="0.1"),
        lambda: SGD(lr=True),
        lambda: SGD(momentum=None),
        lambda: RMSProp(epsilon=[1e-8]),
        lambda: Adam(beta_1=torch.tensor(0.9)),
        lambda: ExponentialDecay(0.1, "2", 0.5),
        lambda: Constant(1)("3"),
    ],
)
def test_other_types_are_refused(make):
    with pytest.raises(TypeError, match="must be a number"):
        make()


def test_a_schedule_that_leaves_its_range_is_stopped():
    class Falling(DecayScheduler):
        def call(self, step):
            return self.init_value - step

    optimizer = SGD(lr=Falling(1))
    optimizer.step()
    with pytest.raises(ConfigError, match="lr must be finite and at least 0"):
        optimizer.step()


def test_both_generations_of_the_base():
    class Plain(Optimizer):
        def apply(self, param_name, param_value, param_grad):
            param_value -= self.lr_value * param_grad

    for optimizer in (Plain({"lr": 0.5}), Plain(0.5), Plain(lr=0.5), Plain(Constant(0.5), torch.float32)):
        w = leaf(1.0)
        optimizer(w.sum())
        assert w.item() == 0.5
    with pytest.raises(NotImplementedError, match="change or apply"):
        Optimizer(0.1).update(torch.ones(1), torch.ones(1))
    with pytest.raises(NotImplementedError, match="call"):
        DecayScheduler(1.0)(0)


def test_instances_share_nothing():
    a, b = SGD(momentum=0.9), SGD(momentum=0.9)
    a.update(torch.ones(1), torch.ones(1))
    a.step()
    assert b.get_states() == {"step_counter": 0, "moments": {}}


# Tensors that cannot be updated


def test_wrong_tensors_are_refused():
    optimizer, w = SGD(), torch.ones(2)
    with pytest.raises(ConfigError, match="shape"):
        optimizer.update(w, torch.ones(3))
    with pytest.raises(ConfigError, match="one device"):
        optimizer.update(w, torch.ones(2, device="meta"))
    with pytest.raises(TensorTypeError, match="sparse=False"):
        optimizer.update(w, torch.ones(2).to_sparse())
    with pytest.raises(TensorTypeError, match="real"):
        optimizer.update(w, torch.ones(2, dtype=torch.complex64))
    assert w.tolist() == [1, 1]
