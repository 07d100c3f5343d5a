"""The examples of DASO, as a user starts them."""

import re
import sys
from pathlib import Path

from cli_process import execute

EXAMPLES = Path(__file__).parents[2] / "examples" / "heat"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def test_daso_on_two_nodes_of_two():
    """Skips follow the phases, bytes between the nodes grow slowest while cycling, and it learns."""
    done = execute([*TORCHRUN, "4", str(EXAMPLES / "daso_mnist.py"), "--epochs", "7"])
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"skips \((\d+), .*?accuracy (\d+\.\d+) %, .*?, (\d+\.\d+) MB to other", done.stdout)
    assert [int(skip) for skip, *_ in lines] == [0, 0, 4, 4, 4, 0, 0]
    sent = [float(mb) for *_, mb in lines]
    assert sent[3] - sent[2] < 0.3 * (sent[1] - sent[0])
    assert float(lines[-1][1]) > 85


def test_the_plateau_script_runs_alone():
    done = execute([sys.executable, str(EXAMPLES / "plateau_digits.py")])
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"accuracy (\d+\.\d+) %", done.stdout)[1]) > 93
    assert "0.00 MB to other nodes" in done.stdout
