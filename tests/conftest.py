"""Shared by all tests: one pool of rank processes for the whole run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from launched import LAUNCHER_VARIABLES

from stenograd.testing.pool import RankPool

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for test_triton.py: read when any test first imports Triton


@pytest.fixture(scope="session")
def pool():
    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture
def unlaunched(monkeypatch):
    """This process, as if no launcher had started it; return what else may be changed for a while."""
    for key in list(os.environ):
        if key.startswith(LAUNCHER_VARIABLES):
            monkeypatch.delenv(key)
    return monkeypatch
