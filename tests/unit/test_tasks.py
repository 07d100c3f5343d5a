"""The tasks: files, samples, models."""

import gzip
import os
import struct

import pytest
import torch
from torch import nn

from stenograd.errors import ConfigError, DataError, StenogradError
from stenograd.tasks import Task, batches, images, load, names, shard, steps_per_epoch
from stenograd.tasks.base import IGNORE
from stenograd.tasks.models import CharGPT, digits_cnn, mnist_cnn


def parameter_count(model):
    return sum(p.numel() for p in model.parameters())


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
    both = [images._load_digits()]
    monkeypatch.setattr(images.Path, "exists", lambda path: False)
    for pixels, labels in [*both, images._load_digits()]:
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
