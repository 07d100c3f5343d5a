"""The examples of DASO, on the ranks of a launch and alone."""

import re
from pathlib import Path

from cli_process import script_on_a_rank

EXAMPLES = Path(__file__).parents[2] / "examples" / "heat"


def test_daso_on_two_nodes_of_two(pool):
    """Skips follow the phases, bytes between the nodes grow slowest while cycling, and it learns."""
    out, *others = pool.run(4, script_on_a_rank, EXAMPLES / "daso_mnist.py", "--epochs", "7")
    assert others == ["", "", ""]
    lines = re.findall(r"skips \((\d+), .*?accuracy (\d+\.\d+) %, .*?, (\d+\.\d+) MB to other", out)
    assert [int(skip) for skip, *_ in lines] == [0, 0, 4, 4, 4, 0, 0]
    sent = [float(mb) for *_, mb in lines]
    assert sent[3] - sent[2] < 0.3 * (sent[1] - sent[0])
    assert float(lines[-1][1]) > 85


def test_the_plateau_script_runs_alone(pool):
    (out,) = pool.run(1, script_on_a_rank, EXAMPLES / "plateau_digits.py")
    assert float(re.search(r"accuracy (\d+\.\d+) %", out)[1]) > 93
    assert "0.00 MB to other nodes" in out
