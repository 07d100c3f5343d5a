"""A rank dies in any phase of a round, a hundred times, and as often in two phases that are hard to hit."""

import killed_rounds
import pytest

from stenograd.testing.pool import RankPool


@pytest.fixture(scope="module")
def five():
    with RankPool(killed_rounds.MOST_RANKS) as pool:
        yield pool


@pytest.mark.soak
@pytest.mark.parametrize("phase", [None, "torn", "confirming"])
@pytest.mark.parametrize("neighbours", [False, True], ids=["all", "neighbours"])
@pytest.mark.parametrize("number", range(100))
def test_survivors_hold_the_round_or_name_the_lost_rank(five, number, neighbours, phase):
    print(killed_rounds.drill(five, killed_rounds.case(number, phase, neighbours=neighbours)))
