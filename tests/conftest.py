"""Shared by all tests: one pool of rank processes for the whole run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from stenograd.testing.pool import RankPool


@pytest.fixture(scope="session")
def pool():
    with RankPool(4) as ranks:
        yield ranks
