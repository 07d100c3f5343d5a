"""What is trained and compared: models with a batch of their own, and the methods on them.

It imports nothing but torch and the library's models, so that ranks of another checkout can use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from stenograd.tasks.models import CharGPT, mnist_cnn

__all__ = [
    "EVIDENCE",
    "HANDED_OVER",
    "KEY_METHODS",
    "STREAMING",
    "WORKS",
    "Evidence",
    "Expected",
    "Streaming",
    "Work",
    "loss",
]

_CHARACTERS = 65  # different characters of tiny Shakespeare


@dataclass(frozen=True)
class Work:
    """A model to train for time, not for accuracy: the same random batch in every step.

    Attributes:
        build: makes the model from the global random state.
        batch: makes inputs and class numbers from the global random state.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]

    def make(self, rank: int) -> tuple[nn.Module, Tensor, Tensor]:
        """Return a model equal on all ranks, and this rank's inputs and targets."""
        torch.manual_seed(0)
        model = self.build()
        torch.manual_seed(1 + rank)
        return model, *self.batch()


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy; the scores have one more axis than the targets, the classes."""
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


class _ManyTensors(nn.Module):
    """The sum of 10,000 parameters of four elements: there is next to nothing to compute or to send."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(10_000))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of two classes."""
        total = torch.stack([w.sum() for w in self.weights]).sum()
        return torch.stack([total * x.sum(), total]).view(1, 2) * 1e-9


def _mlp(*sizes: int) -> nn.Module:
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _images(batch_size: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, *shape), torch.randint(10, (batch_size,))


def _text(batch_size: int, context: int) -> tuple[Tensor, Tensor]:
    windows = torch.randint(_CHARACTERS, (batch_size, context + 1))
    return windows[:, :-1], windows[:, 1:]


_MLP = (784, 2048, 2048, 2048, 10)
WORKS = {
    # Apache SINGA's MNIST example, 0.43 M parameters, with its batch size
    "cnn": Work(mnist_cnn, lambda: _images(64, 1, 28, 28)),
    # 10.0 M parameters and little arithmetic: the exchange weighs most here
    "mlp": Work(lambda: _mlp(*_MLP), lambda: _images(128, 784)),
    # the same with half of the arithmetic
    "mlp-64": Work(lambda: _mlp(*_MLP), lambda: _images(64, 784)),
    # nanoGPT's character model for CPUs, 0.80 M parameters, with its batch size and context
    "gpt-small": Work(lambda: CharGPT(_CHARACTERS), lambda: _text(12, 64)),
    # nanoGPT's character model for GPUs, 10.7 M parameters, with its context; a batch that one core can do
    "gpt": Work(lambda: CharGPT(_CHARACTERS, 256, layers=6, heads=6, width=384), lambda: _text(2, 256)),
    # a network of a million parameters whose step takes no time: for what attaching and a first step cost
    "million": Work(lambda: _mlp(512, 1024, 512), lambda: _images(16, 512)),
    "many-tensors": Work(_ManyTensors, lambda: (torch.ones(4), torch.zeros(1, dtype=torch.long))),
}


@dataclass(frozen=True)
class Evidence:
    """A training whose loss is told against wall seconds, for every rival from the same weights and samples.

    Attributes:
        steps: of every rival, so all see equally many samples.
        ours: Stenograd's methods beside DDP and its hooks.
        target: accuracy to reach; None for the loss at which the worst seed of DDP ends.
        parameters: that travel; with `step_s`, the seconds of a step on a core of its own, for estimates.
        grid: learning rates that are tried alike for each rival, as multiples of the recipe's.
        batch: samples of a rank's step.
        context: characters of a sample.
        judged: held-out samples that are looked at; None for all.
        parts: of the steps, after each of which they are.
    """

    steps: int
    ours: tuple[str, ...]
    parameters: int
    step_s: float
    target: float | None = None
    grid: tuple[float, ...] = (0.5, 1.0, 2.0)
    batch: int = 64
    context: int = 1
    judged: int | None = None
    parts: int = 12

    @property
    def rivals(self) -> list[str]:
        """No exchange, which tells what computing takes, DDP with its hooks, other libraries, and ours."""
        others = ["epfml-powersgd-1"] if self.ours[-1].startswith("powersgd") else []
        others += ["torchft-diloco"] if self.ours[0].startswith("diloco") else []
        return ["none", "ddp", "ddp-fp16", "ddp-powersgd", *others, "bf16", *self.ours]


_ROUNDS = ("diloco:every=10/lowbit:format=e3m0", "powersgd:rank=4,alternate=true")
EVIDENCE = {
    # nanoGPT's character model for GPUs on tiny Shakespeare, with a batch that one core can do
    "gpt": Evidence(400, _ROUNDS, 10_745_088, 0.35, batch=2, context=256, judged=128),
    # nanoGPT's for CPUs, with its batch
    "gpt-small": Evidence(
        1000, _ROUNDS, 804_096, 0.05, grid=(0.5, 1.0, 2.0, 4.0), batch=12, context=64, judged=500
    ),
    # SINGA's example and recipe
    "mnist": Evidence(
        2400,
        ("local:every=16/qsgd:bits=4", "topk:ratio=0.01"),
        431_080,
        0.02,
        grid=(0.5, 1.0, 2.0, 4.0, 8.0),
        target=0.985,
    ),
    # residual blocks with BatchNorm on MNIST, at a tenth of what ImageNet's networks have
    "resnet": Evidence(
        600,
        ("local:every=16/qsgd:bits=4", *_ROUNDS[1:]),
        151_546,
        0.12,
        grid=(0.5, 1.0, 2.0, 4.0, 8.0),
        target=0.985,
    ),
    # adapters of rank 8 in a small GPT that was trained first: now the text has its case swapped
    "lora": Evidence(
        600,
        (*_ROUNDS[:1], "qsgd:bits=4"),
        65_536,
        0.06,
        grid=(0.5, 1.0, 2.0, 4.0, 8.0),
        batch=12,
        context=64,
        judged=500,
    ),
    # what a machine does in minutes, to see that all of it works
    "try": Evidence(
        16, _ROUNDS[:1], 804_096, 0.05, grid=(1.0, 2.0), batch=12, context=64, judged=100, parts=2
    ),
}

# One method of each kind, for what need not be known of all.
KEY_METHODS = ("dense", "topk:ratio=0.01", "sign", "qsgd", "powersgd:rank=4")


@dataclass(frozen=True)
class Streaming:
    """How a model is trained to see whether it feels the rounds of streaming DiLoCo.

    Attributes:
        every: steps from round to round, and of a turn.
        delays: steps that a fragment may take, densely and in 4 bits; below every / 4.
    """

    every: int
    delays: tuple[int, int]

    @property
    def rivals(self) -> list[str]:
        """No exchange, DiLoCo, and its streaming form in 4 fragments, dense and in 4 bits."""
        dense, few = (f"diloco:every={self.every},fragments=4,delay={d},mix=0.5" for d in self.delays)
        return ["none", f"diloco:every={self.every}", dense, f"{few}/lowbit:format=e3m0"]


# The largest fragment of the MLP takes 1.4 s at 100 Mbit/s, eleven of its steps; the GPT's two of its own.
STREAMING = {"cnn": Streaming(16, (2, 1)), "mlp": Streaming(96, (18, 4)), "gpt": Streaming(32, (5, 2))}


@dataclass(frozen=True)
class Expected:
    """Bytes that a rank should hand over under the character GPT, by the formulas of the papers.

    Attributes:
        method: its text.
        kilobytes: expected per step.
        ranks: number of ranks; a ring has two neighbours from three on.
        steps: a multiple of the period in which bytes repeat.
        adam: whether the optimizer keeps moments.
    """

    method: str
    kilobytes: float
    ranks: int = 2
    steps: int = 4
    adam: bool = False


HANDED_OVER = [
    Expected("dense", 3200),
    Expected("gossip", 3200),
    Expected("local:every=8", 400, steps=8),
    Expected("gossip:graph=ring,consensus=0.4/sign", 200, ranks=3),
    # Second moments are averaged in every sixth round. With every=32 it is an eighth of this: 150 kB.
    Expected("local:every=4,states=average,states_every=3", 1200, steps=24, adam=True),
    Expected("diloco:every=30", 107, steps=30),
    Expected("topk:ratio=0.01,values=float32", 41),
    Expected("demo", 34),
    Expected("diloco:every=30/lowbit:format=e3m0", 13.5, steps=30),
    Expected("dgc:ratio=0.001", 4.4),
    Expected("sparseloco:every=30", 0.73, steps=30),
]
