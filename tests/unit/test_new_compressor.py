"""A compressor is one file: written into a copy of the package, it is found by every list that is walked.

The file holds a stochastic sign (Jin et al., "Stochastic-Sign SGD for Federated Learning with Theoretical
Guarantees", 2020): each element of a tensor becomes s or -s, where s is the tensor's largest magnitude, and s
with the chance (1 + x / s) / 2. So its expectation is x, and it travels in one bit.
"""

import json
import os
import shutil
from pathlib import Path

import forked
import pytest

import stenograd

ROOT = Path(__file__).resolve().parents[2]
COIN = '''
"""A stochastic sign: two levels per element, drawn at random."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stenograd.compression.codec import Codec
from stenograd.compression.contract import Payload, Site
from stenograd.kernels.bits import pack_bits, unpack_bits


@dataclass(frozen=True, kw_only=True)
class Coin(Codec):
    """Send s with the chance (1 + x / s) / 2, else -s; s is the largest magnitude of each tensor."""

    names: ClassVar = {"coin": {}}
    summary: ClassVar[str] = "plus or minus the largest, 1 bit per element and a scale per tensor"

    seed: int = 0

    @classmethod
    def examples(cls) -> Iterator["Coin"]:
        """Yield another seed than usual."""
        yield cls(seed=7)

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Draw a sign for each element and pack it."""
        parts = x.split(site.numels)
        scales = torch.stack([p.abs().amax() if len(p) else p.new_zeros(()) for p in parts])
        lean = x.double() / self._spread(scales, site)
        draws = torch.rand(len(x), generator=site.generator(self.seed, shared=False)).to(x.device)
        return pack_bits((2 * draws < 1 + lean).to(torch.uint8), 1), scales

    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Multiply signs by their scales."""
        codes, scales = payload
        signs = unpack_bits(codes, 1, len(like)).to(like.dtype) * 2 - 1
        return signs * self._spread(scales, site)

    def _spread(self, scales: Tensor, site: Site) -> Tensor:
        return scales.repeat_interleave(torch.tensor(site.numels, device=scales.device))
'''
# Prints, by module, whether each list of methods that tests or a benchmark walk holds the new one.
LISTS = """
import importlib, json, sys
from pathlib import Path
found = {}
for path in sorted(Path(sys.argv[1]).glob("*.py")):
    sys.path[:0] = [str(path.parent), str(path.parent.parent)]
    text = path.read_text()
    for name in ("ALL_METHODS", "METHODS", "RIVALS", "CASES"):
        if f"\\n{name} = " in text or f"\\n{name}: " in text or "import" in text and f" {name}" in text:
            value = getattr(importlib.import_module(path.stem), name, None)
            if value is not None:
                found[f"{path.stem}.{name}"] = "coin" in json.dumps(list(value), default=repr)
print(json.dumps(found))
"""
# Comparisons about something else than methods, and programs of many kinds, each with a few methods in turn
# (the same programs for longer walk all of them).
CHOSEN = {"scaling.METHODS", "versions.METHODS"}
CHOSEN |= {"test_programs.CASES", "test_programs.METHODS", "plan_validation.METHODS", "test_stopping.CASES"}


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """Runs Python with a copy of the package that holds Coin."""
    folder = tmp_path_factory.mktemp("extended")
    package = Path(stenograd.__file__).parent
    shutil.copytree(package, folder / "stenograd", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "stenograd" / "compressors" / "coin.py").write_text(COIN)
    # Kernels written in PyTorch, since a copy has none on disk.
    env = {**os.environ, "PYTHONPATH": str(folder), "STENOGRAD_KERNELS": "reference", "COLUMNS": "200"}

    def run(*arguments):
        done = forked.python(arguments, folder, env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_it_is_a_method_and_passes_the_conformance_suite(extended):
    """Plain and under error feedback."""
    told = extended(
        "-c",
        """
import json, stenograd, torch
from stenograd.catalog.registry import entries
from stenograd.simulate import exchange
from stenograd.testing.conformance import cases, check
mine = {name: c for name, c in cases() if "Coin" in name}
for c in mine.values():
    check(c)
sent = []
exchange(stenograd.method("coin").compressor, [torch.randn(10, 10)] * 2, spy=sent.append)
nbytes = sum(request.nbytes for request in sent)
print(json.dumps([stenograd.__file__, "coin" in stenograd.methods(), list(mine), nbytes]))
""",
    )
    file, named, mine, nbytes = json.loads(told)
    assert not file.startswith(str(ROOT))
    assert named
    assert mine == ["Coin(seed=7)", "ErrorFeedback(inner=Coin(seed=7), decay=1.0)"]
    assert nbytes == -(-100 // 8) + 4


MAIN = "import sys; from stenograd.cli import main; sys.exit(main())"


def test_the_command_lists_and_compares_it(extended):
    told = json.loads(extended("-c", MAIN, "methods", "--json"))
    assert "1 bit per element" in told["coin"]["what_it_sends"]
    told = extended("-c", "from stenograd.cli.compare import default_methods as d; print(*d())")
    assert "coin" in told.split()


def test_every_suite_and_benchmark_walks_it(extended):
    """Their modules are imported and asked for their lists; only comparisons of chosen methods lack it."""
    told = {}
    for folder in ("benchmarks", "tests/multirank"):
        told |= json.loads(extended("-c", LISTS, ROOT / folder))
    assert {name for name, holds in told.items() if not holds} == CHOSEN
    assert len(told) >= 15


def test_other_packages_add_compressors_and_schedules_by_entry_points(tmp_path):
    """One that cannot be imported is warned of, and takes nobody with it."""
    (tmp_path / "coins.py").write_text(COIN)
    (tmp_path / "seldom.py").write_text(
        "from stenograd.schedules import Local\nclass Seldom(Local):\n    names = {'seldom': {'every': 99}}\n"
    )
    told = tmp_path / "coins-1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: coins\nVersion: 1\n")
    (told / "entry_points.txt").write_text(
        "[stenograd.compressors]\ncoin = coins:Coin\ngone = coins_that_are_gone:Coin\n"
        "[stenograd.schedules]\nseldom = seldom:Seldom\n"
    )
    code = """
import warnings
import stenograd
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    print(stenograd.method("seldom/coin:seed=7"), "coin" in stenograd.methods(), len(told), told[0].message)
"""
    done = forked.python(["-c", code], ROOT, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stdout.startswith("seldom/coin:seed=7 True 1 coins_that_are_gone:Coin"), (
        done.stdout + done.stderr
    )
