"""Hybrid sharding: FSDP2 inside a replica, our methods between replicas; four gloo ranks as 2 x 2."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import stenograd
from stenograd.wire.traffic import ATTACH

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (2, 8), reason="FSDP2 of torch 2.6 does not run on CPU")

BUCKET = 3000  # bytes: several buckets, and a shard that is larger than one


def _net(seed=0):
    """Layers of which one has 7 rows: two ranks hold uneven shards; and a bias of 1: one holds none."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 7),
        nn.Tanh(),
        nn.Linear(7, 1),
    )


def _sharded(mesh, seed=0):
    net = _net(seed)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def _batch(step, rank):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 12, generator=g), torch.randn(6, 1, generator=g)


def _step(model, optimizer, step, rank, bad=False):
    x, y = _batch(step, rank)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    (loss * (float("nan") if bad else 1.0)).backward()
    optimizer.step()


def _whole(model):
    return torch.cat([p.detach().full_tensor().reshape(-1) for p in model.parameters()])


def _attached(mesh, method, seed=0, **options):
    model = _sharded(mesh["shard"], seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = stenograd.distribute(
        model, optimizer, method, group=mesh["replicate"], bucket_bytes=BUCKET, timeout_s=60, **options
    )
    return model, optimizer, sync


def _dense(rank):
    mesh = _mesh()
    native = _sharded(mesh)
    native_optimizer = torch.optim.AdamW(native.parameters(), lr=0.01)
    model, optimizer, sync = _attached(mesh, "dense")
    with sync:
        for step in range(20):
            _step(native, native_optimizer, step, rank)
            _step(model, optimizer, step, rank)
        return _whole(native), _whole(model), sync.step


def test_dense_equals_native_hybrid_sharding(pool):
    for native, ours, steps in pool.run(4, _dense, timeout_s=200):
        assert steps == 20
        torch.testing.assert_close(ours, native, rtol=0, atol=1e-6)


def _compressed(rank, method):
    mesh = _mesh()
    model, optimizer, sync = _attached(mesh, method, check_every=4)
    with sync:
        for step in range(8):
            _step(model, optimizer, step, rank)
        return _whole(model), sync.traffic.payload_bytes, sync.step


def test_methods_send_less_and_replicas_stay_equal(pool):
    sent = {}
    for method in ("dense", "topk:ratio=0.05", "sign", "powersgd:rank=2", "qsgd"):
        ranks = pool.run(4, _compressed, method, timeout_s=200)
        for whole, _, steps in ranks:
            assert torch.equal(whole, ranks[0][0]), method
            assert torch.isfinite(whole).all()
            assert steps == 8
        sent[method] = ranks[0][1]
    assert sent["topk:ratio=0.05"] < sent["dense"] / 5
    assert sent["powersgd:rank=2"] < sent["dense"] / 3  # shards keep their shapes, so matrices stay matrices


def _bad(rank):
    """The same 6 steps twice: with a NaN on rank 3 in the third, and without that step."""
    mesh = _mesh()
    wholes, counts = [], []
    for broken in (True, False):
        model, optimizer, sync = _attached(mesh, "topk:ratio=0.1")
        with sync, _quiet():
            for step in range(6):
                if broken or step != 2:
                    _step(model, optimizer, step, rank, bad=broken and step == 2 and rank == 3)
            wholes.append(_whole(model))
            counts.append((sync.step, sync.skipped))
    return wholes, counts


def _quiet():
    import warnings

    context = warnings.catch_warnings()
    warnings.simplefilter("ignore")
    return context


def test_a_nan_in_one_shard_costs_one_step_in_all_replicas(pool):
    for (broken, whole), counts in pool.run(4, _bad, timeout_s=200):
        assert counts == [(5, 1), (5, 0)]
        assert torch.equal(broken, whole)


def _rarely(rank, bad, scaled=False):
    """The first layers step in each of 8 batches, the last in every 4th; rank 3 has a NaN in batch 2."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    mesh = _mesh()
    model = _sharded(mesh["shard"])
    parts = [p for layer in model[:6] for p in layer.parameters()], list(model[6].parameters())
    often, rarely = (torch.optim.SGD(part, lr=0.01) for part in parts)
    options = {"group": mesh["replicate"], "bucket_bytes": BUCKET, "timeout_s": 60}
    moved = []
    with stenograd.distribute(model, [often, rarely], "dense", **options) as sync, _quiet():
        for batch in range(1, 9):
            x, y = _batch(batch, rank)
            often.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss * (float("nan") if bad and (rank, batch) == (3, 2) else 1.0)).backward()
            before = [[p.detach().full_tensor().clone() for p in part] for part in parts]
            scaler.step(often)
            if batch % 4 == 0:
                scaler.step(rarely)
                rarely.zero_grad()
            scaler.update()
            now = [[p.detach().full_tensor() for p in part] for part in parts]
            moved.append([not all(map(torch.equal, a, b)) for a, b in zip(before, now, strict=True)])
        return [sum(column) for column in zip(*moved, strict=True)], sync.skipped, _whole(model)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_nan_costs_another_optimizers_later_steps_nothing(pool, scaled):
    """As without shards: of eight steps the second is lost, of the other optimizer's two none."""
    ranks = pool.run(4, _rarely, True, scaled, timeout_s=200)
    for moved, skipped, whole in ranks:
        assert (moved, skipped) == ([7, 2], 1)
        assert torch.equal(whole, ranks[0][2])
    assert [found[:2] for found in pool.run(4, _rarely, False, scaled, timeout_s=200)] == [([8, 2], 0)] * 4


def _accumulating(rank):
    """Exchanges only in the last of four passes: held back by FSDP, and by our no_sync; and the oracle."""
    mesh = _mesh()
    wholes, steps = [], []
    for how in ("fsdp", "ours"):
        model, optimizer, sync = _attached(mesh, "dense")
        with sync:
            for step in range(3):
                optimizer.zero_grad()
                for part in range(4):
                    x, y = _batch(10 * step + part, rank)
                    last = part == 3
                    if how == "fsdp":
                        model.set_requires_gradient_sync(last)
                        nn.functional.mse_loss(model(x), y).div(4).backward()
                    elif last:
                        nn.functional.mse_loss(model(x), y).div(4).backward()
                    else:
                        with sync.no_sync():
                            nn.functional.mse_loss(model(x), y).div(4).backward()
                optimizer.step()
            wholes.append(_whole(model))
            steps.append(sync.step)
    plain = _net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(4):
            for other in range(4):
                x, y = _batch(10 * step + part, other)
                nn.functional.mse_loss(plain(x), y).div(16).backward()
        optimizer.step()
    return wholes, steps, torch.cat([p.detach().reshape(-1) for p in plain.parameters()])


def test_accumulation_exchanges_once_per_step_and_equals_one_process(pool):
    for wholes, steps, plain in pool.run(4, _accumulating, timeout_s=200):
        assert steps == [3, 3]
        for whole in wholes:
            torch.testing.assert_close(whole, plain, rtol=0, atol=2e-5)


def _resumed(rank, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh = _mesh()
    whole, optimizer, sync = _attached(mesh, "topk:ratio=0.1")
    with sync:
        for step in range(8):
            _step(whole, optimizer, step, rank)
    model, optimizer, sync = _attached(mesh, "topk:ratio=0.1")
    with sync:
        for step in range(5):
            _step(model, optimizer, step, rank)
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(parts, checkpoint_id=folder)
        stenograd.save_state(folder, sync)
    model, optimizer, sync = _attached(mesh, "topk:ratio=0.1", seed=9)
    with sync:
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(parts, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
        stenograd.load_state(folder, sync)
        for step in range(5, 8):
            _step(model, optimizer, step, rank)
    return _whole(whole), _whole(model)


def test_a_sharded_training_resumes_bit_for_bit(pool, tmp_path):
    for whole, resumed in pool.run(4, _resumed, str(tmp_path), timeout_s=200):
        assert torch.equal(whole, resumed)
    assert (tmp_path / "stenograd-shard0of2").is_dir()
    assert (tmp_path / "stenograd-shard1of2").is_dir()


def _residuals(rank, folder, replicas):
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer, sync = _attached(mesh, "topk:ratio=0.1")
    with sync:
        if replicas == 2:
            _step(model, optimizer, 0, rank)
            stenograd.save_state(folder, sync)
        else:
            stenograd.load_state(folder, sync)
        states = sync.state_dict()["parameters"]
        return mesh["shard"].get_local_rank(), {
            n: s["residual"] for n, s in states.items() if "residual" in s
        }


def test_residuals_of_two_replicas_go_to_one(pool, tmp_path):
    before = pool.run(4, _residuals, str(tmp_path), 2, timeout_s=200)
    for shard, after in pool.run(2, _residuals, str(tmp_path), 1, timeout_s=200):
        assert after
        for name, residual in after.items():
            owed = sum(states[name] for which, states in before if which == shard)
            torch.testing.assert_close(residual, owed)


def _files(rank, folder):
    """Traces and states of different shards do not take each other's place."""
    mesh = _mesh()
    model, optimizer, sync = _attached(mesh, "topk:ratio=0.1")
    with sync:
        with sync.trace(f"{folder}/trace.json"):
            _step(model, optimizer, 0, rank)
        keys = list(stenograd.PerRank(sync).state_dict())
        with pytest.raises(stenograd.errors.ConfigError, match="save_state"):
            stenograd.save_checkpoint(folder, step=1, model=model, optimizer=optimizer, sync=sync)
    return keys


def test_every_shard_has_files_and_keys_of_its_own(pool, tmp_path):
    keys = pool.run(4, _files, str(tmp_path), timeout_s=200)
    assert sorted(k for (k,) in keys) == [f"rank{r}-shard{s}of2" for r in (0, 1) for s in (0, 1)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace-shard0of2.json", "trace-shard1of2.json"]


def _partly_frozen(rank):
    """A frozen layer that is whole on each rank, before one that is sharded; and two calls of refresh()."""
    mesh = _mesh()
    torch.manual_seed(rank)
    frozen, trained = nn.Linear(12, 4).requires_grad_(False), nn.Linear(4, 1)
    model = nn.Sequential(frozen, fully_shard(trained, mesh=mesh["shard"]))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, group=mesh["replicate"], timeout_s=60, check_every=1)
    with sync:
        brought = []
        for _ in range(2):
            before = _broadcast(sync)
            sync.refresh()
            brought.append(_broadcast(sync) - before)
        nn.functional.mse_loss(model(_batch(0, rank)[0]), _batch(0, rank)[1]).backward()
        optimizer.step()
        return brought, frozen.weight.clone(), trained.weight.full_tensor()


def _broadcast(sync):
    return sum(e.payload_bytes for e in sync.traffic.entries() if e.op == "broadcast" and e.kind == ATTACH)


def test_a_frozen_parameter_may_be_whole_and_a_refresh_brings_nothing_twice(pool):
    found = pool.run(4, _partly_frozen, timeout_s=200)
    for at, (brought, frozen, trained) in enumerate(found):
        assert brought == [0, 0]
        assert torch.equal(frozen, found[at % 2][1])  # equal where the same shards are
        assert torch.equal(trained, found[0][2])


def _by_closure(rank, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2))  # LBFGS takes even shards only
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x, _ = _batch(0, rank)
    evaluations = 0

    def closure():
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = model(x).square().mean() * 10.0 ** (-10 * rank)
        loss.backward()
        return loss.detach()

    with stenograd.distribute(model, optimizer, group=mesh["replicate"], timeout_s=60):
        optimizer.step(closure)
    return evaluations, _whole(model)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 2)], ids=str)
def test_lbfgs_decides_alike_on_all_shards_of_all_replicas(pool, mesh_shape):
    """Losses on rank 1 and beyond are such that LBFGS would end there at once."""
    found = pool.run(mesh_shape[0] * 2, _by_closure, mesh_shape, timeout_s=60)
    assert found[0][0] > 1
    for evaluations, whole in found:
        assert evaluations == found[0][0]
        assert torch.equal(whole, found[0][1])


def _refused(rank):
    mesh = _mesh()
    said = []

    def attempt(model, method="topk", **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            stenograd.distribute(model, optimizer, method, timeout_s=30, **options)
        except stenograd.StenogradError as error:
            said.append(str(error))

    across = {"group": mesh["replicate"]}
    attempt(_sharded(mesh), **across)
    attempt(_sharded(mesh["shard"]))
    attempt(_sharded(mesh["shard"]), group=mesh["shard"])
    attempt(_sharded(mesh["shard"]), "local:every=4", **across)
    attempt(_sharded(mesh["shard"]), "diloco:quorum=0.75", **across)
    attempt(_net(), group=mesh)
    partly = _net()
    fully_shard(partly[2], mesh=mesh["shard"])
    attempt(partly, **across)
    return said


def test_what_cannot_work_is_refused_with_the_fix(pool):
    fixes = [
        'mesh=mesh["shard"]',
        'group=mesh["replicate"]',
        "other dimension",
        "a sharded model (FSDP) cannot be trained with local:every=4",
        "a sharded model (FSDP) cannot be trained with diloco:quorum=0.75",
        "one dimension",
        "root",
    ]
    for said in pool.run(4, _refused, timeout_s=200):
        assert len(said) == len(fixes)
        for message, fix in zip(said, fixes, strict=True):
            assert fix in message


def _meshed(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = _net(rank)
    sync = stenograd.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "topk:ratio=0.1", group=mesh["dp"], timeout_s=30
    )
    with sync:
        nn.functional.mse_loss(model(_batch(0, rank)[0]), _batch(0, rank)[1]).backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def test_a_device_mesh_of_one_dimension_is_a_group(pool):
    first, second = pool.run(2, _meshed)
    assert torch.equal(first, second)
