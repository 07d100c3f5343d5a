"""Re-sharding keeps the sum of residuals over the ranks, whatever the method, the sizes and the worlds."""

import contextlib
import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.catalog.method import method
from stenograd.checkpoint.files import Found, Manifest, write_rank
from stenograd.checkpoint.reshard import alike, reshard, share_of
from stenograd.compression.contract import Site
from stenograd.errors import CheckpointError, ConfigError, MethodError
from stenograd.exchange.buckets import Bucket, split_state
from stenograd.simulate import exchange
from stenograd.testing.methods import by_name, modes


def _with_residuals():
    """Every method and mode that takes error feedback, with it."""
    for text in [*by_name(), *modes()]:
        with contextlib.suppress(MethodError):
            yield method(f"{text}{',' if ':' in text else ':'}feedback=true").text


METHODS = list(_with_residuals())
SHAPES = [(), (0,), (1,), (7,), (40,), (6, 9), (3, 0, 2), (33, 17), (2, 3, 4)]


def trained(text, shapes, world_size, steps):
    """The ranks' states after some exchanges of random gradients, in `GradientSync.state_dict`'s form."""
    how, states = method(text), None
    shapes = tuple(map(torch.Size, shapes))
    bucket = Bucket(tuple(f"p{i}" for i in range(len(shapes))), shapes, torch.float32, torch.device("cpu"))
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        xs = [torch.randn(sum(bucket.numels), generator=generator) for _ in range(world_size)]
        done = exchange(how.compressor, xs, states, shapes=shapes, step=step)
        states = [one.state for one in done]
    if states is None:
        sites = [Site(shapes=shapes, rank=rank, world_size=world_size) for rank in range(world_size)]
        states = [how.compressor.init(torch.zeros(sum(bucket.numels)), site) for site in sites]
    about = {"format": 1, "method": text, "world_size": world_size, "step": steps, "skipped": 0}
    return [
        {**about, "rank": rank, "parameters": split_state(state, bucket)} for rank, state in enumerate(states)
    ]


def sums(states):
    """Sum over ranks of every residual, in float64."""
    return {
        name: sum(state["parameters"][name]["residual"].double() for state in states)
        for name, tensors in states[0]["parameters"].items()
        if "residual" in tensors
    }


@settings(max_examples=40)
@given(
    text=st.sampled_from(METHODS),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    worlds=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    steps=st.integers(0, 2),
)
def test_sums_are_kept(text, shapes, worlds, steps):
    """4 -> ... -> other worlds: each hop rounds once, 6e-8; from four ranks on, codes are averaged twice."""
    states = trained(text, shapes, 4, steps)
    before = sums(states)
    assert before
    queries = {name: tensors.get("q") for name, tensors in states[0]["parameters"].items()}
    for world_size in worlds:
        states = reshard(states, world_size)
        assert [(s["rank"], s["world_size"]) for s in states] == [(r, world_size) for r in range(world_size)]
    for name, total in sums(states).items():
        assert ((total - before[name]).abs() <= 1e-6 * before[name].abs() + 1e-40).all()
    for state in states:
        for name, tensors in state["parameters"].items():
            assert queries[name] is None or torch.equal(tensors["q"], queries[name])


@pytest.mark.parametrize("text", METHODS)
def test_four_two_three_four(text):
    states = trained(text, [(64, 33), (0,), (129,)], 4, 3)
    before = sums(states)
    assert before["p0"].abs().sum() > 0
    for world_size in (2, 3, 4):
        states = reshard(states, world_size)
    for name, total in sums(states).items():
        assert ((total - before[name]).abs() <= 1e-6 * before[name].abs()).all()


def test_the_pending_update_follows_the_sum():
    """Residuals 1, 2, 3, 6 on four ranks weigh 12 / 4; on two they are 6 each and weigh 12 / 2."""
    about = {"format": 1, "method": "topk:ratio=1.0", "world_size": 4, "step": 1, "skipped": 0}
    old = [
        {**about, "rank": rank, "parameters": {"w": {"residual": torch.tensor([owed])}}}
        for rank, owed in enumerate([1.0, 2.0, 3.0, 6.0])
    ]
    new = reshard(old, 2)
    states = [{"residual": state["parameters"]["w"]["residual"]} for state in new]
    done = exchange(method("topk:ratio=1.0").compressor, [torch.zeros(1)] * 2, states)
    assert done[0].average.item() == 6.0


def _missing(states):
    del states[1]


def _twice(states):
    states[1] = states[0]


def _later(states):
    states[1]["step"] = 9


def _foreign(states):
    states[1]["parameters"]["other"] = states[1]["parameters"].pop("p0")


def _own_query(states):
    states[1]["parameters"]["p0"]["q"] = states[1]["parameters"]["p0"]["q"] + 1


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_missing, "the state of every rank in rank order"),
        (_twice, "the state of every rank in rank order"),
        (_later, "step is 2 on rank 0 and 9 on rank 1"),
        (_foreign, "ranks 0 and 1 saved different parameters"),
        (_own_query, "q of p0 differs from rank to rank and there is no rule for it: load it on 3 ranks"),
        (list.clear, "the state of every rank in rank order"),
    ],
)
def test_states_that_do_not_belong_together(harm, says):
    states = copy.deepcopy(trained("powersgd:rank=2", [(8, 9)], 3, 2))
    harm(states)
    with pytest.raises(CheckpointError, match=says):
        reshard(states, 2)


@pytest.mark.parametrize("before", [1, 2])
def test_random_states_of_more_ranks(before, tmp_path):
    """PyTorch's own are derived from rank 0's and the rank, on CUDA too; a caller's one if it was private."""
    own = [torch.Generator().manual_seed(rank).get_state() for rank in range(before)]
    cuda = [torch.arange(16, dtype=torch.uint8), torch.arange(16, dtype=torch.uint8) + 100]  # seed and offset
    contents = [
        {"random": {"cpu": state, "cuda": cuda}, "generators": {"own": state, "common": own[0]}}
        for state in own
    ]
    files = tuple(write_rank(tmp_path, 1, "ab", rank, content) for rank, content in enumerate(contents))
    found = Found(Manifest(step=1, set_id="ab", world_size=before, files=files), contents[0], tmp_path, ())
    new = [share_of(found, rank, 3) for rank in range(3)]
    random = [(c["random"]["cpu"], *c["random"]["cuda"]) for c in new]
    assert alike(random[0], (own[0], *cuda))
    for mine, other in itertools.combinations(random, 2):
        assert not any(map(torch.equal, mine, other))
    assert [t.shape for t in random[2]] == [t.shape for t in random[0]]
    assert all(torch.equal(c["generators"]["common"], own[0]) for c in new)
    kinds = {bytes(c["generators"]["own"].numpy()) for c in new}
    assert len(kinds) == (3 if before > 1 else 1)


def test_no_ranks():
    with pytest.raises(ConfigError, match="world_size must be at least 1, got 0"):
        reshard(trained("topk", [(4,)], 2, 1), 0)
