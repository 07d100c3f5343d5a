"""`stenograd train` as a worker of an open run, and `stenograd rendezvous`, where such workers meet."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from stenograd.catalog.method import Method
from stenograd.cli.folder import RunFolder
from stenograd.cli.loop import Row, Score, Trainer, endless
from stenograd.cli.options import TrainOptions
from stenograd.cli.setup import Setup
from stenograd.cli.table import counted, megabytes, percent, say
from stenograd.errors import PeerLost
from stenograd.launch.membership import host_store
from stenograd.launch.network import own_address
from stenograd.launch.process_group import membership
from stenograd.stopping import STOPPED
from stenograd.wire.driver import Driver

__all__ = ["OpenJob", "host", "work"]


@dataclass(frozen=True, kw_only=True)
class OpenJob:
    """A job that was checked.

    Attributes:
        about: what run.json holds besides, for `--resume`.
    """

    job: TrainOptions
    setup: Setup
    method: Method
    folder: RunFolder | None
    resume: bool
    about: dict[str, Any]


def work(ready: OpenJob, driver: Driver) -> int:
    """Train as one worker of an open run until all together have trained as much as was asked for.

    The member of lowest rank evaluates after each epoch's worth of steps of all workers, prints and saves.
    Workers that come later go on from there.

    Raises:
        ConfigError: this run is new, and the folder holds another one.
    """
    here = membership()
    begins = here is not None and here.now < 0
    if ready.folder is not None and begins:
        ready.folder.check(ready.resume)  # later the folder holds what others of this run have written
    run = _Work(ready, driver, here, begins)
    try:
        return run.train()
    finally:
        run.trainer.sync.close()


class _Work:
    """One worker's training."""

    def __init__(self, ready: OpenJob, driver: Driver, here: Any, begins: bool) -> None:
        self._ready, self._setup, self._folder = ready, ready.setup, ready.folder
        self._here, self._begins = here, begins
        # Of the run that is resumed, perhaps also epochs after the checkpoint, which are trained again.
        self._before = ready.folder.rows() if ready.folder is not None and begins else []
        self.trainer = Trainer(ready.setup, ready.method, driver)
        self._sync: Any = self.trainer.sync
        self._rows: list[Row] = []
        self._start, self._sums = time.perf_counter(), [0.0, 0.0, 0.0]
        self._sent, self._skipped = (0, 0), 0

    @property
    def _speaks(self) -> bool:
        return bool(self._sync.rank == min(self._sync.members, default=0))

    def train(self) -> int:
        if self._ready.resume and self._folder is not None:
            saved = self._folder.load(self.trainer)
            if saved is not None:
                self._rows = [Row(**row) for row in saved.extra["rows"]]
        if self._speaks:
            say(self.trainer.headline + ", open")
            self._begin()
        target = self._setup.epochs * self._setup.steps * self._setup.world_size
        share = self._setup.steps * self._setup.world_size
        done, round_, over = self._done(), self._sync.round, False
        for indices in endless(self._setup, self._sync.rank, int(done // share) + 1):
            if done >= target or over or self._sync.stopping:
                break
            loss, correct, count = self.trainer.take_step(indices)
            self._sums = [self._sums[0] + loss * count, self._sums[1] + correct, self._sums[2] + count]
            if self._sync.round == round_:
                continue
            round_, before, done = self._sync.round, done, self._done()
            over = self._here.claimed("result")  # the others have held the last round without this worker
            # All members have equal tokens and members, so one of them speaks without any message.
            if int(done // share) > int(before // share) and self._speaks:
                self._end_epoch(min(int(done // share), self._setup.epochs))
        return self._finish()

    def _done(self) -> float:
        """Return how many steps all workers have brought to rounds, since the very beginning."""
        return float(sum(self._sync.tokens.values()))

    def _begin(self) -> None:
        if self._folder is None:
            return
        # Later another worker may be adding a row, or this one has begun the files before a restart.
        if self._begins or not (self._folder.path / "metrics.jsonl").exists():
            added = [row for row in self._folder.rows() if row not in self._before]  # by others, meanwhile
            self._folder.begin([asdict(row) for row in [*self._rows, *added]], self._ready.about)

    def _end_epoch(self, epoch: int) -> None:
        """Evaluate, say so, and save; meanwhile the others train on, and wait for the grace at most."""
        if self._is_over(epoch):
            return
        row = self._row(epoch, self._evaluated())
        members = counted(len(self._sync.members), "worker")
        say(f"{row.line(self._setup.epochs)}  round {self._sync.round} of {members}")
        with self._here.turn("epoch"):
            if self._is_over(epoch):  # its newer checkpoint would be deleted for this one
                return
            self._rows = [*self._rows, row]
            if self._folder is not None:
                self._folder.append(row)
                self._save(self._folder)

    def _is_over(self, epoch: int) -> bool:
        """Return whether another worker, which spoke meanwhile, has written this epoch or a later one."""
        if self._folder is not None:
            self._rows = self._folder.rows()
        return bool(self._rows) and self._rows[-1].epoch >= epoch

    def _save(self, folder: RunFolder) -> None:
        """Save, unless another worker has saved a later round: a save deletes what has a higher number."""
        # By rounds, which all workers count alike: one that has just come has taken few steps.
        at = self.trainer.taken = self._sync.round
        if self._is_saved_after(at):
            return
        folder.save(self.trainer, self._rows)
        self._here.claim(f"saved/{at}")

    def _is_saved_after(self, round_: int) -> bool:
        later = range(round_ + 1, self._here.now + 1)
        with contextlib.suppress(PeerLost):  # without the store, nobody has heard of later rounds
            return any(self._here.claimed(f"saved/{k}") for k in later)
        return False

    def _evaluated(self) -> Score:
        with self._sync.consensus():
            return self.trainer.evaluate()

    def _row(self, epoch: int, score: Score) -> Row:
        loss, correct, count = self._sums
        traffic, seconds = self._sync.traffic, time.perf_counter() - self._start
        payload, moved = traffic.payload_bytes - self._sent[0], traffic.moved_bytes - self._sent[1]
        dense = self.trainer.dense_bytes_per_step(self._setup.world_size) * self._setup.steps
        self._start, self._sums = time.perf_counter(), [0.0, 0.0, 0.0]
        self._sent = traffic.payload_bytes, traffic.moved_bytes
        skipped, self._skipped = self._sync.skipped - self._skipped, self._sync.skipped
        return Row(
            epoch=epoch,
            train_loss=loss / max(count, 1),
            train_accuracy=correct / max(count, 1),
            eval_loss=score.loss,
            eval_accuracy=score.accuracy,
            seconds=seconds,
            payload_bytes=payload,
            moved_bytes=moved,
            dense_bytes=dense,
            compression=dense / moved if moved else math.inf,
            steps=self._setup.steps,
            skipped=skipped,
        )

    def _is_left(self) -> bool:
        """Wait for those of the last round that come before this worker; return whether none has finished."""
        there, own = self._here.alive(), self._sync.rank
        before = [member for member in there if member.rank in self._sync.members and member.rank < own]
        try:
            while not (over := self._here.claimed("result")) and before:
                self._here.await_end(before.pop(0))
        except PeerLost:  # the store has ended, as it may when the first has finished
            return self._speaks
        return not over

    def _finish(self) -> int:
        if self._sync.stopping:
            if not self._speaks:
                return STOPPED
            saved = "saved nothing: no --out"
            if self._folder is not None:
                with self._here.turn("epoch"):
                    self._save(self._folder)
                saved = "saved, to be continued by --resume"
            say(f"stopped after round {self._sync.round} because of a signal; {saved} (status {STOPPED})")
            return STOPPED
        if not self._is_left():
            return 0
        if self._setup.epochs:
            self._end_epoch(self._setup.epochs)  # who was to do this may be lost
        score, tokens = self._evaluated(), self._sync.tokens
        result = {
            **self._setup.identity(self._ready.method),
            "epochs": self._setup.epochs,
            "eval_loss": score.loss,
            "eval_accuracy": score.accuracy,
            "rounds": self._sync.round,
            "steps_by_rank": {str(rank): n for rank, n in tokens.items()},
            "events": self._sync.events,
            "moved_bytes": self._sync.traffic.moved_bytes,
        }
        if not self._here.claim("result"):
            return 0
        if self._folder is not None:
            self._folder.finish(result, {"ranks": []})
        brought = ", ".join(f"rank {rank} {n:,.0f}" for rank, n in tokens.items())
        say(
            f"after {self._sync.round} rounds: eval accuracy {percent(score.accuracy)}, "
            f"loss {score.loss:.4f}, {megabytes(result['moved_bytes'])} sent by this worker; steps: {brought}"
        )
        return 0


def host(port: int) -> int:
    """Hold the store of an open run until Ctrl-C or SIGTERM."""
    # SIGTERM then raises KeyboardInterrupt and ends the loop below, like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    store, name = host_store(port), own_address()
    print(f"export STENOGRAD_OPEN={name}:{store.port}", flush=True)
    print(
        f"Export this to all workers. The run lives as long as this process, on {socket.gethostname()}; "
        "Ctrl-C ends it.",
        file=sys.stderr,
        flush=True,
    )
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return 0
