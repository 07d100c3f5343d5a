"""The examples of other frameworks, each run on two fresh gloo ranks by what torchrun sets."""

import importlib.util

import pytest
from processes import HERE, run_ranks

pytestmark = pytest.mark.frameworks
MODEL = 64 * 128 + 128 + 128 * 10 + 10  # elements of the digits' model
LLAMA = {"q_proj": 32 * 4 + 4 * 32, "v_proj": 32 * 4 + 4 * 32}  # elements of one layer's adapters of rank 4


EXAMPLES = HERE.parents[1] / "examples"
LEARNING = [("ignite_loop", ["ignite"]), ("skorch_net", ["skorch"]), ("keras_fit", ["keras"])]


def need(names):
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def run(script, *needed):
    """Run an example, and check what holds for all: ranks end with equal parameters, and took equal steps."""
    need(needed)
    first, second = run_ranks(EXAMPLES / f"{script}.py", 2)
    assert first["norm"] == second["norm"]
    assert (first["steps"], first["sent"]) == (second["steps"], second["sent"])
    return first, second


@pytest.mark.parametrize(("script", "needed"), LEARNING)
def test_no_thread_group_or_hook_is_left_after_an_example(script, needed):
    need(needed)
    assert run_ranks("example_ended.py", 2, args=[EXAMPLES / f"{script}.py"]) == [[], []]


@pytest.mark.parametrize(("script", "needed"), LEARNING)
def test_digits_are_learnt_at_a_fraction_of_the_bytes(script, needed):
    """Top-k takes 2 to 4 bytes for each of the 5 % of elements that it sends, and a few for flags."""
    ranks = run(script, *needed)
    steps = 3 * 29  # epochs of 898 or 899 samples in batches of 32
    for rank in ranks:
        assert rank["accuracy"] > 0.8
        assert rank["steps"] == steps
        assert 0.025 <= rank["sent"] / (steps * 4 * MODEL) <= 0.05


def test_peft_sends_adapters_only():
    """20 steps of bf16: 2 bytes for each element of the adapters, and a few for flags."""
    for rank in run("peft_lora", "peft", "transformers"):
        assert rank["elements"] == 2 * sum(LLAMA.values())
        assert rank["of all"] > 20 * rank["elements"]
        assert rank["steps"] == 20
        assert 1.0 <= rank["sent"] / (20 * 2 * rank["elements"]) < 1.05


def test_trl_exchanges_adapters_once_per_optimizer_step():
    """10 steps of 2 batches each, in bf16."""
    for rank in run("trl_sft", "trl", "peft", "datasets"):
        assert rank["elements"] == 2 * sum(LLAMA.values())
        assert rank["steps"] == 10
        assert 1.0 <= rank["sent"] / (10 * 2 * rank["elements"]) < 1.05
