"""Give every decoder damaged input: it must answer rightly or raise an error that Stenograd names.

    python drills/fuzz.py [--cases 10000] [--seed 0] [--decoders sign,unpack]

Payloads are random bytes, have flipped bits or another length. Where a kernel exists twice, both must
do the same; inputs end right before a page that nobody may touch, and results lie between sentinels. Each
decoder runs in a process of its own, so that a crash is counted against it. Prints a table; the exit status
is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Tally", "fuzz"]

_HANG_S = 60.0  # for one case


@dataclass
class Tally:
    """What one decoder did.

    Attributes:
        name: of the decoder.
        cases: number of cases that ended.
        did: how often it answered, or raised each error.
        wrong: descriptions of the first wrong cases, with their seeds.
        seconds: that it took.
    """

    name: str
    cases: int = 0
    did: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def fuzz(name: str, cases: int, seed: int) -> Tally:
    """Run a decoder's cases in a forked process; a crash or a hang is wrong, too."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        code = 1
        try:
            _send(writer, _cases(name, cases, seed))
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        told = json.loads(text)
        return Tally(**{**told, "did": Counter(told["did"])})
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return Tally(name, wrong=[f"its process ended with {how} (SIGALRM: a case took {_HANG_S:g} s)"])


def _cases(name: str, cases: int, seed: int) -> Tally:
    import torch
    from fuzz_cases import CASES, Wrong

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tally, start = Tally(name), time.perf_counter()
    for index in range(cases):
        signal.setitimer(signal.ITIMER_REAL, _HANG_S)
        try:
            tally.did[CASES[name](random.Random(f"{name}/{seed}/{index}"))] += 1
        except Wrong as error:
            if len(tally.wrong) < 5:
                tally.wrong.append(f"case {index} of seed {seed}: {error}")
        tally.cases += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    tally.seconds = time.perf_counter() - start
    return tally


def _send(writer: int, tally: Tally) -> None:
    data = json.dumps(vars(tally)).encode()
    while data:
        data = data[os.write(writer, data) :]


def _row(t: Tally) -> list[object]:
    answers = t.did["answer"]
    named = sum(t.did.values()) - answers
    wrong = len(t.wrong) if len(t.wrong) < 5 else "5+"
    return [t.name, f"{t.cases:,}", f"{answers:,}", f"{named:,}", wrong, f"{t.seconds:.0f}"]


def fuzz_all(names: list[str], cases: int, seed: int) -> bool:
    """Fuzz decoders, print the table, and return whether nothing was wrong."""
    from fuzz_cases import warm

    from stenograd.cli.table import show

    warm()
    tallies = []
    for name in names:
        tallies.append(fuzz(name, cases, seed))
        for line in tallies[-1].wrong:
            print(f"{name}: {line}", flush=True)
    show(["decoder", "cases", "answers", "named errors", "wrong", "s"], [_row(t) for t in tallies])
    print(f"\n{sum(t.cases for t in tallies):,} cases, {len(names)} decoders", flush=True)
    return not any(t.wrong for t in tallies) and all(t.cases == cases for t in tallies)


def main() -> int:
    """Fuzz what the options say and return the exit status."""
    from fuzz_cases import CASES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000, help="of each decoder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decoders", default="", help="beginnings of names; all if left out")
    args = parser.parse_args()
    wanted = tuple(args.decoders.split(","))
    return 0 if fuzz_all([n for n in CASES if n.startswith(wanted)], args.cases, args.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
