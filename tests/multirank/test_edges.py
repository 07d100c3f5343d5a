"""What is near the largest number of a type, or beyond, costs one step or round and is never silent."""

from dataclasses import fields

import pytest
import torch
from edges import TYPES, rounds, steps

import stenograd
from stenograd.catalog.registry import schedules
from stenograd.simulate import ranks
from stenograd.testing.methods import coded, modes, scheduled, wrapped

METHODS = [*stenograd.methods(), *modes(), *wrapped()]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # each tells once what was found


def check_steps(how, dtype, told):
    """A step is finite and equal on all ranks, or changes nothing on any; ordinary ones are always finite."""
    lossless = stenograd.method(how).lossless and not stenograd.method(how).clips
    owes = False
    for same in zip(*(found for found, _ in told), strict=True):
        about = (same[0]["case"], same)
        assert len({(done["finite"], done["skipped"], done["bits"]) for done in same}) == 1, about
        done = same[0]
        assert done["fit"], about
        assert done["skipped"] == (not done["finite"]), about
        assert done["finite"] or done["bits"] == told[0][1], about
        assert not (done["finite"] and done["bad"]), about
        owes |= not done["bad"] and done["case"] != "ordinary"
        if dtype is torch.float16 or not owes:  # residuals are float32: elsewhere two edges may overflow them
            assert done["finite"] or done["case"] != "ordinary", about
        if lossless:
            assert done["finite"] or done["bad"], about
            assert max(done["off"] for done in same) < 8, about


PAIRS = [(how, TYPES[0]) for how in METHODS] + [(how, TYPES[1 + i % 3]) for i, how in enumerate(METHODS)]


@pytest.mark.parametrize(("how", "dtype"), PAIRS, ids=str)
def test_a_step_is_finite_and_equal_everywhere_or_changes_nothing_anywhere(how, dtype):
    check_steps(how, dtype, ranks(3, steps, "distribute", how, dtype))


def on_ranks(rank, how, dtype):
    return steps(None, "ddp", how, dtype)


@pytest.mark.parametrize(("how", "dtype"), [(how, TYPES[i % 4]) for i, how in enumerate(METHODS)], ids=str)
def test_the_hook_of_ddp_does_the_same_on_real_ranks(pool, how, dtype):
    check_steps(how, dtype, pool.run(2, on_ranks, how, dtype))


def spoilt(text, rank, bad):
    """Tell whether a rank skips the step of a case: its own gradients are bad, or those of its node."""
    size = getattr(stenograd.method(text).schedule, "node_size", 0) or 1
    return any(rank // size == other // size for other in bad)


def check_rounds(text, told):
    """Weights are always finite, a bad gradient costs its rank's step alone, and ranks have one consensus."""
    for same in zip(*told, strict=True):
        about = (same[0]["case"], same)
        assert all(done["fit"] for done in same), about
        assert len({(done["ended"], done["rounds"], done.get("common")) for done in same}) == 1, about
        if not same[0]["ended"]:
            assert [done["skipped"] for done in same] == [
                spoilt(text, r, done["bad"]) for r, done in enumerate(same)
            ], about
            assert same[0]["rounds"] > 0 or not stenograd.method(text).lossless, about
        if not same[0]["ended"] and same[0]["rounds"] < told[0][0]["rounds"]:
            assert not stenograd.method(text).lossless, about
        if stenograd.method(text).lossless or same[0]["case"] == "ordinary" or same[0]["bad"]:
            assert not same[0]["ended"], about
            assert same[0]["rounds"] >= told[0][0]["rounds"], about  # the first ones average gradients


TEXTS = list(dict.fromkeys([*scheduled(), *coded()]))


@pytest.mark.parametrize(("text", "dtype"), [(t, TYPES[i % 4]) for i, t in enumerate(TEXTS)], ids=str)
def test_rounds_and_gossip_keep_every_weight_finite(text, dtype):
    check_rounds(text, ranks(4 if "node_size" in text else 3, rounds, text, dtype))


def test_every_key_of_every_schedule_is_in_one_of_its_examples():
    """But for rounds by time, in which two runs are never the same: see test_timed_rounds.py."""
    for cls, _ in schedules().values():
        for key in (key for key in fields(cls) if key.name not in ("seconds", "quorum", "grace")):
            assert any(getattr(example, key.name) != key.default for example in cls.examples()), (
                cls,
                key.name,
            )
