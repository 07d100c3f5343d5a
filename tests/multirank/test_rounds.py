"""Rounds: what is under way, who skips what, bad parameters, lost ranks, and ranks that change in number."""

import math
import os
import time
import warnings

import pytest
import torch
from support.losses import survivors, tell
from support.rounds import OPTIMIZERS, Net, equal, flat, loss_of, simulated
from support.training import descend
from torch import nn

import stenograd
from stenograd.errors import NonFiniteError, PeerLost
from stenograd.schedules import Local
from stenograd.simulate import ranks
from stenograd.topology import RandomPairs, mixing_matrix
from stenograd.topology.pairs import spread_per_round


def test_pending_tells_of_what_is_under_way_and_flush_finishes_it():
    def rank_of(driver):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = stenograd.distribute(
            model, optimizer, "diloco:every=4,delay=2,mix=0.5", group=driver, timeout_s=30
        )
        seen = []
        for _ in range(4):
            descend(optimizer, model(torch.ones(1, 4) * driver.rank).sum())
            seen.append(sync.pending)
        sync.flush()
        seen += [sync.pending, sync.round]
        sync.close()
        return seen

    assert ranks(2, rank_of) == [[False, False, False, True, False, 1]] * 2


@pytest.mark.parametrize(
    "text",
    [
        "local:every=3",
        "local:every=0.05s",
        "diloco:every=3,delay=2,mix=0.5",
        "diloco:every=3,eager=true",
        "gossip:every=3",
    ],
)
def test_nothing_is_pending_after_a_flush(text):
    """A program may flush until nothing is; here a round is due because the third step was skipped."""

    def rank_of(driver):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            for last in (False, False, True):
                time.sleep(0.1 * last)
                optimizer.zero_grad()
                model(torch.ones(1, 4) * driver.rank).sum().backward()
                if not last:
                    optimizer.step()
            before = sync.pending
            sync.flush()
            return before, sync.pending

    assert ranks(2, rank_of) == [(True, False)] * 2


@pytest.mark.parametrize(
    ("lr", "steps"), [(0.02, 4), (0.008, 6), (1e-6, 4 * 10**8), (1e-160, 2**31 - 1), (5e-324, 2**31 - 1)]
)
def test_a_period_is_bounded_at_every_rate(lr, steps):
    assert Local(every=4, qsr=0.02).period(lr) == pytest.approx(steps, rel=1e-9)


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


def test_quadratic_rule_keeps_ranks_together_while_the_rate_rises():
    """A round that begins at 0.001 would take 40,000 steps; at 0.1, where warm-up leads, it takes 4."""

    def rank_of(driver, state=None, stop=40):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        text, held = "local:every=2,qsr=0.2", []
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            if state is not None:
                sync.load_state_dict(state[driver.rank])
            for step in range(sync.step, stop):
                optimizer.param_groups[0]["lr"] = 0.1 * min(0.01 + step / 20, 1.0)
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                before = sync.round
                optimizer.step()
                held += [step] if sync.round > before else []
            return held, sync.state_dict()

    whole = ranks(2, rank_of)
    assert whole[0][0] == whole[1][0]
    assert whole[0][0][0] < 15
    assert [b - a for a, b in zip(whole[0][0][-4:], whole[0][0][-3:], strict=False)] == [4] * 3
    parts = ranks(2, rank_of, None, 5)
    rest = ranks(2, rank_of, [state for _, state in parts])
    assert [a + b for (a, _), (b, _) in zip(parts, rest, strict=True)] == [held for held, _ in whole]


@pytest.mark.parametrize(
    ("text", "skips", "waiting"),
    [
        ("local:every=2", (1, 3), [(0, False), (0, True), (1, False), (1, True)]),
        ("gossip", (2,), [(1, False), (2, False), (2, True), (4, False)]),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_skipped_step_leaves_what_is_due_to_the_next_forward_pass(text, skips, waiting, training):
    """Rank 1 skips steps, as GradScaler does: rank 0 waits for it, and nothing hangs."""

    def rank_of(driver):
        model = Net().train(training)  # some train in eval mode, with frozen statistics
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            seen = []
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, driver.rank, step).backward()
                if driver.rank == 0 or step not in skips:
                    optimizer.step()
                seen.append((sync.round, sync.pending))
            with sync.consensus():
                return seen, flat(model.state_dict())

    (first, a), (second, b) = ranks(2, rank_of)
    assert first == [((s + 1) // (2 if "local" in text else 1), False) for s in range(4)]
    assert second == waiting
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    "text", ["local:every=2", "diloco:every=2", "diloco:every=2,delay=1,mix=0.5", "gossip:every=2", "gossip"]
)
def test_a_rank_that_skips_a_step_and_calls_no_hook_comes_a_pass_late(text):
    """As in programs whose loss is a method of the model: rank 1 holds what is due after its next pass."""

    def rank_of(driver):
        model = Net()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            for step in range(8):
                optimizer.zero_grad()
                loss_of(model.forward, driver.rank, step).backward()
                if (driver.rank, step) != (1, 3):
                    optimizer.step()
            sync.flush()
            return sync.round, sync.step, flat(model.state_dict())

    (held, steps, a), (others, _, b) = ranks(2, rank_of)
    assert (held, others, steps) == (8 if text == "gossip" else 4, held, 8)
    assert "gossip" in text or "delay" in text or torch.equal(a, b)


def test_two_optimizers_skip_together_and_count_once():
    """The bad pass makes a round due on both ranks; it is held when the second optimizer has stepped."""

    def rank_of(driver):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        with stenograd.distribute(model, optimizers, "local:every=2", group=driver, timeout_s=30) as sync:
            for step in range(4):
                model.zero_grad()
                loss = model(torch.ones(1, 2)).sum()
                (loss * (math.nan if driver.rank == 1 and step == 1 else 1.0)).backward()
                for optimizer in optimizers:
                    optimizer.step()
            weight = model[0].weight.detach().clone()
            return sync.skipped, sync.round, weight

    with pytest.warns(RuntimeWarning, match="a gradient of rank 1 was not finite"):
        (first, rounds, a), (second, more, b) = ranks(2, rank_of)
    assert (first, second, rounds, more) == (0, 1, 2, 2)
    assert torch.equal(a, b)


@pytest.mark.parametrize("functional", [False, True], ids=["modules called", "weights used"])
@pytest.mark.parametrize("codec", ["", "/topk:ratio=0.3"])
def test_optimizers_that_step_in_turn_lose_no_round(codec, functional):
    """After a pass only one of two optimizers steps, and the model, a mere container, is never called.

    10 passes with H = 2: the round that is due is held before the next forward pass, or, where no module is
    called at all, when the other optimizer has stepped, too. The tenth is left to `consensus()`.
    """

    def rank_of(driver):
        model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
        optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "ab"]
        sync = stenograd.distribute(model, optimizers, f"local:every=2{codec}", group=driver, timeout_s=30)
        rounds = []
        for step in range(10):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + driver.rank))
            layer, optimizer = model["ab"[step % 2]], optimizers[step % 2]
            model.zero_grad()
            out = nn.functional.linear(x, layer.weight, layer.bias) if functional else layer(x)
            out.square().sum().backward()
            optimizer.step()
            rounds.append(sync.round)
        with sync.consensus():
            kept = [p.detach().clone() for p in model.parameters()]
        sync.close()
        return rounds, sync.round, kept

    (rounds, held, a), (same, _, b) = ranks(2, rank_of)
    assert rounds == same == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert held == 5
    assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("text", ["local:every=4", "local:every=4,after=3"])
def test_bytes_are_a_round_every_h_steps_and_those_of_gradients_before(pool, text):
    """8 steps: two rounds; or three of gradients with a few flags, 4 local ones, a round, and one more."""
    model_bytes, moved = pool.run(2, _bytes, text)[0]
    if "after" in text:
        assert 4 * model_bytes <= moved < 4.01 * model_bytes
    else:
        assert moved == 2 * (model_bytes + 8)  # 2 (N-1)/N = 1 of the model a round, and the pass's number


def _bytes(rank, text):
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, text, timeout_s=30)
    before = sync.traffic.moved_bytes
    for _ in range(8):
        descend(optimizer, model(torch.ones(1, 100)).sum())
    moved = sync.traffic.moved_bytes - before
    sync.close()
    return sum(p.numel() * p.element_size() for p in model.parameters()), moved


def test_two_levels_send_each_element_once_between_nodes():
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


@pytest.mark.parametrize("text", ["local:every=2,after=9", "local:every=2,inside=dense,node_size=2"])
def test_passes_that_are_switched_off_average_nothing(text):
    """Neither in the first passes nor inside nodes, where an engine of its own averages gradients."""

    def rank_of(driver):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            found = []
            for sync.enabled in (False, True):
                optimizer.zero_grad()
                (model(torch.ones(1, 1)) * driver.rank).sum().backward()
                found.append(model.weight.grad.item())
            return found, sync.step

    assert ranks(2, rank_of) == [([0.0, 0.5], 1), ([1.0, 0.5], 1)]


def test_replicas_are_checked_after_rounds():
    def rank_of(driver):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stenograd.distribute(
            model, optimizer, "diloco:every=2/topk", group=driver, timeout_s=30, check_every=1
        ) as sync:
            for _ in range(4):
                descend(optimizer, model(torch.ones(1, 4) * driver.rank).sum())
            return sync.round

    assert ranks(2, rank_of) == [2, 2]


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


@pytest.mark.parametrize("text", ["local:every=1", "diloco:every=1", "gossip"])
def test_refresh_holds_what_is_due_though_the_model_has_another_type_by_then(text):
    """The step after the pass was skipped, so its round is still to be held."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, text) as sync:
        for dtype, rounds in ((torch.float32, 1), (torch.float64, 2)):
            model(torch.ones(1, 2, dtype=dtype)).sum().backward()
            model.double()
            sync.refresh()
            assert (sync.round, sync.pending) == (rounds, False)


def test_refresh_after_a_round_that_was_due_makes_no_outer_step_of_its_own():
    """The round that it holds leaves nothing to end, and momentum alone moves no parameter."""

    def rank_of(driver, end):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stenograd.distribute(model, optimizer, "diloco:every=1", group=driver, timeout_s=30) as sync:
            for skipped in (False, False, True):
                optimizer.zero_grad()
                (model(torch.ones(1, 1)) * (driver.rank + 1)).sum().backward()
                if not skipped:
                    optimizer.step()
            getattr(sync, end)()
            return sync.round, model.weight.item()

    assert ranks(2, rank_of, "refresh") == ranks(2, rank_of, "flush")


@pytest.mark.parametrize(
    "text", ["diloco:every=4", "diloco:every=4/topk:ratio=0.1", "local:every=4", "local:every=4/sign"]
)
@pytest.mark.parametrize("steps", [6, 8])
def test_resharded_in_mid_round_ends_the_round(text, steps):
    """2 -> 3 ranks: the mean of both ranks' parameters is kept, and all new ranks start from one place."""
    saved = simulated(2, text, "momentum", steps)
    states = stenograd.reshard([s["sync"] for s in saved], 3)
    weights = saved[0]["state"]
    found = simulated(3, text, "momentum", 12 - steps, first=steps, states=states, weights=weights)
    starts, common = [f["start"][0] for f in found], flat(saved[0]["common"])
    assert equal(starts)
    if text.startswith("local"):
        mean = (flat(saved[0]["state"]) + flat(saved[1]["state"])) / 2
        torch.testing.assert_close(flat(starts[0]), mean, rtol=1e-6, atol=1e-7)
    else:
        assert torch.equal(flat(starts[0]), common) == (steps == 8)
    due = steps % 4 or (text == "local:every=4/sign")  # differences are never all sent
    assert found[0]["start"][1] == steps // 4 + bool(due)
    assert "sign" in text or equal([f["state"] for f in found])


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
                descend(optimizer, (model(torch.ones(1, 1)) * (driver.rank + 1)).sum())
            if how == "refresh":
                sync.refresh()
                return model.weight.item()
            return sync.state_dict()

    found = ranks(2, rank_of)
    if how == "reshard":
        new = stenograd.reshard(found, 3)
        found = ranks(3, lambda driver: rank_of(driver, new))
    assert found == [pytest.approx(1 - steps * 0.015, abs=1e-6)] * len(found)


@pytest.mark.filterwarnings("ignore:fp16. an average overflowed")
def test_an_eager_round_beyond_what_its_codec_holds_can_be_ended():
    def rank_of(driver):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
        text = "diloco:every=1,eager=true/fp16"
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            (model(torch.ones(1, 1)) * (driver.rank + 1)).sum().backward()
            optimizer.step()
            sync.refresh()
            return model.weight.item()

    first, second = ranks(2, rank_of)
    assert first == second


def test_parameters_that_are_finite_on_no_rank_are_an_error_on_every_rank():
    def rank_of(driver):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = stenograd.distribute(model, optimizer, "local:every=1", group=driver, timeout_s=30)
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model.weight[0, 0] = math.inf
        with pytest.raises(NonFiniteError, match=r"round 0 of local:every=1 found .* on all"):
            optimizer.step()
        sync.close()
        return True

    assert ranks(2, rank_of) == [True, True]


@pytest.mark.parametrize("text", ["diloco:every=2", "local:every=2", "diloco:every=2/topk:ratio=0.5"])
def test_a_round_with_bad_parameters_is_void_and_the_second_one_an_error(text):
    def rank_of(driver):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
        start = model.weight.detach().clone()
        found = []
        for step in range(8):
            optimizer.zero_grad()
            model(torch.ones(1, 4) * (driver.rank + 1)).sum().backward()
            if driver.rank == 1 and step in (1, 5, 7):
                with torch.no_grad():
                    model.weight[0, 0] = math.inf
            if step == 7:
                with pytest.raises(NonFiniteError, match="not finite on a rank, as the round before did"):
                    optimizer.step()
                continue
            optimizer.step()
            if step in (1, 3):
                found.append((sync.round, bool(model.weight.isfinite().all())))
                if step == 1 and driver.rank == 1 and text.startswith("diloco"):
                    assert torch.equal(model.weight, start)
        sync.close()
        return found

    with pytest.warns(RuntimeWarning, match="its parameters were not finite in round"):
        both = ranks(2, rank_of)
    assert both == [[(0, True), (1, True)]] * 2


@pytest.mark.parametrize(
    ("text", "world"),
    [
        ("diloco:every=4,fragments=2", 2),
        ("diloco:every=4,fragments=2,delay=1,mix=0.5/topk:ratio=0.5", 2),
        ("diloco:every=4,fragments=2,inside=dense,node_size=2", 4),
    ],
)
def test_a_rank_whose_whole_model_is_lost_makes_one_fragments_exchange_void(text, world):
    """It is brought back as a whole: the next fragment would be void for the same reason, which ends all."""

    def rank_of(driver):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            for step in range(12):
                descend(optimizer, model(torch.ones(1, 4) * (driver.rank + 1)).sum())
                if step == 0 and driver.rank == world - 1:
                    with torch.no_grad():
                        for p in model.parameters():
                            p.fill_(math.nan)
            return sync.round, all(bool(p.isfinite().all()) for p in model.parameters())

    with pytest.warns(RuntimeWarning, match="not finite"):
        assert ranks(world, rank_of) == [(3 if "delay" not in text else 2, True)] * world


class _Adagrad(torch.optim.Adagrad):
    """As in earlier versions of torch, whose steps make no states: only the constructor does."""

    __module__ = "torch.optim.adagrad"

    def _init_group(self, group, *lists):
        if not all(self.state[p] for p in group["params"]):
            raise KeyError("sum")
        return super()._init_group(group, *lists)


@pytest.mark.parametrize("text", ["local:every=2,states=reset", "diloco:every=2,states=reset"])
def test_an_optimizer_that_makes_its_states_at_the_beginning_starts_afresh_after_a_round(text):
    """After five steps only the last is in the sum."""
    model = nn.Linear(3, 1)
    optimizer = _Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    with stenograd.distribute(model, optimizer, text) as sync:
        for _ in range(5):
            descend(optimizer, model(torch.ones(1, 3)).square().sum())
        assert sync.round == 2
    for p in model.parameters():
        assert optimizer.state[p]["step"] == 1
        torch.testing.assert_close(optimizer.state[p]["sum"], 0.5 + p.grad.square())


def moved(text, start, moves):
    """Return each rank's weights and round after each of some moves of two ranks, made in float16."""

    def rank_of(driver):
        model = nn.Linear(1, 4, bias=False).half()
        model.weight.data.fill_(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
        found = []
        for move in moves:
            descend(optimizer, (model.weight.float() * -move).sum())
            found.append((model.weight.detach().clone(), sync.round))
        sync.close()
        return found

    return ranks(2, rank_of)


def test_an_outer_step_beyond_float16_takes_nothing_and_leaves_no_trace():
    """delta = phi - theta, v <- 0.9 v + delta, phi <- phi - 0.7 (delta + 0.9 v), in float64 by hand.

    First v = -19,968 and phi = 30,016 + 1.33 * 19,968 = 56,573.44, in float16 56,576. After 4,992 more it
    would be 74,538: void, and theta stays 61,568. At 14,976 less, 46,592, delta is 9,981.44, v = 0.9 *
    -19,968 + delta = -7,989.76, and phi = 54,619.98, in float16 54,624.
    """
    with pytest.warns(RuntimeWarning, match="beyond what parameters of this type hold"):
        both = moved("diloco:every=1", 30016.0, [19968.0, 4992.0, -14976.0])
    for done in both:
        assert [(w.unique().tolist(), rounds) for w, rounds in done] == [
            ([56576.0], 1),
            ([61568.0], 1),
            ([54624.0], 2),
        ]


def test_two_outer_steps_beyond_float16_in_a_row_are_an_error_on_all_ranks():
    with pytest.warns(RuntimeWarning), pytest.raises(NonFiniteError, match="as the round before did"):
        moved("diloco:every=1", 30016.0, [19968.0, 4992.0, 0.0])


@pytest.mark.filterwarnings("ignore:.*(beyond what parameters|would not have been after|were not finite)")
@pytest.mark.parametrize(
    "text",
    [
        "diloco:every=1,eager=true",
        "diloco:every=1,topology=pairs",
        "local:every=1/terngrad",
        "gossip:graph=complete,consensus=1/terngrad",
    ],
)
def test_no_round_leads_beyond_float16(text):
    """Momentum, or what a codec draws for two ranks, overshoots; each step by itself stays below 62,000."""
    pattern = torch.tensor([[1.0], [0.9], [0.85], [0.5]])
    for done in moved(text, 0.0, [pattern * move for move in (50000.0, 9000.0, -3000.0, 2000.0, -9000.0)]):
        assert all(w.isfinite().all() for w, _ in done)


@pytest.mark.parametrize("world", [1, 4])
def test_a_rank_with_bad_parameters_takes_its_partners_or_its_outer_ones(world):
    """It costs nobody else anything: all hold every round."""
    with pytest.warns(RuntimeWarning, match="not finite"):
        done = simulated(world, "noloco:every=2", "momentum", 8, spoilt=((min(world - 1, 1), 3),))
    assert all(bool(flat(d["state"]).isfinite().all()) for d in done)
    assert {d["round"] for d in done} == {4 if world > 1 else done[0]["round"]}


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7])
def test_pairs_are_disjoint_and_change(size):
    """Each row has one partner who has it; over 40 rounds everybody meets everybody."""
    met = set()
    for step in range(40):
        partners = [RandomPairs().partner(rank, size, step) for rank in range(size)]
        assert partners.count(None) == size % 2
        assert all(p is None or partners[p] == rank != p for rank, p in enumerate(partners))
        met |= {(rank, p) for rank, p in enumerate(partners) if p is not None}
        matrix = mixing_matrix(RandomPairs(), size, step)
        assert torch.equal(matrix, matrix.T)
        assert torch.equal(matrix.sum(0), torch.ones(size, dtype=torch.float64))
    assert len(met) == size * (size - 1)
    assert [RandomPairs(1).partner(0, 8, s) for s in range(8)] != [
        RandomPairs(2).partner(0, 8, s) for s in range(8)
    ]


@pytest.mark.parametrize(
    ("lr", "momentum", "nesterov"), [(0.7, 0.5, False), (0.7, 0.9, False), (0.7, 0.9, True), (0.9, 0.9, True)]
)
def test_the_spread_among_ranks_grows_as_predicted(lr, momentum, nesterov):
    """1,000 ranks of 30 numbers, torch's SGD along x_i - (x_i + x_j) / 2: variance per round, late rounds."""
    x = torch.nn.Parameter(
        torch.randn(1000, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )
    sgd = torch.optim.SGD([x], lr=lr, momentum=momentum, nesterov=nesterov)
    variances = []
    for step in range(40):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(step))
        other = torch.empty(1000, dtype=torch.long)
        other[order[0::2]], other[order[1::2]] = order[1::2], order[0::2]
        x.grad = x.detach() - (x.detach() + x.detach()[other]) / 2
        sgd.step()
        variances.append(float(x.detach().var(0).mean()))
    got = (variances[-1] / variances[9]) ** (1 / 30)
    assert got == pytest.approx(spread_per_round(lr, momentum, nesterov), rel=0.06)


def _dies(rank, folder, text):
    """Train; rank 2 dies before its second round."""
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, text, timeout_s=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(20):
            if (rank, step) == (2, 3):
                os._exit(9)
            optimizer.zero_grad()
            (model(torch.ones(1, 3, dtype=torch.float64)) - rank).square().sum().backward()
            try:
                optimizer.step()
            except PeerLost as error:
                tell(folder, rank, error.ranks)
                return
    with sync.consensus():
        common = float(model.weight.sum())
    told = sum("were lost" in str(w.message) for w in caught)
    tell(folder, rank, (common, sync.world_size, [e["lost"] for e in sync.events], told))
    sync.close()


@pytest.mark.parametrize("lost", ["drop", "raise"])
def test_a_lost_rank_is_dropped_or_named(pool, tmp_path, lost):
    """Whoever is paired with it goes on alone; targets 0, 1 and 3 have the mean 4 / 3."""
    told = list(survivors(pool, 4, _dies, tmp_path, f"noloco:every=2,lost={lost}").values())
    if lost == "raise":
        assert told == [(2,)] * 3
        return
    assert [found[1:] for found in told] == [(3, [[2]], 1)] * 3
    assert [found[0] for found in told] == [pytest.approx(told[0][0], rel=1e-9)] * 3
    assert told[0][0] == pytest.approx(4 / 3, abs=0.15)
