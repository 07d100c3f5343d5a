"""Recipes: their rules, optimizers and schedules."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from stenograd.errors import ConfigError
from stenograd.tasks import Recipe

RECIPE = Recipe(epochs=2, batch_size=4, lr=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be a whole number >= 1, got 0"),
        ({"epochs": 1.5}, "epochs must be a whole number >= 1, got 1.5"),
        ({"batch_size": True}, "batch_size must be a whole number >= 1, got True"),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number >= 0, got -1"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be a whole number >= 1, got 0"),
        ({"lr": 0.0}, "lr must be finite and > 0, got 0.0"),
        ({"lr": float("nan")}, "lr must be finite and > 0, got nan"),
        ({"lr": float("inf")}, "lr must be finite and > 0, got inf"),
        ({"min_lr": 0.2}, r"min_lr must be in \[0, lr\] = \[0, 0.1\], got 0.2"),
        ({"weight_decay": -1.0}, "weight_decay must be finite and >= 0, got -1.0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"nesterov": True}, "nesterov needs momentum > 0"),
        ({"optimizer": "adam"}, "optimizer must be 'sgd' or 'adamw', got 'adam'"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum must be 0 and nesterov off with adamw"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ({"betas": (0.9,)}, r"betas must be two numbers in \[0, 1\)"),
    ],
)
def test_recipe_rejects(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(RECIPE, **change)


def test_recipe_builds_sgd():
    recipe = replace(RECIPE, momentum=0.9, nesterov=True, weight_decay=0.01)
    optimizer = recipe.make_optimizer(nn.Linear(2, 3))
    (group,) = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.SGD)
    found = {key: group[key] for key in ("lr", "momentum", "nesterov", "weight_decay")}
    assert found == {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def test_recipe_builds_adamw_that_spares_vectors():
    recipe = replace(RECIPE, optimizer="adamw", weight_decay=0.5, betas=(0.8, 0.99))
    optimizer = recipe.make_optimizer(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    matrices, vectors = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (matrices["weight_decay"], [p.ndim for p in matrices["params"]]) == (0.5, [2])
    assert (vectors["weight_decay"], [p.ndim for p in vectors["params"]]) == (0.0, [1, 1, 1])
    assert matrices["betas"] == (0.8, 0.99)


def test_optimizer_leaves_frozen_parameters_out():
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    assert RECIPE.make_optimizer(model).param_groups[0]["params"] == [model.weight]


def test_constant_rate_needs_no_schedule():
    assert RECIPE.make_scheduler(RECIPE.make_optimizer(nn.Linear(1, 1)), 10) is None


def test_schedule_warms_up_then_falls_to_min_lr_at_the_last_step():
    """Three warm-up steps at 1/4, 2/4, 3/4 of 0.1, the peak at step 3, and 0.01 at step 9, the last."""
    recipe = replace(RECIPE, warmup_steps=3, min_lr=0.01)
    optimizer = recipe.make_optimizer(nn.Linear(1, 1))
    scheduler = recipe.make_scheduler(optimizer, 10)
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[6] == pytest.approx(0.055)
    assert rates[9:] == pytest.approx([0.01, 0.01, 0.01])
    assert rates[3:10] == sorted(rates[3:10], reverse=True)


def test_warm_up_alone_stays_at_the_peak():
    recipe = replace(RECIPE, warmup_steps=1)
    assert [recipe.lr_factor(step, 3) for step in range(3)] == [0.5, 1.0, 1.0]


def test_run_shorter_than_the_warm_up():
    recipe = replace(RECIPE, warmup_steps=9, min_lr=0.0)
    assert [recipe.lr_factor(step, 2) for step in (0, 1)] == pytest.approx([0.1, 0.2])


def test_scheduler_needs_a_step():
    with pytest.raises(ConfigError, match="total_steps must be >= 1, got 0"):
        RECIPE.make_scheduler(RECIPE.make_optimizer(nn.Linear(1, 1)), 0)
