"""Rounds: clock and options, what is under way, states of optimizers, two levels, presets, SparseLoCo."""

import copy

import pytest
import torch
from round_training import BUCKET, OPTIMIZERS, Net, loss_of, on_rank, simulated
from torch import nn

import stenograd
from stenograd.errors import ConfigError, MethodError
from stenograd.schedules.diloco import DiLoCo
from stenograd.simulate import ranks


def test_the_clock_counts_passes_outside_no_sync():
    done = simulated(2, "diloco:every=2", "momentum", 4, accumulate=3)
    assert done[0]["round"] == 2
    assert torch.equal(done[0]["state"]["first.weight"], done[1]["state"]["first.weight"])


def test_pending_tells_of_what_is_under_way_and_flush_finishes_it():
    def rank_of(driver):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = stenograd.distribute(
            model, optimizer, "diloco:every=4,delay=2,mix=0.5", group=driver, timeout_s=30
        )
        seen = []
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 4) * driver.rank).sum().backward()
            optimizer.step()
            seen.append(sync.pending)
        sync.flush()
        seen += [sync.pending, sync.round]
        sync.close()
        return seen

    assert ranks(2, rank_of) == [[False, False, False, True, False, 1]] * 2


def test_gradients_are_averaged_before_rounds_begin():
    """The first 4 of 4 passes equal dense training; after them ranks go apart."""
    post = simulated(2, "local:every=5,after=4", "adamw", 4)
    dense = simulated(2, "dense", "adamw", 4)
    assert all(
        torch.equal(post[0]["state"][n], dense[0]["state"][n]) for n in post[0]["state"] if "norm" not in n
    )
    later = simulated(2, "local:every=5,after=4", "adamw", 7)
    assert not torch.equal(later[0]["state"]["first.weight"], later[1]["state"]["first.weight"])
    met = simulated(2, "local:every=5,after=4", "adamw", 9)
    assert torch.equal(met[0]["state"]["first.weight"], met[1]["state"]["first.weight"])
    assert met[0]["round"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "local:every=3,after=2",
        "diloco:every=4,delay=2,mix=0.5,after=1",
        "diloco:every=3,eager=true",
        "local:every=3,after=2,inside=dense,node_size=1",
    ],
)
def test_real_ranks_do_as_simulated_ones(text, pool):
    """Whatever has a process group of its own beside the one of rounds."""
    real = pool.run(2, on_rank, text, "adamw", 9)
    for mine, theirs in zip(real, simulated(2, text, "adamw", 9), strict=True):
        assert all(torch.equal(mine["state"][n], value) for n, value in theirs["state"].items())
    assert real[0]["round"] >= 1


def test_quadratic_rule_makes_rounds_rarer_as_the_rate_falls():
    def rank_of(driver):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = stenograd.distribute(model, optimizer, "local:every=2,qsr=0.2", group=driver, timeout_s=30)
        held = []
        for step in range(1, 40):
            optimizer.param_groups[0]["lr"] = 0.1 if step <= 6 else 0.05
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            before = sync.round
            optimizer.step()
            held += [step] if sync.round > before else []
        sync.close()
        return held

    # (0.2 / 0.1)^2 = 4 steps per round; the one after step 4 starts at 0.1, later ones take (0.2 / 0.05)^2.
    assert ranks(2, rank_of) == [[4, 8, 24]] * 2


def test_moments_are_averaged_at_their_rounds():
    """First moments in every round, second ones in every other one; `step` stays."""
    done = simulated(2, "local:every=2,states=average,states_every=1", "adamw", 2)
    both = [d["optimizer"]["state"][0] for d in done]
    assert torch.equal(both[0]["exp_avg"], both[1]["exp_avg"])
    assert not torch.equal(both[0]["exp_avg_sq"], both[1]["exp_avg_sq"])
    done = simulated(2, "local:every=2,states=average,states_every=1", "adamw", 4)
    both = [d["optimizer"]["state"][0] for d in done]
    assert torch.equal(both[0]["exp_avg_sq"], both[1]["exp_avg_sq"])
    assert both[0]["step"] == both[1]["step"] == 4
    kept = simulated(2, "local:every=2", "adamw", 4)
    assert not torch.equal(*(d["optimizer"]["state"][0]["exp_avg"] for d in kept))


def test_reset_states_start_each_round_afresh():
    done = simulated(2, "diloco:every=2,states=reset", "adamw", 5)
    assert all(d["optimizer"]["state"][0]["step"] == 1 for d in done)


@pytest.mark.parametrize(
    "text", ["diloco:every=4", "diloco:every=4/topk:ratio=0.1", "local:every=4", "local:every=4/sign"]
)
@pytest.mark.parametrize("steps", [6, 8])
def test_resharded_in_mid_round_ends_the_round(text, steps):
    """2 -> 3 ranks: the mean of both ranks' parameters is kept, and all new ranks start from one place."""
    saved = simulated(2, text, "momentum", steps)
    new = stenograd.reshard([s["sync"] for s in saved], 3)

    def rank_of(driver):
        model = Net()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        sync = stenograd.distribute(model, optimizer, text, group=driver, bucket_bytes=BUCKET, timeout_s=30)
        sync.load_state_dict(new[driver.rank])
        model.load_state_dict(saved[0]["state"])
        sync.after_load()
        start, rounds = copy.deepcopy(model.state_dict()), sync.round
        for step in range(steps, 8 + 4):
            optimizer.zero_grad()
            loss_of(model, driver.rank, step).backward()
            optimizer.step()
        end = copy.deepcopy(model.state_dict())
        sync.close()
        return start, rounds, end

    found = ranks(3, rank_of)
    names = [n for n, _ in Net().named_parameters()]
    for name in names:
        assert torch.equal(found[0][0][name], found[1][0][name])
        assert torch.equal(found[0][0][name], found[2][0][name])
        mean = (saved[0]["state"][name].double() + saved[1]["state"][name].double()) / 2
        if text.startswith("local"):
            torch.testing.assert_close(found[0][0][name].double(), mean, rtol=1e-6, atol=1e-7)
        elif steps == 8:
            assert torch.equal(found[0][0][name], saved[0]["common"][name])
        else:
            assert not torch.equal(found[0][0][name], saved[0]["common"][name])
    due = steps % 4 or (text == "local:every=4/sign")  # differences are never all sent
    assert found[0][1] == steps // 4 + bool(due)
    if "sign" not in text:
        assert all(torch.equal(found[0][2][n], found[1][2][n]) for n in names)


def test_what_does_not_fit_is_refused_or_warned_of():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = {
        "diloco:every=31,fragments=4": "every must be a multiple of fragments=4, got 31: use 28",
        "diloco:delay=30": "delay must be below every / fragments = 30",
        "diloco:mix=0.5": "mix must be 0 without a delay",
        "diloco:delay=1,mix=1": "mix must be in",
        "diloco:momentum=1": "momentum must be in",
        "diloco:outer_lr=0": "outer_lr must be positive",
        "diloco:eager=true,fragments=2": "eager needs delay=0 and fragments=1",
        "diloco/sign:majority=true": "a vote is no mean; use sign without majority",
        "diloco/topk:clip_norm=1": "clip gradients in your loop",
        "diloco/topk:warmup_steps=9": "write after=9 before the slash",
        "local/randomk:unbiased=true": "leave out unbiased=true",
    }
    for text, message in refused.items():
        with pytest.raises(MethodError, match=message):
            stenograd.distribute(model, optimizer, text)
    with pytest.raises(ConfigError, match="fragments must be at most the number of parameter tensors"):
        stenograd.distribute(model, optimizer, "diloco:every=6,fragments=3")
    with pytest.raises(ConfigError, match="check_every must be 0"):
        stenograd.distribute(model, optimizer, "diloco:every=6,fragments=2", check_every=1)
    with pytest.raises(ConfigError, match="got LBFGS"):
        stenograd.distribute(model, torch.optim.LBFGS(model.parameters()), "diloco")
    with pytest.warns(UserWarning, match="local steps made while a round is under way are thrown away"):
        stenograd.distribute(model, optimizer, "diloco:every=6,delay=2").close()
    with pytest.warns(UserWarning, match="local:every=1 does so with less memory"):
        stenograd.distribute(model, optimizer, "diloco:every=1,outer_lr=1,momentum=0").close()


def test_replicas_are_checked_after_rounds():
    def rank_of(driver):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stenograd.distribute(
            model, optimizer, "diloco:every=2/topk", group=driver, timeout_s=30, check_every=1
        ) as sync:
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(1, 4) * driver.rank).sum().backward()
                optimizer.step()
            return sync.round

    assert ranks(2, rank_of) == [2, 2]


def test_presets_print_what_they_stand_for():
    assert str(stenograd.method("slowmo")) == "diloco:outer_lr=1.0,momentum=0.5,nesterov=false"
    assert str(stenograd.method("slowmo:every=9/topk")).endswith("/topk")
    assert stenograd.method("postlocal:after=7").schedule.after == 7
    assert stenograd.method("slowmo").schedule == DiLoCo(outer_lr=1.0, momentum=0.5, nesterov=False)


@pytest.mark.parametrize(
    "text", ["diloco:every=3", "diloco:every=4,fragments=2,delay=1,mix=0.5", "local:every=3"]
)
def test_two_levels_with_one_rank_per_node_are_the_method_alone(text):
    name, _, keys = text.partition(":")
    levels = simulated(2, f"{name}:{keys},inside=dense,node_size=1", "adamw", 8)
    alone = simulated(2, text, "adamw", 8)
    for a, b in zip(levels, alone, strict=True):
        assert all(torch.equal(a["state"][n], b["state"][n]) for n in a["state"])


def test_two_levels_with_one_node_average_gradients():
    levels = simulated(2, "local:every=3,inside=dense,node_size=2", "adamw", 5)
    dense = simulated(2, "dense", "adamw", 5)
    for a, b in zip(levels, dense, strict=True):
        assert all(torch.equal(a["state"][n], b["state"][n]) for n in a["state"] if "norm.running" not in n)


@pytest.mark.parametrize("codec", ["", "/topk:ratio=0.2"])
@pytest.mark.parametrize("name", ["diloco", "local"])
def test_two_levels(name, codec):
    """4 ranks in 2 nodes: equal inside a node in every step, and all in consensus."""
    done = simulated(4, f"{name}:every=3,inside=dense,node_size=2{codec}", "adamw", 7)
    weights = [d["state"]["first.weight"] for d in done]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[0], weights[2])
    for d in done[1:]:
        assert all(torch.equal(d["common"][n], v) for n, v in done[0]["common"].items() if "num" not in n)


def test_two_levels_resume_and_send_each_element_once_between_nodes():
    text = "diloco:every=3,inside=dense,node_size=2"
    whole, parts = (simulated(4, text, "adamw", 8, cut=cut) for cut in (None, 4))
    for a, b in zip(whole, parts, strict=True):
        assert all(torch.equal(a["state"][n], b["state"][n]) for n in a["state"])

    def rank_of(driver):
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = stenograd.distribute(model, optimizer, "diloco:every=2,inside=dense,node_size=2", group=driver)
        before = sync._nodes.between.traffic.payload_bytes
        for _ in range(2):
            model(torch.ones(1, 16)).sum().backward()
            optimizer.step()
        sent = sync._nodes.between.traffic.payload_bytes - before
        sync.close()
        return sent

    assert ranks(4, rank_of) == [4 * 2 * 16 * 16 * 3 // 2 + 2 * 8] * 4  # and the pass's number


def test_pseudo_gradients_need_feedback_less_often():
    """4-bit values lose nothing that matters there; 2-bit values and what is left out do."""
    fed = {
        t: "ErrorFeedback" in repr(stenograd.method(t).compressor)
        for t in ("diloco/lowbit", "lowbit", "sparseloco")
    }
    assert fed == {"diloco/lowbit": False, "lowbit": True, "sparseloco": True}
    for text, message in {
        "diloco/dgc": "it accumulates gradients by itself",
        "diloco/topk:feedback=ef21": "it accumulates gradients by itself",
        "local/topk:divide=senders": "leave out divide=senders, or use diloco",
        "diloco/local": "one schedule and one slash",
    }.items():
        with pytest.raises(MethodError, match=message):
            stenograd.method(text)


@pytest.mark.parametrize("world", [1, 3])
def test_sparseloco_equals_its_equations(world):
    """e <- beta e + Delta; s = TopK(e) of each chunk; e <- e - s; phi <- phi - mean over senders of s."""
    every, beta, chunk, ratio = 2, 0.5, 16, 0.25
    text = f"sparseloco:every={every},ratio={ratio},chunk={chunk},values=float32,feedback_decay={beta}"
    models = [Net() for _ in range(world)]
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in models]
    flat = lambda model: torch.cat([p.detach().reshape(-1) for p in model.parameters()])  # noqa: E731
    phi, owed = flat(models[0]), [torch.zeros_like(flat(m)) for m in models]
    sizes = [p.numel() for p in models[0].parameters()]
    for step in range(1, 7):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step - 1).backward()
            optimizer.step()
        if step % every:
            continue
        total, senders = torch.zeros_like(phi), torch.zeros_like(phi)
        for rank, model in enumerate(models):
            e = beta * owed[rank] + (phi - flat(model))
            sent = torch.zeros_like(e)
            at = 0
            for size in sizes:  # buckets of one tensor: chunks begin with each
                for start in range(at, at + size, chunk):
                    part = e[start : min(start + chunk, at + size)]
                    keep = max(1, round(ratio * len(part)))
                    best = part.abs().topk(keep).indices
                    sent[start + best] = part[best]
                at += size
            owed[rank] = e - sent
            total, senders = total + sent, senders + (sent != 0)
        phi = phi - total / senders.clamp(min=1)
        with torch.no_grad():
            for model in models:
                for p, piece in zip(model.parameters(), phi.split(sizes), strict=True):
                    p.copy_(piece.view(p.shape))

    def rank_of(driver):
        model = Net()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        sync = stenograd.distribute(model, optimizer, text, group=driver, bucket_bytes=4, timeout_s=30)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, driver.rank, step).backward()
            optimizer.step()
        sync.close()
        return flat(model)

    for mine in ranks(world, rank_of):
        torch.testing.assert_close(mine, phi, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["local", "diloco"])
def test_parameters_that_join_in_mid_round_lose_no_rank_its_steps(name):
    """The round that has begun is ended by the mean: 1 - lr (1 + 2) / 2 for `local`, further for `diloco`."""

    def rank_of(driver):
        model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
        with torch.no_grad():
            model[0].weight.fill_(1.0)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        text = f"{name}:every=4" + (",outer_lr=2,momentum=0" if name == "diloco" else "")
        sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
        (model[0](torch.ones(1, 1)) * (driver.rank + 1)).sum().backward()
        optimizer.step()
        optimizer.add_param_group({"params": model[1].parameters()})
        found = model[0].weight.item()
        sync.close()
        return found

    wanted = 1 - 0.15 * (2 if name == "diloco" else 1)
    assert ranks(2, rank_of) == [pytest.approx(wanted)] * 2


@pytest.mark.parametrize("steps", [3, 4, 6, 8, 11])
@pytest.mark.parametrize("how", ["refresh", "reshard"])
def test_ending_an_eager_round_counts_each_step_of_each_rank_once(how, steps):
    """With constant gradients and outer steps of 1, all steps move the weight by their mean."""
    text = "diloco:every=4,eager=true,outer_lr=1,momentum=0"

    def rank_of(driver, new=None):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            if new is not None:
                sync.load_state_dict(new[driver.rank])
                sync.after_load()
                return model.weight.item()
            for _ in range(steps):
                optimizer.zero_grad()
                (model(torch.ones(1, 1)) * (driver.rank + 1)).sum().backward()
                optimizer.step()
            if how == "refresh":
                sync.refresh()
                return model.weight.item()
            return sync.state_dict()

    found = ranks(2, rank_of)
    if how == "reshard":
        new = stenograd.reshard(found, 3)
        found = ranks(3, lambda driver: rank_of(driver, new))
    assert found == [pytest.approx(1 - steps * 0.015, abs=1e-6)] * len(found)
