"""What is reproduced from the papers: the runs of every reproduction, and the rules by which it passes."""

from __future__ import annotations

from dataclasses import replace

from reproduction_rules import Claim, Family, Figures, Group
from reproduction_runs import Run

__all__ = ["GROUPS"]

_TOPK = "topk:ratio=0.01,values=float32"
_EF21 = f"{_TOPK},feedback=ef21-sgdm"


def _accuracy(base: str, label: str, points: float) -> Claim:
    def judge(figures: Figures) -> tuple[str, bool]:
        below = figures.points(base) - figures.points(label)
        told = f"{below:+.2f} points below, seeds of {base} {figures.spread(base):.2f} apart"
        return told, below <= points

    return Claim(f"`{label}` at most {points:g} points below `{base}`", (base, label), judge)


def _higher(high: str, low: str) -> Claim:
    def judge(figures: Figures) -> tuple[str, bool]:
        above = figures.points(high) - figures.points(low)
        return f"{above:+.2f} points", above >= 0

    return Claim(f"`{high}` not below `{low}`", (high, low), judge)


def _near(base: str, label: str, percent: float) -> Claim:
    def judge(figures: Figures) -> tuple[str, bool]:
        more = 100 * (figures.loss(label) / figures.loss(base) - 1)
        return f"{more:+.2f} %", more <= percent

    return Claim(f"loss of `{label}` at most {percent:g} % above `{base}`", (base, label), judge)


def _lower(low: str, high: str) -> Claim:
    def judge(figures: Figures) -> tuple[str, bool]:
        told = f"{figures.loss(low):.3f} and {figures.loss(high):.3f}"
        return told, figures.loss(low) < figures.loss(high)

    return Claim(f"loss of `{low}` below that of `{high}`", (low, high), judge)


def _inside(every: int) -> Claim:
    labels = tuple(f"diloco:every={every},outer_lr={eta}" for eta in (0.4, 0.7, 1))

    def judge(figures: Figures) -> tuple[str, bool]:
        losses = [figures.loss(label) for label in labels]
        return ", ".join(f"{loss:.3f}" for loss in losses), losses[1] == min(losses)

    return Claim(f"of outer_lr 0.4, 0.7 and 1 the middle one is best, every={every}", labels, judge)


def _fewer(base: str, label: str, factor: float) -> Claim:
    def judge(figures: Figures) -> tuple[str, bool]:
        fewer = figures.sent(base) / figures.sent(label)
        return f"{fewer:,.1f}x", fewer >= factor

    return Claim(f"`{label}` sends at least {factor:g}x less than `{base}`", (base, label), judge)


def _drift(label: str, stays: bool) -> Claim:
    wanted = "stays" if stays else "moves without push-sum weights"

    def judge(figures: Figures) -> tuple[str, bool]:
        moved = figures.mean(label, "drift")
        return f"moved by {moved:.1e} of the ranks' spread", (moved < 1e-4) == stays

    return Claim(f"`{label}`: the survivors' mean {wanted} in 24 mixings", (label,), judge)


def _by_ranks(task: str, ranks: int, epochs: int, half: int) -> dict[str, Family]:
    """Return dense, local and post-local training on so many ranks."""
    run = Run(task=task, ranks=ranks, epochs=epochs)
    texts = {"dense": "dense", "local": "local:every=8", "post-local": f"local:every=8,after={half}"}
    return {f"{task}, N={ranks}: {name}": Family(replace(run, method=t)) for name, t in texts.items()}


def _gossip(ranks: int) -> dict[str, Family]:
    texts = {"dense": "dense"} | {g: f"gossip:graph={g}" for g in ("ring", "exponential", "onepeer")}
    return {f"N={ranks}: {name}": Family(Run(ranks=ranks, method=t)) for name, t in texts.items()}


def _dgc(run: Run, ramp_steps: int) -> dict[str, Family]:
    """Return dense training, and DGC with and without its parts; the momentum is then DGC's."""
    ramp = f"ratio_from=0.25,ramp_steps={ramp_steps}"
    texts = {"full": f"dgc:{ramp}", "no ramp": "dgc", "no masking": f"dgc:masking=false,{ramp}"}
    runs = {"dense": run} | {n: replace(run, method=t, momentum=0.0) for n, t in texts.items()}
    return {f"{run.task}: {name}": Family(one) for name, one in runs.items()}


def _class_split(lr: float, momentum: float, *texts: str) -> dict[str, Family]:
    run = Run(ranks=4, by_class=True, lr=lr, momentum=momentum)
    return {f"{t}, lr={lr:g}, momentum={momentum:g}": Family(replace(run, method=t)) for t in texts}


def _texts(run: Run, *methods: str) -> dict[str, Family]:
    """Return a family of one seed for each method, labelled by it."""
    return {text: Family(replace(run, method=text), 1) for text in methods}


_MNIST = Run(task="mnist", epochs=1)
_TEXT = Run(task="text", epochs=5)
_TEXT_1 = replace(_TEXT, ranks=1)
_TEXT_4 = Run(task="text", ranks=4, epochs=6, steps=100)
# Four ranks see twice as many samples per step as two, for which a rate twice as high suits.
_LONGER_4 = Run(task="text", ranks=4, epochs=8, steps=100, lr=2e-3)
_R4 = "diloco:every=30,outer_lr=0.7"
_PLAIN = "diloco:every=30,outer_lr=1,momentum=0"
# The preset sparseloco, written out, and the same with the mean over all ranks.
_SENDERS = f"{_PLAIN}/topk:ratio=0.015625,chunk=4096,values=int2,feedback_decay=0.95,divide=senders"
_RANKS = _SENDERS.replace("divide=senders", "divide=ranks")
_OFTEN = "diloco:every=10/lowbit:format=e3m0"
_CURVES = ["dense", _R4, _OFTEN, "local:every=8", "powersgd:rank=4", _TOPK, _SENDERS]
_ETAS = [f"diloco:every={every},outer_lr={eta}" for every in (30, 10) for eta in (0.7, 0.4, 1)]

GROUPS = {
    "R1": Group(
        "local SGD and post-local SGD; digits (20 epochs) and MNIST (1 epoch)",
        _by_ranks("digits", 2, 0, 230)
        | _by_ranks("digits", 4, 0, 120)
        | _by_ranks("mnist", 2, 1, 234)
        | _by_ranks("mnist", 4, 1, 117),
        [
            claim
            for at in ("digits, N=2", "digits, N=4", "mnist, N=2", "mnist, N=4")
            for claim in (
                _accuracy(f"{at}: dense", f"{at}: local", 1),
                _fewer(f"{at}: dense", f"{at}: local", 7.9),
                _higher(f"{at}: post-local", f"{at}: local"),
            )
        ],
    ),
    "R7": Group(
        "gossip on three graphs, and one rank killed at step 60; digits",
        _gossip(4)
        | _gossip(5)
        | _gossip(8)
        | {
            f"N=5, one killed: {name}": Family(Run(ranks=5, method=text, dies=60))
            for name, text in {
                "onepeer": "gossip:lost=drop",
                "onepeer, pushsum=off": "gossip:lost=drop,pushsum=off",
                "ring": "gossip:graph=ring,lost=drop",
            }.items()
        },
        [
            *(
                _accuracy(f"N={n}: dense", f"N={n}: {graph}", 1)
                for n in (4, 5, 8)
                for graph in ("ring", "exponential", "onepeer")
            ),
            _accuracy("N=5: dense", "N=5, one killed: onepeer", 1),
            _drift("N=5, one killed: onepeer", True),
            _drift("N=5, one killed: ring", True),
            _drift("N=5, one killed: onepeer, pushsum=off", False),
        ],
    ),
    "R10": Group(
        "error feedback where every rank has other classes; digits, N=4",
        _class_split(0.5, 0, "dense", _TOPK, _EF21, f"{_TOPK},feedback=ef21")
        | _class_split(0.1, 0, _TOPK, _EF21)
        | _class_split(0.05, 0.5, "diloco:every=10"),
        [_higher(f"{_EF21}, lr={lr}, momentum=0", f"{_TOPK}, lr={lr}, momentum=0") for lr in ("0.5", "0.1")],
    ),
    "R8": Group(
        "deep gradient compression, 0.1 %, a ramp of half the run; digits and MNIST as in R1, N=2",
        _dgc(Run(), 230) | _dgc(_MNIST, 234),
        [
            claim
            for task in ("digits", "mnist")
            for claim in (
                _accuracy(f"{task}: dense", f"{task}: full", 0.5),
                _higher(f"{task}: full", f"{task}: no ramp"),
                _higher(f"{task}: no ramp", f"{task}: no masking"),
            )
        ],
    ),
    "R2": Group(
        "DiLoCo and its outer learning rate; character GPT, N=2, 1,000 steps",
        _texts(_TEXT, "dense", *_ETAS),
        [_near("dense", _R4, 1), _near("dense", "diloco:every=10,outer_lr=0.7", 1), _inside(30), _inside(10)],
        losses=True,
    ),
    "R3": Group(
        "DiLoCo on one rank (1,000 steps) and on four (600 steps); character GPT",
        {f"N=1: {text}": f for text, f in _texts(_TEXT_1, "dense", _R4).items()}
        | {f"N=4: {text}": f for text, f in _texts(_TEXT_4, "dense", _R4).items()},
        [_near("N=1: dense", f"N=1: {_R4}", 0.5), _near("N=4: dense", f"N=4: {_R4}", 3)],
        losses=True,
    ),
    "R4": Group(
        "DiLoCo's pseudo-gradients in few bits; character GPT, N=2, 1,000 steps",
        _texts(
            _TEXT,
            _R4,
            f"{_R4}/lowbit:format=e3m0",
            f"{_R4}/topk:ratio=0.01",
            f"{_R4}/topk:ratio=0.01,feedback=false",
            f"{_R4}/lowbit:format=int2",
        ),
        [
            _near(_R4, f"{_R4}/lowbit:format=e3m0", 0.5),
            _lower(f"{_R4}/topk:ratio=0.01", f"{_R4}/topk:ratio=0.01,feedback=false"),
            _lower(f"{_R4}/lowbit:format=int2", f"{_R4}/topk:ratio=0.01,feedback=false"),
        ],
        losses=True,
    ),
    "R5": Group(
        "SparseLoCo and what it divides by; character GPT, N=4, 600 steps",
        {
            "diloco without momentum": Family(replace(_TEXT_4, method=_PLAIN), 1),
            "divide=senders": Family(replace(_TEXT_4, method=_SENDERS), 1),
            "divide=ranks": Family(replace(_TEXT_4, method=_RANKS), 1),
        },
        [
            _lower("divide=senders", "divide=ranks"),
            _fewer("diloco without momentum", "divide=senders", 100),
            _near("diloco without momentum", "divide=senders", 0),
        ],
        losses=True,
    ),
    "R9": Group(
        "about 40 kB per step each; character GPT, N=2, 1,000 steps",
        _texts(_TEXT, _TOPK, "powersgd:rank=4", _OFTEN)
        | {"demo, SGD lr=0.0003": Family(replace(_TEXT, method="demo", sgd=True, lr=3e-4), 1)},
        losses=True,
    ),
    "curves": Group(
        "loss curves for times on slow links; character GPT, N=2, 1,000 steps; N=4, 800 steps at 0.002",
        {
            f"N={run.ranks}: {text}": family
            for run in (_TEXT, _LONGER_4)
            for text, family in _texts(run, *_CURVES).items()
        }
        | {f"N=4: {_OFTEN}, 1,000 steps": Family(replace(_LONGER_4, method=_OFTEN, epochs=10), 1)},
        losses=True,
    ),
}
