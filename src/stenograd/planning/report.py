"""A plan as one HTML file: no script, nothing fetched, every picture with its data as a table."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from stenograd.planning.advice import DENSE, Prediction
from stenograd.planning.learn import Learning, sentence
from stenograd.planning.plan import Plan
from stenograd.planning.replay import Timeline, replay
from stenograd.planning.units import rate_text, time_text

__all__ = ["page"]

_RATES = np.geomspace(1e6, 1e11, 16)
_LINES = 6  # methods in a picture, dense and the recommended one among them
# Okabe and Ito's palette, which colour-blind readers can tell apart; markers and labels say the same.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_MARKERS = "os^Dv*"
_PARTS = ("compute", "codec", "latency", "bandwidth", "contention", "stragglers")
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #8888; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; background: #fff; color: #000; padding: .5rem; }
svg { max-width: 100%; height: auto; }
"""


def page(plan: Plan, learning: Learning | None = None) -> str:
    """Return the report of a plan with predictions as an HTML document; equal plans give equal text.

    Without matplotlib it has tables only, and says what to install.

    Args:
        plan: the plan.
        learning: what virtual workers showed, if they were trained.
    """
    shown = _shown(plan)
    name = plan.work["name"] or "training"
    body = [
        f"<h1>{_text(name)}: plan for {plan.world_size} workers</h1>",
        f"<p><strong>{_text(plan.reason)}.</strong></p>",
        "<ul>" + "".join(f"<li>{_text(note)}</li>" for note in plan.notes) + "</ul>" if plan.notes else "",
        "<h2>Methods</h2>",
        _predictions(plan),
        *_pictures(plan, shown),
        *([] if learning is None else _learning(learning)),
        "<h2>What went in</h2>",
        _inputs(plan),
    ]
    head = f'<meta charset="utf-8"><title>{_text(name)}: plan</title><style>{_STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _shown(plan: Plan) -> list[Prediction]:
    """Return dense, the recommended method, and the next fastest."""
    order = sorted(plan.predictions, key=lambda p: (p.method not in (DENSE, plan.method), p.seconds[1]))
    return sorted(order[:_LINES], key=lambda p: (p.method != DENSE, p.seconds[1]))


def _predictions(plan: Plan) -> str:
    head = (
        "method",
        "ms per step",
        "80 % of steps",
        "MB per step",
        "collectives",
        "limit",
        "faster than dense",
    )
    rows = [
        (
            p.method + (" (recommended)" if p.method == plan.method else ""),
            f"{1e3 * p.seconds[1]:.3g}",
            f"{1e3 * p.seconds[0]:.3g} to {1e3 * p.seconds[2]:.3g}",
            f"{p.moved_bytes / 1e6:.3g}",
            f"{p.collectives:.3g}",
            p.limit,
            "" if p.method == DENSE else p.pays_text,
        )
        for p in sorted(plan.predictions, key=lambda p: p.seconds[1])
    ]
    return _table(head, rows)


def _learning(found: Learning) -> list[str]:
    rows = [
        (
            row.method,
            f"{row.mean:+.2g} +- {row.margin:.2g}" if row.differences else "",
            f"{row.diverged} of {found.seeds}",
            "" if row.error is None else f"{row.error:.2g}",
        )
        for row in found.results
    ]
    return [
        "<h2>Learning</h2>",
        f"<p>{found.workers} virtual workers, {found.steps} steps, {found.seeds} seeds. Dense: loss "
        f"{found.first:.4g} in the first step, {found.last:.4g} over the last tenth.</p>",
        _table(("method", "loss against dense (95 %)", "diverged", "error of the first average"), rows),
        "<ul>" + "".join(f"<li>{_text(sentence(found, row))}</li>" for row in found.results) + "</ul>",
    ]


def _inputs(plan: Plan) -> str:
    cost = plan.link.costs["all-reduce"]
    rows = [
        ("link", "measured" if plan.link.measured else "assumed"),
        ("rate of the slowest host", rate_text(plan.link.bps)),
        ("latency of a message", f"{time_text(cost.hop_s)}, while computing {time_text(cost.busy_hop_s)}"),
        ("what a message takes from computing", time_text(cost.issue_s + cost.cpu_s)),
        ("step without an exchange", time_text(plan.profile.floor_s)),
        ("steps measured", str(len(plan.profile.step_s))),
        ("parameters", f"{plan.work['parameters']:,}"),
        ("bucket", f"{plan.work['bucket_bytes']:,} bytes"),
        ("workers per host, cores per worker", f"{plan.ranks_per_host}, {plan.cores:g}"),
        *((key, str(value)) for key, value in sorted(plan.made.items())),
    ]
    return _table(("input", "value"), rows)


def _pictures(plan: Plan, shown: Sequence[Prediction]) -> list[str]:
    try:
        import matplotlib
    except ImportError:
        return ["<p>There are no pictures: pip install stenograd[plots] makes them.</p>"]
    # Text stays text, and neither a date nor random names make two reports differ.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "stenograd", "font.size": 10}):
        return [_bandwidth(plan, shown), _parts(shown), _timelines(plan)]


def _bandwidth(plan: Plan, shown: Sequence[Prediction]) -> str:
    """Draw the time of a step against the rate of the links."""
    cluster, usual = plan.cluster, plan.slowness.at[1]
    series = {
        p.method: [
            1e3 * replay(plan.programs[p.method], cluster.with_rate(float(r)), slower=usual).step_s
            for r in _RATES
        ]
        for p in shown
    }
    figure, axes = _figure(4.2)
    for (text, values), colour, marker in zip(series.items(), _COLOURS, _MARKERS, strict=False):
        axes.plot(_RATES, values, color=colour, marker=marker, markersize=4, label=text)
    axes.axhline(1e3 * plan.profile.floor_s, color="#666666", linestyle="--", label="no exchange")
    axes.axvline(plan.link.bps, color="#666666", linestyle=":", label="this link")
    axes.set(xscale="log", yscale="log", xlabel="rate of each host's link, bit/s", ylabel="ms per step")
    axes.legend(frameon=False, fontsize=8)
    head = ("rate", *series)
    rows = [(rate_text(r), *(f"{v[i]:.3g}" for v in series.values())) for i, r in enumerate(_RATES)]
    what = f"Milliseconds per step against the links' rate, for {', '.join(series)}."
    return _picture(figure, "rates", "Time of a step against bandwidth", what, _table(head, rows))


def _parts(shown: Sequence[Prediction]) -> str:
    """Draw what a step would save if one resource were free."""
    figure, axes = _figure(0.5 + 0.5 * len(shown))
    places = np.arange(len(shown))
    left = np.zeros(len(shown))
    for part, colour, hatch in zip(_PARTS, _COLOURS, _HATCHES, strict=True):
        widths = np.array([1e3 * p.saved_s[part] for p in shown])
        axes.barh(places, widths, left=left, color=colour, hatch=hatch, edgecolor="#ffffff", label=part)
        left += widths
    axes.set_yticks(places, [p.method for p in shown])
    axes.invert_yaxis()
    axes.set_xlabel("ms per step that a free resource would save; they overlap, so the sum means nothing")
    figure.legend(loc="outside upper center", frameon=False, fontsize=8, ncols=6)
    rows = [(p.method, *(f"{1e3 * p.saved_s[part]:.3g}" for part in _PARTS)) for p in shown]
    what = "For each method, the milliseconds that a step would save if one resource were free."
    return _picture(figure, "parts", "What limits each method", what, _table(("method", *_PARTS), rows))


def _timelines(plan: Plan) -> str:
    """Draw a step, or a whole round, of the recommended method above a step of dense."""
    texts = list(dict.fromkeys((plan.method, DENSE)))
    steps = {text: plan.programs[text].steps for text in texts}
    names_of = {t: f"a step of {t}" if n == 1 else f"a round of {n} steps of {t}" for t, n in steps.items()}
    runs: dict[str, Timeline] = {text: plan.timeline(text, spans=True) for text in texts}
    figure, axes = _figure(1.2 + 1.3 * len(texts))
    colours = {"compute": "#0072B2", "codec": "#E69F00", "collective": "#009E73", "wait": "#BBBBBB"}
    names, rows, at = [], [], 0
    for text, run in runs.items():
        lanes = sorted({s.lane for s in run.spans}, key=lambda lane: (lane < 0, lane))
        for lane in lanes:
            own = [s for s in run.spans if s.lane == lane]
            for s in own:
                axes.barh(
                    at, 1e3 * (s.end_s - s.start_s), left=1e3 * s.start_s, color=colours[s.kind], alpha=0.8
                )
                times = (f"{1e3 * s.start_s:.3g}", f"{1e3 * s.end_s:.3g}")
                rows.append((text, _lane_name(lane), s.kind, *times))
            names.append(f"{names_of[text]}: {_lane_name(lane)}")
            at += 1
    for kind, colour in colours.items():
        axes.barh(0, 0, color=colour, label=kind)
    axes.set_yticks(range(at), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms from the start")
    figure.legend(loc="outside upper center", frameon=False, fontsize=8, ncols=4)
    what = f"What each thread and the network do in {' and in '.join(names_of.values())}."
    head = ("method", "where", "what", "from ms", "to ms")
    return _picture(figure, "steps", "What happens when", what, _table(head, rows[:400]))


def _lane_name(lane: int) -> str:
    return "network" if lane < 0 else ("training" if lane == 0 else f"exchange {lane}")


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, max(height, 2.0)), layout="constrained")
    return figure, figure.subplots()


def _picture(figure: Any, name: str, title: str, what: str, data: str) -> str:
    """Return a figure as SVG with a text alternative, and its data below."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)  # names must be unique in a page with several pictures
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    label = f'role="img" aria-labelledby="{name}-title {name}-what"'
    told = f'<title id="{name}-title">{_text(title)}</title><desc id="{name}-what">{_text(what)}</desc>'
    svg = re.sub(r"<svg([^>]*)>", lambda m: f"<svg{m[1]} {label}>{told}", svg, count=1)
    return (
        f"<h2>{_text(title)}</h2>\n<figure>{svg}<figcaption>{_text(what)}</figcaption></figure>\n"
        f"<details><summary>The same as a table</summary>{data}</details>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in head)
    lines = ["<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _text(value: object) -> str:
    return html.escape(str(value))
