"""Buckets of an exchange: how each travels, the memory it is filled in, and its state."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stenograd.catalog.method import Method
from stenograd.compression.contract import Compressor, Exchange, Facts, Site, State
from stenograd.errors import CheckpointError
from stenograd.exchange.buckets import Bucket, KeptState, join_state, keep, put_back, split_state
from stenograd.wire.drivers import AnyDriver

__all__ = ["BucketState", "BucketStates", "Lane", "check_state", "same_memory"]


@dataclass(frozen=True, slots=True)
class Lane:
    """How one bucket travels.

    guarded: this rank looks through x before, because neither messages nor average tell what is finite.
    sums: averages are made by adding up what is divided already.
    scale: what the caller multiplies by when it fills the bucket.
    """

    compressor: Compressor
    facts: Facts
    site: Site
    guarded: bool
    sums: bool
    scale: float


@dataclass(slots=True)
class BucketState:
    """One bucket, its two lanes (while the method warms up, and after it), its state and its memory."""

    bucket: Bucket
    lanes: tuple[Lane, Lane]
    state: State
    flat: Tensor | None = None
    lent: bool = False
    average: Tensor | None = None


class BucketStates:
    """The buckets of an exchange, in the order in which they are submitted; state follows its parameters.

    Args:
        method: what runs over them.
        driver: the way to the other ranks.
        waits: whether the caller is done with a step's averages when it fills the next.
        want_errors: whether outcomes tell what compression lost.
    """

    def __init__(self, method: Method, driver: AnyDriver, *, waits: bool, want_errors: bool) -> None:
        self._method, self._driver = method, driver
        self._waits, self._want_errors = waits, want_errors
        self._slots: list[BucketState] = []
        self._homeless: dict[str, dict[str, Tensor]] = {}  # state of parameters that wait for their bucket

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> BucketState:
        return self._slots[index]

    @property
    def buckets(self) -> list[Bucket]:
        """What travels."""
        return [slot.bucket for slot in self._slots]

    def place(self, index: int, bucket: Bucket) -> bool:
        """Let bucket `index` be `bucket`, and tell whether that is new; later ones are placed anew."""
        if index < len(self._slots) and self._slots[index].bucket == bucket:
            return False
        # The later ones, too: a parameter may move from one to another, and its state waits until then.
        self.drop_from(index)
        site = Site(
            shapes=bucket.shapes,
            rank=self._driver.rank,
            world_size=self._driver.world_size,
            key=index,
            dtype=bucket.dtype,
            device=bucket.device,
        )
        first, later = (self._lane(c, site) for c in self._method.compressors(bucket.dense))
        fresh = later.compressor.init(bucket.empty(), site)
        known = {name: self._homeless[name] for name in bucket.names if name in self._homeless}
        state = fresh
        if known and fresh:  # a dense bucket keeps none
            # A parameter that is new here, or a key that nobody saved, starts afresh.
            own = {name: {**new, **known.get(name, {})} for name, new in split_state(fresh, bucket).items()}
            state = join_state(fresh, bucket, own)
        for name in known:  # only now: what was refused still waits for a bucket that fits
            del self._homeless[name]
        self._slots.append(BucketState(bucket, (first, later), state))
        return True

    def drop_from(self, index: int) -> None:
        """Take buckets from `index` on apart; their state waits by parameter name."""
        for slot in self._slots[index:]:
            self._homeless |= split_state(slot.state, slot.bucket)
        del self._slots[index:]

    def follow(self, names: Mapping[str, str], buckets: Sequence[Bucket]) -> list[str]:
        """Let state follow parameters to other names, before `buckets` are placed; see `arrange`."""
        now = {name: shape for b in buckets for name, shape in zip(b.names, b.shapes, strict=True)}
        before = {name: shape for b in self.buckets for name, shape in zip(b.names, b.shapes, strict=True)}
        gone = {name for name, shape in before.items() if now.get(names[name]) != shape}
        if not gone and all(names[name] == name for name in before):
            return []
        self.drop_from(0)
        # All are taken out before any is put back: two parameters may have swapped their names.
        known, self._homeless = self._homeless, {}
        for name in before.keys() - gone:
            self._homeless[names[name]] = known[name]
        # A state of zeros owes nothing, so nobody needs to hear that it is dropped.
        return [name for name in gone if any(bool(t.any()) for t in known[name].values())]

    def forget(self) -> None:
        """Drop the state of parameters that are in no bucket."""
        self._homeless = {}

    def by_name(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of all state by parameter name and key."""
        # With DDP's hook buckets come one by one; state that waits for its bucket is saved as well.
        out = copy.deepcopy(self._homeless)
        for slot in self._slots:
            out |= split_state(slot.state, slot.bucket)
        return out

    def load(self, parameters: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take state by parameter name in place of what there is."""
        buckets = self.buckets
        self.drop_from(0)
        # copies: what was loaded stays the caller's
        self._homeless = {name: {k: t.clone() for k, t in ts.items()} for name, ts in parameters.items()}
        for index, bucket in enumerate(buckets):
            self.place(index, bucket)

    def lane(self, index: int, step: int) -> Lane:
        """Return how a bucket travels in a step."""
        return self._slots[index].lanes[step >= self._method.warmup_steps]

    def flat(self, index: int) -> Tensor:
        """Return the memory to fill for a bucket."""
        slot = self._slots[index]
        if slot.flat is None:
            slot.flat = slot.bucket.empty()
        return slot.flat

    def give_back(self) -> None:
        """Part with tensors that were exchanged in place."""
        # A lent gradient's memory must be free after `zero_grad`, for the next forward pass.
        for slot in self._slots:
            if slot.lent:
                slot.flat, slot.lent = None, False

    def kept(self, any_used: Sequence[bool]) -> dict[int, KeptState]:
        """Copy the state of the parameters that no rank used, by bucket."""
        kept, start = {}, 0
        for i, slot in enumerate(self._slots):
            unused = [j for j in range(len(slot.bucket.names)) if not any_used[start + j]]
            start += len(slot.bucket.names)
            if unused:
                kept[i] = keep(slot.state, slot.bucket, unused)
        return kept

    def take(self, exchanges: Sequence[Exchange], kept: Mapping[int, KeptState]) -> None:
        """Take the new states; where one lives in a bucket's memory, the bucket gets the old one's."""
        for i, exchange in enumerate(exchanges):
            slot = self._slots[i]
            old, slot.state = slot.state, exchange.state
            own = self.flat(i)
            for key, new in exchange.state.items():
                # An average that was written over the old residual then lies where the bucket is filled next.
                # So gradients that are views of it need not be copied there.
                if new is not old[key] and same_memory(new, own):
                    same = old[key].dtype == own.dtype and old[key].numel() == own.numel()
                    slot.flat = old[key] if same else torch.empty_like(own)
            if i in kept:
                slot.state = put_back(slot.state, slot.bucket, kept[i])

    def _lane(self, compressor: Compressor, site: Site) -> Lane:
        facts = compressor.facts(site)
        looked_at = site.dtype is torch.float16  # before the step counts; see `read_end`
        # The next step fills the old residual's memory (see `take`), so an average there must be done with.
        if not self._waits or self._want_errors or looked_at:
            facts = replace(facts, frees_residual=False)
        # Limits for clipping are meant for whole gradients, so these must not come divided.
        sums = self._waits and facts.linear and facts.rounds == 1 and not self._method.clips
        # Clipping makes a finite number of an infinity, which nobody would find later.
        guarded = not (facts.linear or facts.finite) or self._method.clip_value is not None
        scale = 1.0 / site.world_size if sums else 1.0
        site = replace(site, error=self._want_errors, frees_residual=facts.frees_residual)
        return Lane(compressor, facts, site, guarded, sums, scale)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors live in the same memory."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def check_state(
    state: Mapping[str, Any], expected: Mapping[str, Any], parameters: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Check that a saved state fits what runs now.

    Args:
        state: what was saved.
        expected: values that must be equal, by key.
        parameters: the running state by parameter name, whose names, keys and shapes must be equal; empty
            before any bucket is known.

    Raises:
        CheckpointError: naming the first difference.
    """
    for key, want in expected.items():
        got = state.get(key, "nothing")
        if got != want:
            advice = "load it where it was saved"
            if key in ("rank", "world_size"):
                advice += ", or re-shard it with stenograd.load_checkpoint or stenograd.reshard"
            raise CheckpointError(f"the checkpoint's {key} must be {want!r}, got {got!r}: {advice}")
    saved = state.get("parameters", {})
    if not parameters:
        return
    missing = [name for name in parameters if name not in saved] + [
        name for name in saved if name not in parameters
    ]
    if missing:
        raise CheckpointError(
            f"checkpoint and model differ in parameter {missing[0]!r}: load it into the same model"
        )
    for name, tensors in parameters.items():
        for key, tensor in tensors.items():
            shape = tuple(saved[name][key].shape) if key in saved[name] else None
            if shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"the checkpoint's {key} of {name} must have shape {tuple(tensor.shape)}, got {shape}: "
                    "load it into the same model"
                )
