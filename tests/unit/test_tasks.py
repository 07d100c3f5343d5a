"""The tasks: files, recipes, samples, models, and who trains on what."""

import gzip
import os
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stenograd.errors import ConfigError, DataError, StenogradError
from stenograd.tasks import Recipe, Task, batches, digits, eval_batches, load, names, shard, steps_per_epoch
from stenograd.tasks.base import IGNORE
from stenograd.tasks.models import CharGPT, digits_cnn, mnist_cnn


def parameter_count(model):
    return sum(p.numel() for p in model.parameters())


# --- recipes ---------------------------------------------------------------------------------------------

RECIPE = Recipe(epochs=2, batch_size=4, lr=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be a whole number >= 1, got 0"),
        ({"epochs": 1.5}, "epochs must be a whole number >= 1, got 1.5"),
        ({"batch_size": True}, "batch_size must be a whole number >= 1, got True"),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number >= 0, got -1"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be a whole number >= 1, got 0"),
        ({"lr": 0.0}, "lr must be finite and > 0, got 0.0"),
        ({"lr": float("nan")}, "lr must be finite and > 0, got nan"),
        ({"lr": float("inf")}, "lr must be finite and > 0, got inf"),
        ({"min_lr": 0.2}, r"min_lr must be in \[0, lr\] = \[0, 0.1\], got 0.2"),
        ({"weight_decay": -1.0}, "weight_decay must be finite and >= 0, got -1.0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"nesterov": True}, "nesterov needs momentum > 0"),
        ({"optimizer": "adam"}, "optimizer must be 'sgd' or 'adamw', got 'adam'"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum must be 0 and nesterov off with adamw"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ({"betas": (0.9,)}, r"betas must be two numbers in \[0, 1\)"),
    ],
)
def test_recipe_rejects(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(RECIPE, **change)


def test_recipe_builds_sgd():
    recipe = replace(RECIPE, momentum=0.9, nesterov=True, weight_decay=0.01)
    optimizer = recipe.make_optimizer(nn.Linear(2, 3))
    (group,) = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.SGD)
    found = {key: group[key] for key in ("lr", "momentum", "nesterov", "weight_decay")}
    assert found == {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def test_recipe_builds_adamw_that_spares_vectors():
    recipe = replace(RECIPE, optimizer="adamw", weight_decay=0.5, betas=(0.8, 0.99))
    optimizer = recipe.make_optimizer(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    matrices, vectors = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (matrices["weight_decay"], [p.ndim for p in matrices["params"]]) == (0.5, [2])
    assert (vectors["weight_decay"], [p.ndim for p in vectors["params"]]) == (0.0, [1, 1, 1])
    assert matrices["betas"] == (0.8, 0.99)


def test_optimizer_leaves_frozen_parameters_out():
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    assert RECIPE.make_optimizer(model).param_groups[0]["params"] == [model.weight]


def test_constant_rate_needs_no_schedule():
    assert RECIPE.make_scheduler(RECIPE.make_optimizer(nn.Linear(1, 1)), 10) is None


def test_schedule_warms_up_then_falls_to_min_lr_at_the_last_step():
    """Three warm-up steps at 1/4, 2/4, 3/4 of 0.1, the peak at step 3, and 0.01 at step 9, the last."""
    recipe = replace(RECIPE, warmup_steps=3, min_lr=0.01)
    optimizer = recipe.make_optimizer(nn.Linear(1, 1))
    scheduler = recipe.make_scheduler(optimizer, 10)
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[6] == pytest.approx(0.055)
    assert rates[9:] == pytest.approx([0.01, 0.01, 0.01])
    assert rates[3:10] == sorted(rates[3:10], reverse=True)


def test_warm_up_alone_stays_at_the_peak():
    recipe = replace(RECIPE, warmup_steps=1)
    assert [recipe.lr_factor(step, 3) for step in range(3)] == [0.5, 1.0, 1.0]


def test_run_shorter_than_the_warm_up():
    recipe = replace(RECIPE, warmup_steps=9, min_lr=0.0)
    assert [recipe.lr_factor(step, 2) for step in (0, 1)] == pytest.approx([0.1, 0.2])


def test_scheduler_needs_a_step():
    with pytest.raises(ConfigError, match="total_steps must be >= 1, got 0"):
        RECIPE.make_scheduler(RECIPE.make_optimizer(nn.Linear(1, 1)), 0)


# --- shards ----------------------------------------------------------------------------------------------

worlds = st.integers(1, 7)
sizes = st.integers(1, 200)
seeds = st.integers(0, 2**40)
common = settings(max_examples=150, deadline=None)


@common
@given(worlds, sizes, seeds, st.booleans())
def test_shards_hold_every_sample_once(world_size, extra, seed, shuffle):
    size = world_size - 1 + extra
    shards = [shard(size, rank, world_size, shuffle=shuffle, seed=seed) for rank in range(world_size)]
    assert sorted(torch.cat(shards).tolist()) == list(range(size))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    if not shuffle:
        assert torch.cat(shards).tolist() == list(range(size))


@common
@given(worlds, sizes, st.integers(1, 40), seeds, st.booleans())
def test_epoch_shows_every_sample_once_in_equally_many_batches(world_size, extra, batch_size, seed, shuffle):
    size = world_size - 1 + extra
    steps = steps_per_epoch(size, world_size, batch_size, None)
    seen = []
    for rank in range(world_size):
        mine = shard(size, rank, world_size, shuffle=shuffle, seed=seed)
        epoch = list(batches(mine, batch_size, epoch=1, seed=seed, shuffle=shuffle, steps=steps))
        assert len(epoch) == steps
        assert 1 <= min(map(len, epoch)) <= max(map(len, epoch)) <= max(batch_size, 2)
        seen += torch.cat(epoch).tolist()
    assert sorted(seen) == list(range(size))


@common
@given(sizes, st.integers(1, 20), st.integers(1, 60))
def test_given_steps_are_kept(size, batch_size, steps):
    """Any number of steps: that many batches, and no sample seen two times more often than another."""
    assert steps_per_epoch(size, 1, batch_size, steps) == steps
    epoch = list(batches(torch.arange(size), batch_size, epoch=0, seed=0, shuffle=True, steps=steps))
    counts = torch.cat(epoch).bincount(minlength=size)
    assert len(epoch) == steps
    assert 1 <= min(map(len, epoch)) <= max(map(len, epoch)) <= batch_size + 1
    assert int(counts.max() - counts.min()) <= 1


@common
@given(worlds, st.integers(0, 50), st.integers(1, 9))
def test_evaluation_covers_every_sample_once(world_size, size, batch_size):
    found = [
        batch.tolist()
        for rank in range(world_size)
        for batch in eval_batches(size, rank, world_size, batch_size)
    ]
    assert [sample for batch in found for sample in batch] == list(range(size))
    assert all(1 <= len(batch) <= batch_size for batch in found)


def order(*, epoch=0, seed=0):
    return torch.cat(
        list(batches(torch.arange(50), 8, epoch=epoch, seed=seed, shuffle=True, steps=7))
    ).tolist()


def test_orders_differ_by_epoch_and_seed_and_repeat():
    assert order() == order()
    assert len({tuple(order(epoch=epoch, seed=seed)) for epoch in range(3) for seed in range(3)}) == 9


def test_shards_differ_by_seed_and_repeat():
    cuts = [tuple(shard(50, 0, 2, shuffle=True, seed=seed).tolist()) for seed in (0, 1, 0)]
    assert cuts[0] == cuts[2] != cuts[1]


def test_orders_leave_the_global_random_state_alone():
    before = torch.get_rng_state()
    order()
    shard(9, 0, 2, shuffle=True, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_uneven_shards_take_equally_many_steps():
    """65 samples on 2 ranks: 33 fill two batches of 32 at most, so 32 are cut in two batches as well."""
    steps = steps_per_epoch(65, 2, 32, None)
    lengths = [
        [len(b) for b in batches(torch.arange(n), 32, epoch=0, seed=0, shuffle=True, steps=steps)]
        for n in (33, 32)
    ]
    assert lengths == [[17, 16], [16, 16]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: shard(3, 0, 4, shuffle=False, seed=0), DataError, "found 3 samples for 4 ranks"),
        (lambda: shard(3, 2, 2, shuffle=False, seed=0), ConfigError, r"rank must be in 0\.\.1, got 2"),
        (lambda: shard(3, 0, 0, shuffle=False, seed=0), ConfigError, "world_size must be >= 1, got 0"),
        (lambda: shard(3, 0, 1, shuffle=True, seed=-1), ConfigError, "seed and epoch must be >= 0"),
        (lambda: steps_per_epoch(3, 4, 1, None), DataError, "found 3 samples for 4 ranks"),
        (lambda: steps_per_epoch(3, 1, 0, None), ConfigError, "batch_size must be >= 1, got 0"),
        (lambda: steps_per_epoch(3, 1, 1, 0), ConfigError, "steps must be >= 1, got 0"),
        (lambda: eval_batches(3, 0, 1, 0), ConfigError, "batch_size must be >= 1, got 0"),
        (lambda: eval_batches(3, -1, 1, 1), ConfigError, "rank must be in"),
    ],
)
def test_shards_reject(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- mnist -----------------------------------------------------------------------------------------------


def idx(sizes, body=None, magic=None):
    """Return an IDX file of bytes 0, 1, 2, ... modulo 10."""
    count = torch.Size(sizes).numel()
    body = bytes(i % 10 for i in range(count)) if body is None else body
    return struct.pack(f">{1 + len(sizes)}I", magic or 0x0800 + len(sizes), *sizes) + body


FILES = {
    "train-images-idx3-ubyte": idx((6, 28, 28)),
    "train-labels-idx1-ubyte": idx((6,)),
    "t10k-images-idx3-ubyte": idx((3, 28, 28)),
    "t10k-labels-idx1-ubyte": idx((3,)),
}
IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def write(folder, changes=None, rename=str, pack=bytes):
    for name, content in {**FILES, **(changes or {})}.items():
        if content is not None:
            (folder / rename(name)).write_bytes(pack(content))


@pytest.mark.parametrize("rename", [str, lambda name: name.replace("-idx", ".idx")])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist_reads_four_files(tmp_path, rename, packed):
    if packed:
        write(tmp_path, rename=lambda name: rename(name) + ".gz", pack=gzip.compress)
    else:
        write(tmp_path, rename=rename)
    task = load("mnist", tmp_path)
    assert (task.train_size, task.eval_size) == (6, 3)
    inputs, targets = task.train_batch(torch.tensor([5, 0]))
    assert (inputs.shape, inputs.dtype, targets.tolist()) == ((2, 1, 28, 28), torch.float32, [5, 0])
    first = [i % 10 / 255 for i in range(28)]
    assert inputs[1, 0, 0].tolist() == pytest.approx(first)
    assert task.eval_batch(torch.tensor([2]))[1].tolist() == [2]


WHOLE = FILES[IMAGES]
DAMAGES = {
    "missing": ({IMAGES: None}, IMAGES, "expected this file or one named .*-idx3-ubyte.gz, .*found none"),
    "empty": ({IMAGES: b""}, IMAGES, "expected a header of 16 bytes, found a file of 0"),
    "short header": ({LABELS: b"\0\0\x08\x01\0"}, LABELS, "expected a header of 8 bytes, found a file of 5"),
    "magic": ({IMAGES: idx((6, 28, 28), magic=0x0D03)}, IMAGES, "expected .* 0x00000803, found 0x00000d03"),
    "labels as images": ({IMAGES: idx((99,))}, IMAGES, "expected .* 0x00000803, found 0x00000801"),
    "truncated": ({IMAGES: WHOLE[:-1]}, IMAGES, "expected 4704 bytes .*, found 4703: it is truncated"),
    "trailing": ({IMAGES: WHOLE + b"x"}, IMAGES, "expected 4704 bytes .*, found 4705: .* foreign bytes"),
    "no items": ({LABELS: idx((0,))}, LABELS, r"expected at least one item, found the sizes \[0\]"),
    "count": ({LABELS: idx((2,))}, LABELS, "expected 3 labels, as many as t10k-images.* has images, found 2"),
    "shape": ({IMAGES: idx((6, 28, 14))}, IMAGES, r"expected images of \[28, 28\], found \[28, 14\]"),
    "label": ({LABELS: idx((3,), bytes([1, 2, 10]))}, LABELS, "expected labels from 0 to 9, found 10"),
    "not gzip": ({IMAGES: None, IMAGES + ".gz": WHOLE}, IMAGES + ".gz", "expected a whole gzip file"),
    "cut gzip": (
        {IMAGES: None, IMAGES + ".gz": gzip.compress(WHOLE)[:-9]},
        IMAGES + ".gz",
        "whole gzip file",
    ),
}


@pytest.mark.parametrize(("changes", "name", "message"), DAMAGES.values(), ids=DAMAGES)
def test_mnist_names_the_damaged_file(tmp_path, changes, name, message):
    write(tmp_path, changes)
    with pytest.raises(DataError, match=f"{name}: .*{message}"):
        load("mnist", tmp_path)


def test_mnist_reports_a_corrupt_gzip_body(tmp_path):
    packed = bytearray(gzip.compress(WHOLE))
    packed[len(packed) // 2] ^= 0xFF
    write(tmp_path, {IMAGES: None, IMAGES + ".gz": bytes(packed)})
    with pytest.raises(DataError, match="expected a whole gzip file, found a damaged one"):
        load("mnist", tmp_path)


def test_mnist_reports_an_unreadable_file(tmp_path):
    write(tmp_path, {IMAGES: None})
    (tmp_path / IMAGES).mkdir()
    with pytest.raises(DataError, match="expected a readable file, found: Is a directory"):
        load("mnist", tmp_path)


def test_mnist_says_what_data_it_needs(tmp_path):
    with pytest.raises(DataError, match=r"--data.* a folder with train-images-idx3-ubyte, .*\.gz"):
        load("mnist")
    with pytest.raises(DataError, match=r"expected a folder with .* found nothing"):
        load("mnist", tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"expected a folder with .* found a file"):
        load("mnist", tmp_path / "file")


@pytest.mark.skipif("STENOGRAD_MNIST" not in os.environ, reason="STENOGRAD_MNIST names no folder with MNIST")
def test_real_mnist():
    task = load("mnist", os.environ["STENOGRAD_MNIST"])
    assert (task.train_size, task.eval_size) == (60_000, 10_000)
    inputs, targets = task.train_batch(torch.arange(60_000))
    assert float(inputs.mean()) == pytest.approx(0.1307, abs=1e-4)
    assert targets[:5].tolist() == [5, 0, 4, 1, 9]


# --- digits ----------------------------------------------------------------------------------------------


def test_digits_split_is_stratified_and_complete():
    task = load("digits")
    train, train_labels = task.train_batch(torch.arange(task.train_size))
    held_out, labels = task.eval_batch(torch.arange(task.eval_size))
    assert (len(train), len(held_out)) == (1437, 360)
    assert (float(train.min()), float(train.max())) == (0.0, 1.0)
    shares = labels.bincount() / (labels.bincount() + train_labels.bincount())
    assert shares.tolist() == pytest.approx(
        [0.2] * 10, abs=1 / 174
    )  # to within one of the 174 eights or more
    both = torch.cat([train, held_out]).flatten(1)
    assert len(both.unique(dim=0)) == len(both)  # all digits differ, so none is in both parts


def test_digits_are_those_of_scikit_learn_wherever_it_keeps_its_file(monkeypatch):
    """Its loader is used where the file is not at its usual place."""
    from sklearn.datasets import load_digits

    wanted = load_digits()
    both = [digits._load()]
    monkeypatch.setattr(digits.Path, "exists", lambda path: False)
    for pixels, labels in [*both, digits._load()]:
        assert (pixels.dtype, labels.dtype) == (torch.uint8, torch.uint8)
        assert (pixels.numpy() == wanted.images).all()
        assert (labels.numpy() == wanted.target).all()


def test_digits_learns():
    """Three epochs of the recipe are enough for nine of ten."""
    task = load("digits")
    model = task.model(seed=0)
    optimizer = task.recipe.make_optimizer(model)
    steps = steps_per_epoch(task.train_size, 1, task.recipe.batch_size, task.recipe.steps_per_epoch)
    mine = shard(task.train_size, 0, 1, shuffle=True, seed=0)
    for epoch in range(3):
        for batch in batches(mine, task.recipe.batch_size, epoch=epoch, seed=0, shuffle=True, steps=steps):
            optimizer.zero_grad()
            task.loss(model, *task.train_batch(batch))[0].backward()
            optimizer.step()
    _, correct, counted = task.loss(model, *task.eval_batch(torch.arange(task.eval_size)))
    assert counted == 360
    assert correct / counted > 0.9


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StenogradError, match=r"pip install stenograd\[examples\]"):
        load("digits")


# --- text ------------------------------------------------------------------------------------------------


def text_task(folder, length):
    path = folder / "text.txt"
    path.write_text("".join(chr(ord("a") + i * i % 23) for i in range(length)), encoding="utf-8")
    return load("text", path)


@pytest.mark.parametrize("evaluation", [13, 64, 65, 66, 128, 129, 130, 193, 200])
def test_evaluation_windows_predict_every_character_once(tmp_path, evaluation):
    """Of the last tenth, all characters but the first are targets once, each after the one before it."""
    length = 10 * evaluation
    task = text_task(tmp_path, length)
    inputs, targets = task.eval_batch(torch.arange(task.eval_size))
    counted = targets != IGNORE
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    assert "".join(task.vocabulary[i] for i in targets[counted]) == text[-evaluation + 1 :]
    assert "".join(task.vocabulary[i] for i in inputs[counted]) == text[-evaluation:-1]
    _, _, number = task.loss(task.model(0), inputs, targets)
    assert number == evaluation - 1


def test_training_windows_cover_the_first_nine_tenths(tmp_path):
    task = text_task(tmp_path, 1000)
    assert task.train_size == 900 - 64
    inputs, targets = task.train_batch(torch.tensor([0, task.train_size - 1]))
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    assert "".join(task.vocabulary[i] for i in inputs[0]) == text[:64]
    assert "".join(task.vocabulary[i] for i in targets[1]) == text[900 - 64 : 900]


def test_shortest_text(tmp_path):
    task = text_task(tmp_path, 130)
    assert (task.train_size, task.eval_size) == (117 - 64, 1)
    assert task.train_batch(torch.tensor([52]))[1].shape == (1, 64)


def test_text_keeps_characters_beyond_ascii_and_line_ends(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("ä€😀\r\n".encode() * 40)
    assert load("text", path).vocabulary == "\n\rä€😀"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a text of at least 130 characters, found 0"),
        (b"x" * 129, "expected a text of at least 130 characters, found 129"),
        (b"x" * 200 + b"\xff", "expected UTF-8 text, found byte 0xff at offset 200"),
    ],
)
def test_text_rejects_content(tmp_path, content, message):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"text.txt: {message}"):
        load("text", path)


def test_text_rejects_paths(tmp_path):
    with pytest.raises(DataError, match="found: Is a directory"):
        load("text", tmp_path)
    with pytest.raises(DataError, match="found: No such file"):
        load("text", tmp_path / "absent.txt")


def test_default_text_is_large_and_repeatable():
    first, second = load("text"), load("text")
    assert first.train_size > 100_000
    indices = torch.tensor([0, first.train_size - 1])
    assert torch.equal(first.train_batch(indices)[0], second.train_batch(indices)[0])


# --- models and loss -------------------------------------------------------------------------------------


def test_parameter_counts():
    """GPT of 65 characters: (65 + 64 + 4 x 12 x 128) x 128 in matrices and 9 norms of 128."""
    assert parameter_count(mnist_cnn()) == 431_080
    assert parameter_count(digits_cnn()) == 71_754
    assert parameter_count(CharGPT(65)) == (65 + 64 + 4 * 12 * 128) * 128 + 9 * 128


def test_gpt_sees_no_later_character():
    model = CharGPT(7).eval()
    inputs = torch.arange(20).remainder(7).unsqueeze(0)
    changed = inputs.clone()
    changed[0, 12:] = 0
    assert torch.equal(model(inputs)[0, :12], model(changed)[0, :12])
    assert not torch.equal(model(inputs)[0, 12:], model(changed)[0, 12:])


def test_gpt_starts_as_gpt2():
    """Residual projections start at 0.02 / sqrt(2 x 4 layers) = 0.00707, all other matrices at 0.02."""
    torch.manual_seed(0)
    for name, parameter in CharGPT(65).named_parameters():
        if parameter.ndim >= 2:
            expected = 0.00707 if name.endswith(("attention.out.weight", "mlp_out.weight")) else 0.02
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.05), name


@pytest.fixture(params=["digits", "glyphs", "mnist", "text"])
def task(request, tmp_path):
    if request.param == "mnist":
        write(tmp_path)
        return load("mnist", tmp_path)
    return text_task(tmp_path, 500) if request.param == "text" else load(request.param)


def test_every_task_keeps_the_contract(task):
    assert isinstance(task, Task)
    assert task.name in names()
    assert task.unit == "accuracy"
    inputs, targets = task.train_batch(torch.tensor([1, 0, 1]))
    assert torch.equal(inputs[0], inputs[2])
    assert targets.dtype == torch.int64
    loss, correct, counted = task.loss(task.model(0), inputs, targets)
    loss.backward()
    assert loss.ndim == 0
    assert counted == targets.numel()
    assert 0 <= correct <= counted


def test_models_repeat_by_seed_and_spare_the_global_state(task):
    before = torch.get_rng_state()
    first, again, other = task.model(3), task.model(3), task.model(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(first.parameters(), other.parameters(), strict=True))


def test_model_is_the_same_in_another_random_state(task):
    first = task.model(3)
    torch.rand(5)
    assert torch.equal(next(first.parameters()), next(task.model(3).parameters()))


def test_loss_leaves_ignored_targets_out():
    """Scores favour class 1 everywhere: of the targets 1, 0, ignored, one of two counted is hit."""
    scores = torch.tensor([[[0.0, 2.0], [0.0, 2.0], [0.0, 2.0]]])
    mean, correct, counted = load("digits").loss(nn.Identity(), scores, torch.tensor([[1, 0, IGNORE]]))
    hit, missed = torch.log1p(torch.tensor([-2.0, 2.0]).exp())
    assert float(mean) == pytest.approx(float(hit + missed) / 2)
    assert (correct, counted) == (1, 2)


# --- load ------------------------------------------------------------------------------------------------


def test_unknown_task_lists_the_names():
    with pytest.raises(ConfigError, match="unknown task 'cifar': use one of digits, glyphs, mnist, text"):
        load("cifar")


def test_digits_takes_no_data(tmp_path):
    with pytest.raises(ConfigError, match="data must be None for the digits task"):
        load("digits", tmp_path)
