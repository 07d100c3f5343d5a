"""Names for a schedule and a compressor with certain values; they print as their long form."""

from __future__ import annotations

from dataclasses import dataclass, fields

from stenograd.catalog.registry import schedules
from stenograd.errors import MethodError

__all__ = ["PRESETS", "Preset", "spelled_out"]


@dataclass(frozen=True, slots=True)
class Preset:
    """What a name stands for, and where that is from."""

    text: str
    reference: str


# Keys given with the name replace the ones here; a compressor after the slash replaces the one here.
PRESETS = {
    "postlocal": Preset(
        "local:every=16,after=2000", 'Lin et al., "Don\'t Use Large Mini-Batches, Use Local SGD", ICLR 2020.'
    ),
    # The decayed residual takes the place of outer momentum.
    "sparseloco": Preset(
        "diloco:every=30,outer_lr=1,momentum=0/"
        "topk:ratio=0.015625,chunk=4096,values=int2,feedback_decay=0.95,divide=senders",
        'Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706, with '
        "the decay of its production runs.",
    ),
    "noloco": Preset(
        "diloco:every=50,topology=pairs,outer_lr=0.7,momentum=0.5,nesterov=false",
        'Kolehmainen et al., "NoLoCo", arXiv 2506.10911, with its outer optimizer.',
    ),
    "slowmo": Preset(
        "diloco:outer_lr=1,momentum=0.5,nesterov=false",
        'Wang et al., "SlowMo", ICLR 2020; with a slow learning rate of 1.',
    ),
}


def spelled_out(text: str) -> str:
    """Put a preset's long form in its place; keys given with its name replace the preset's.

    Example:
        >>> spelled_out("slowmo:every=20/topk")
        'diloco:outer_lr=1,momentum=0.5,nesterov=false,every=20/topk'
    """
    first, slash, codec = text.partition("/")
    name, _, rest = (part.strip() for part in first.partition(":"))
    if name not in PRESETS:
        return text
    schedule, _, usual = PRESETS[name].text.partition("/")
    kind, _, keys = schedule.partition(":")
    cls, _ = schedules()[kind]
    own = {f.name for f in fields(cls)}
    before, after = dict(_items(keys)), dict(_items(usual.partition(":")[2]))
    for key, value in (given := _items(rest)):
        if [k for k, _ in given].count(key) > 1:
            raise MethodError(f"{name}: key {key!r} is given twice: keep one")
        # After a slash the preset's compressor is not used, so its keys are unknown to the schedule.
        (after if after and not slash and key not in own else before)[key] = value
    # A key without a value stays so, and the method's parser refuses it by name.
    written = ",".join(f"{key}={value}" if value else key for key, value in before.items())
    if not slash and after:
        codec = f"{usual.partition(':')[0]}:" + ",".join(f"{key}={value}" for key, value in after.items())
    return f"{kind}:{written}/{codec}" if codec else f"{kind}:{written}"


def _items(keys: str) -> list[tuple[str, str]]:
    """Split "a=1,b=2" into keys and values."""
    split = (item.partition("=") for item in keys.split(",") if item.strip())
    return [(key.strip(), value.strip()) for key, _, value in split]
