"""The guide's programs, as a user starts them: on multiprocessing, by mpiexec, and in every mode."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from cli_process import execute, script_on_a_rank

EXAMPLES = Path(__file__).parents[2] / "examples" / "singa_mnist"
EPOCH = re.compile(
    r"Starting Epoch (\d+):\n"
    r"Training loss = (\d+\.\d{6}), training accuracy = (0\.\d{6})\n"
    r"Evaluation accuracy = (0\.\d{6}), Elapsed Time = \d+\.\d{6}s\n"
    r"Sent = (\d+\.\d{6}) MB per step\n"
)


def _epochs(out):
    assert EPOCH.sub("", out) == ""
    return [tuple(map(float, fields)) for fields in EPOCH.findall(out)]


def _two_ranks(pool, *options):
    first, second = pool.run(2, script_on_a_rank, EXAMPLES / "mnist_dist.py", *options)
    assert second == ""
    return _epochs(first)


def test_multiprocess_follows_the_guide(pool):
    """python mnist_multiprocess.py 2: 718 digits a rank, 22 steps an epoch, all of 71,754 float32 sent.

    The same ranks under a launcher give the same numbers.
    """
    done = execute([sys.executable, str(EXAMPLES / "mnist_multiprocess.py"), "2", "-m", "4"])
    assert (done.returncode, done.stderr) == (0, "")
    epochs = _epochs(done.stdout)
    assert [e[0] for e in epochs] == [0, 1, 2, 3]
    assert epochs[-1][1] < epochs[0][1] / 3
    assert epochs[-1][3] > 0.8
    assert epochs[-1][4] == pytest.approx(4 * 71_754e-6, rel=1e-3)
    assert epochs == _two_ranks(pool, "-m", "4")


@pytest.mark.skipif(shutil.which("mpiexec", path=Path(sys.executable).parent) is None, reason="no mpiexec")
def test_mpiexec_gives_the_same_numbers(pool):
    """Same seeds, same ranks: the launcher changes nothing but the time."""
    mpiexec = shutil.which("mpiexec", path=Path(sys.executable).parent)
    options = ["-m", "1", "-d", "sparseTopK", "-s", "0.05"]
    command = [mpiexec, "--hostfile", str(EXAMPLES / "host_file"), sys.executable]
    done = execute([*command, str(EXAMPLES / "mnist_dist.py"), *options])
    assert done.returncode == 0, done.stderr
    assert _epochs(done.stdout) == _two_ranks(pool, *options)


@pytest.mark.parametrize("option", ["half", "partialUpdate", "sparseTopK", "sparseThreshold"])
def test_every_mode_trains_alone(option, unlaunched, capsys):
    """In this process, a world of one, where nothing is sent."""
    unlaunched.setattr(sys, "argv", ["mnist_dist.py", "-d", option, "-s", "0.05", "-m", "2", "-b", "64"])
    unlaunched.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    runpy.run_path(str(EXAMPLES / "mnist_dist.py"), run_name="__main__")
    torch.set_num_threads(threads)
    epochs = [tuple(map(float, fields)) for fields in EPOCH.findall(capsys.readouterr().out)]
    assert epochs[1][1] < epochs[0][1]
    for name in ("train", "model"):
        sys.modules.pop(name, None)


def test_benchmark_measures_every_mode():
    """Each line is a mode that trains; half sends half of plain."""
    options = ("-w", "2", "-b", "8", "--steps", "2", "--warmup", "2")
    done = execute([sys.executable, str(EXAMPLES / "benchmark.py"), *options])
    assert done.returncode == 0, done.stderr
    sent = {line.split()[0]: float(line.split()[-2]) for line in done.stdout.splitlines()}
    assert list(sent) == ["plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold"]
    assert sent["plain"] == pytest.approx(4 * 431_080e-6, rel=1e-3)
    assert sent["half"] == pytest.approx(sent["plain"] / 2, rel=1e-3)
    assert sent["sparseTopK"] < 41 / 8 * 4312e-6  # at most 41 bits for each of 1 % of the elements


def test_partition_is_contiguous_and_drops_the_remainder(monkeypatch):
    """Ten items on three ranks: [0:3], [3:6], [6:9]."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    data_partition = runpy.run_path(str(EXAMPLES / "model.py"))["data_partition"]
    x, y = torch.arange(10), torch.arange(10) * 2
    parts = [data_partition(x, y, rank, 3) for rank in range(3)]
    assert [part[0].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all(torch.equal(b, 2 * a) for a, b in parts)
