"""States of SINGA's optimizers, saved and restored, and settings for single parameters."""

import copy
import io

import numpy as np
import pytest
import torch
from singa_training import MAKERS, leaf, model, train, updated

from stenograd.errors import CheckpointError, ConfigError
from stenograd.singa.optimizers import SGD, Adam
from stenograd.singa.schedules import DecayScheduler, ExponentialDecay


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_run_is_bit_identical(name, named, tmp_path):
    """Five steps, a file, a fresh optimizer and fresh parameters, five more: as ten without a break."""
    whole = train(model(), MAKERS[name](), range(10))
    for file in (tmp_path / "state", str(tmp_path / "text"), io.BytesIO()):
        net, optimizer = model(), MAKERS[name]()
        if named:
            optimizer.register(net.named_parameters(), {})
        train(net, optimizer, range(5))
        optimizer.save(file)
        fresh, other = model(seed=1), MAKERS[name]()
        fresh.load_state_dict(net.state_dict())
        if isinstance(file, io.BytesIO):
            file.seek(0)
        other.load(file)
        if named:
            other.register(reversed(list(fresh.named_parameters())), {})
        assert other.step_counter == 5
        assert torch.equal(train(fresh, other, range(5, 10)), whole)


def test_states_are_a_snapshot_and_can_be_gone_back_to():
    net, optimizer = model(), SGD(lr=0.1, momentum=0.9)
    train(net, optimizer, range(3))
    states, weights = optimizer.get_states(), {k: v.clone() for k, v in net.state_dict().items()}
    first = train(net, optimizer, range(3, 6))
    for _ in range(2):
        net.load_state_dict(weights)
        optimizer.set_states(states)
        assert torch.equal(train(net, optimizer, range(3, 6)), first)


def test_a_copy_goes_on_with_what_was_copied_with_it_or_with_the_same_model():
    net, optimizer = model(), SGD(lr=0.1, momentum=0.9)
    train(net, optimizer, range(3))
    other, its_own = copy.deepcopy((net, optimizer))
    weights, earlier = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer)
    end = train(net, optimizer, range(3, 6))
    assert torch.equal(train(other, its_own, range(3, 6)), end)
    net.load_state_dict(weights)
    assert torch.equal(train(net, earlier, range(3, 6)), end)


def test_keys_are_names_or_numbers():
    optimizer, w, b = SGD(momentum=0.9), torch.ones(2), torch.ones(1)
    optimizer.apply("fc.weight", w, torch.ones(2))
    optimizer.update(b, torch.ones(1))
    assert list(optimizer.get_states()["moments"]) == ["fc.weight", 0]
    optimizer.apply("fc.bias", b, torch.ones(1))  # a name given later keeps the state
    assert optimizer.get_states()["moments"]["fc.bias"].item() == pytest.approx(1.9)


def test_a_name_finds_its_state_from_any_tensor():
    """SINGA's code may pass another view of the parameter each time."""
    optimizer, w = SGD(lr=0.1, momentum=0.9), leaf(0.0)
    for _ in range(2):
        optimizer.apply("w", w.data, torch.ones(1))
    assert w.item() == pytest.approx(-0.29)


def test_states_are_saved_while_momentum_is_zero():
    """SINGA drops them then (momentum .9, 0, 0, ...)."""

    class Off(DecayScheduler):
        def call(self, step):
            return 0.9 * (step == 0)

    optimizer = SGD(momentum=Off(0.9))
    updated(optimizer, 0.0, 1.0, steps=2)
    w = torch.zeros(1)
    optimizer.update(w, torch.ones(1))
    assert optimizer.get_states()["moments"]


def test_a_parameter_that_is_gone_takes_its_state_along():
    optimizer = SGD(momentum=0.9)
    for _ in range(3):
        optimizer.update(torch.ones(2), torch.ones(2))
    assert len(optimizer.get_states()["moments"]) <= 1


@pytest.mark.parametrize(
    "states", [{}, {"step_counter": 1, "m": {}}, {"step_counter": -1}, {"step_counter": 0.5}, [1]]
)
def test_foreign_states_are_refused(states):
    with pytest.raises(ConfigError, match="got"):
        SGD().set_states(states)


def test_states_of_another_shape_are_refused():
    optimizer = SGD(momentum=0.9)
    optimizer.set_states({"step_counter": 1, "moments": {0: torch.zeros(3)}})
    with pytest.raises(ConfigError, match="shape"):
        optimizer.update(torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize(("saved", "loaded"), [(True, False), (False, True), (True, "other")])
def test_states_of_other_names_are_refused(saved, loaded):
    """Momentum would restart from zeros silently."""

    def momentum(net, names):
        optimizer = SGD(lr=0.1, momentum=0.9)
        if names:
            prefix = "module." if names == "other" else ""
            optimizer.register([(prefix + n, p) for n, p in net.named_parameters()], {})
        return optimizer

    net = model()
    optimizer = momentum(net, saved)
    train(net, optimizer, range(1))
    other = momentum(net, loaded)
    other.set_states(optimizer.get_states())
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(CheckpointError, match="state was saved for parameters"):
        train(net, other, range(1, 2))
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_a_parameter_unfrozen_after_loading_starts_anew():
    net, optimizer = model(), SGD(lr=0.1, momentum=0.9)
    net[0].requires_grad_(False)
    train(net, optimizer, range(1))
    other = SGD(lr=0.1, momentum=0.9)
    other.set_states(optimizer.get_states())
    net[0].requires_grad_(True)
    train(net, other, range(1, 3))
    assert len(other.get_states()["moments"]) == 4


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "state"
    with pytest.raises(CheckpointError, match="state"):
        SGD().load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        SGD().load(path)
    Adam().save(path)
    with pytest.raises(CheckpointError, match="same kind"):
        SGD().load(path)


def test_a_save_that_breaks_off_leaves_the_earlier_file(tmp_path):
    path, optimizer = tmp_path / "state", SGD()
    optimizer.save(path)
    before = path.read_bytes()
    for step_counter in (lambda: 0, np.float64(1)):  # cannot be saved, or not loaded again
        optimizer.step_counter = step_counter
        with pytest.raises(CheckpointError, match="cannot be saved: step_counter is a"):
            optimizer.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(CheckpointError, match="cannot be written"):
        SGD().save(tmp_path / "nowhere" / "state")


# Register


def test_register_overrides_settings():
    """Gradient 1, twice: lr .1 gives -.2; lr 1 with momentum .5 -2.5; lr 1, .5 -1.5; decay 1: 1, .8, .62."""
    plain, fast, slow, decayed = leaf(0.0), leaf(0.0), leaf(0.0), leaf(1.0)
    optimizer = SGD(lr=0.1)
    optimizer.register(fast, {"lr": 1, "momentum": 0.5})
    optimizer.register([slow], {"lr": ExponentialDecay(1.0, 1, 0.5)})
    optimizer.register(iter([("decayed", decayed)]), {"weight_decay": 1})
    for _ in range(2):
        optimizer((plain + fast + slow + decayed).sum())
    got = [w.item() for w in (plain, fast, slow, decayed)]
    assert got == pytest.approx([-0.2, -2.5, -1.5, 0.62])


@pytest.mark.parametrize(("ahead", "expected"), [(True, 0.081), (False, 0.09)])
def test_register_takes_the_whole_config_that_singa_needs(ahead, expected):
    """Of what is registered SINGA's own SGD reads all five: .1 - .1 * 1.9 * .1, or .1 - .1 * .1."""
    optimizer, w = SGD(lr=0.1, momentum=0.9, nesterov=not ahead), torch.tensor([0.1])
    rest = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0}
    optimizer.register([w], {**rest, "nesterov": ahead})
    optimizer.update(w, torch.tensor([0.1]))
    assert w.item() == pytest.approx(expected)
    assert optimizer.nesterov is not ahead


def test_an_override_switches_momentum_off():
    optimizer, w = SGD(lr=1, momentum=0.9), leaf(0.0)
    optimizer.register(w, {"momentum": 0})
    for _ in range(2):
        optimizer(w.sum())
    assert w.item() == -2
    assert not optimizer.get_states()["moments"]


def test_register_refuses():
    optimizer, w = SGD(momentum=0.9, nesterov=True), leaf(0.0)
    optimizer.register(w, {})
    with pytest.raises(ConfigError, match="registered once"):
        optimizer.register([w], {"lr": 1})
    with pytest.raises(ConfigError, match="learning_rate"):
        optimizer.register(leaf(0.0), {"learning_rate": 1})
    with pytest.raises(ConfigError, match="nesterov"):
        optimizer.register(leaf(0.0), {"momentum": 0})
    with pytest.raises(TypeError, match="number"):
        optimizer.register(leaf(0.0), {"lr": "1"})
    with pytest.raises(TypeError, match="tensors"):
        optimizer.register(["w"], {})
    optimizer.register([("a", leaf(0.0))], {})
    with pytest.raises(ConfigError, match="registered once"):
        optimizer.register([("a", leaf(0.0))], {})
