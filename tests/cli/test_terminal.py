"""What a person sees: whole words and numbers at any width, JSON that parses, files that are named."""

import fcntl
import importlib
import io
import json
import os
import pkgutil
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
import typer
from cli_process import on_a_rank, stenograd_command, without_progress
from launched import clean_env
from rich.console import Console

import stenograd
import stenograd.cli
from stenograd import tasks
from stenograd.cli import commands, options, table
from stenograd.planning.advice import ACCURACIES
from stenograd.planning.link import assumed

WIDTHS = (60, 80, 120)
QUICK_PLAN = ("plan", "--batch-size", 64, "--workers", 2, "--link", "1mbit,0.1ms", "--seconds", 1)
COMMANDS = typer.main.get_command(commands.app).commands


def whole_words(cells, out, width):
    """Every word of every cell stands in the output as it is, and only a longer word leaves the screen."""
    words = set(re.split(r"[\s│┃┏┓┗┛┡┩╇┳━└┘┴─]+", out))
    torn = {word for cell in cells for word in str(cell).split()} - {w.rstrip(":") for w in words} - words
    assert not torn
    for line in out.splitlines():
        assert len(line) <= width or max(map(len, line.split())) > width - 6, line


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Every table that a command prints, by the module that asks for it: heads, rows and title."""
    shown, patch = {}, pytest.MonkeyPatch()
    for found in pkgutil.iter_modules(stenograd.cli.__path__):
        module = importlib.import_module(f"stenograd.cli.{found.name}")
        if found.name != "table" and hasattr(module, "show"):
            shown[found.name] = []
            patch.setattr(module, "show", lambda *a, into=shown[found.name], **more: into.append((*a, more)))
    for key in set(os.environ) - set(clean_env()):
        patch.delenv(key)
    folder, said = tmp_path_factory.mktemp("tables"), []

    def run(*words):
        status, out, err = on_a_rank(0, words)
        assert status in (0, 1), err
        said.append(out)

    train = (
        "train",
        "--batch-size",
        64,
        "--epochs",
        1,
        "--out",
        folder / "run",
        "--method",
        "topk:ratio=0.05",
    )
    run(*train)
    told = json.loads((folder / "run" / "run.json").read_text())
    told["identity"]["world_size"] = 2
    (folder / "run" / "run.json").write_text(json.dumps(told))
    methods = "topk:ratio=0.05,randomblock:ratio=0.25,feedback=false"
    run(*QUICK_PLAN, "--out", folder / "plan", "--method", methods, "--check", folder / "run")
    run("plan", "--plan", folder / "plan" / "plan.json", "--workers", "2,64,1024")
    run("methods", "--size", 1_234_567)
    run("methods", "topk", "--size", 1000)
    run("doctor")
    run("compare", "--batch-size", 64, "--epochs", 1, "--method", methods)
    importlib.import_module("stenograd.cli.link")._show(assumed("1gbit,0.2ms", [0, 0, 1, 1]))
    patch.undo()
    stenograd.shutdown()
    return shown, folder, "".join(said)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_table_of_a_command_breaks_inside_words_or_numbers(tables, width, monkeypatch, capsys):
    shown, *_ = tables
    assert {name for name, found in shown.items() if not found} == set(), "modules whose tables were not seen"
    monkeypatch.setenv("COLUMNS", str(width))
    for found in shown.values():
        for head, rows, *title, more in found:
            table.show(head, rows, *title, **more)
            out = capsys.readouterr().out.split("\n", len(title))[-1]
            out, _, gone = out.partition("left out for want of room: ")
            kept = [name not in gone.strip().split(", ") for name in head]
            whole_words(
                [cell for row in rows for cell, stays in zip(row, kept, strict=False) if stays], out, width
            )


def test_columns_that_can_be_spared_go_before_a_row_becomes_lines(monkeypatch, capsys):
    head, row = ("method", "ms/step", "limit"), ("topk:ratio=0.001", "12.5", "bandwidth")
    monkeypatch.setenv("COLUMNS", "32")
    table.show(head, [row], spare=["limit", "method"])
    assert capsys.readouterr().out.splitlines()[-1] == "left out for want of room: limit"
    table.show(head, [row])
    assert capsys.readouterr().out.splitlines() == [row[0], "  ms/step: 12.5", "  limit: bandwidth"]
    monkeypatch.setenv("COLUMNS", "0")
    table.show(head, [row])
    assert capsys.readouterr().out.splitlines()[0] == row[0]


@pytest.mark.parametrize("asked", ["plan.json", "compare.json"])
def test_a_table_at_80_columns_has_one_line_per_row(asked, tables, monkeypatch, capsys):
    """Twenty methods of eight lines each are no table."""
    monkeypatch.setenv("COLUMNS", "80")
    for head, rows, *title, more in tables[0][asked.removesuffix(".json")]:
        table.show(head, rows, *title, **more)
        out = capsys.readouterr().out
        assert all(any(line.strip(" │").startswith(str(row[0])) for line in out.splitlines()) for row in rows)
        assert f"\n  {head[1]}: " not in out


def test_one_of_a_kind_is_no_plural(tables):
    shown, _, said = tables
    titles = [str(title) for found in shown.values() for *_, title, _more in found]
    few = re.findall(
        r"(?<![\d.,])1 (?:worker|host|epoch|step|method|seed|row)s\b.*", said + "\n".join(titles)
    )
    assert few == []


@pytest.mark.parametrize("width", WIDTHS)
def test_no_help_is_cut(width, monkeypatch, here):
    monkeypatch.setenv("COLUMNS", str(width))
    for name in COMMANDS:
        status, out, _ = here(name, "--help")
        assert (status, "…" in out) == (0, False), out


def test_a_terminal_shows_whole_words_and_how_far_it_is():
    """A real terminal of 60 columns: what `methods` prints there fits it, and the moving line is gone."""
    columns, (main, other) = 60, pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = stenograd_command("methods", "--size", 100)
    env = clean_env(TERM="xterm")
    env.pop("COLUMNS", None)
    with subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=env) as process:
        os.close(other)
        out = bytearray()
        while True:
            try:
                out += os.read(main, 1 << 16)
            except OSError:
                break
    os.close(main)
    assert process.returncode == 0
    moving, text = out.decode().rsplit("\x1b[?25h", 1)  # where the cursor is shown again
    assert re.search(r"simulating the methods.* \d+/\d+", moving)
    assert "simulating" not in text
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).replace("\r\n", "\n")
    assert max(map(len, text.splitlines())) <= columns
    assert {"randomblock", "feedback_decay", "compression"} <= set(re.split(r"[\s│┃]+", text))


def test_lines_stay_lines_in_a_terminal():
    """`methods topk` had no blank lines there."""
    screen = Console(force_terminal=True, width=20, highlight=False, file=io.StringIO())
    table.say("\nsome words that are wrapped\n\nbelow\n", screen)
    assert screen.file.getvalue() == "\nsome words that are\n  wrapped\n\nbelow\n\n"


def test_a_pipe_gets_lines_of_a_sensible_width(here):
    _, out, _ = here("methods", "--size", 100)
    assert max(map(len, out.splitlines())) <= 120


def test_output_that_nobody_reads_ends_it_without_a_traceback():
    reads, writes = os.pipe()
    os.close(reads)
    command = stenograd_command("methods", "topk", "--size", 100, "--json")
    with os.fdopen(writes, "w") as out:
        pipes = {"stdout": out, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command, env=clean_env(), check=False, **pipes)
    assert (done.returncode, without_progress(done.stderr)) == (1, "")


def test_an_output_that_is_closed_fails_nothing():
    """Python has None in its place, which cannot be flushed."""
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *stenograd_command("methods", "topk", "--size", 100)]
    assert subprocess.run(closed, env=clean_env(), check=False, timeout=120).returncode == 0


def test_a_letter_that_the_output_cannot_hold_is_written_by_its_number(command):
    done = command("methods", "natural", "--size", 100, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paper: Horv\\xe1th" in done.stdout


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_json_output_is_strict_and_alone(tables, here, on_two_ranks, monkeypatch):
    """With everything that may stand beside --json; what is not a number becomes null."""
    _, folder, _ = tables
    plan = folder / "plan" / "plan.json"
    asked = {
        "methods": [("--size", 100), ("topk", "--size", 100)],
        "compare": [("--epochs", 1, "--batch-size", 64, "--method", "topk", "--out", folder / "compared")],
        "doctor": [()],
        "plan": [
            ("--plan", plan, "--workers", "2,4"),
            ("--plan", plan, "--check", folder / "run", "--out", folder / "again"),
        ],
    }
    told = {}
    takes_json = {
        name for name, command in COMMANDS.items() if any("--json" in p.opts for p in command.params)
    }
    assert takes_json == {*asked, "link", "demo"}
    monkeypatch.setattr("stenograd.cli.doctor._all_reduce_problem", lambda: None)
    monkeypatch.setenv("COLUMNS", "60")
    for name, ways in asked.items():
        for words in ways:
            status, out, _ = here(name, *words, "--json")
            assert status in (0, 1)
            told[name] = strict(out)
    assert told["plan"]["check"]["seconds and bytes"]["step, mean"]["measured"] > 0
    assert told["compare"] == strict((folder / "compared" / "compare.json").read_text())
    assert told["doctor"]["all-reduce of 2 processes"] == "works"
    assert strict(on_two_ranks("link", "--seconds", 2, "--json"))["measured"]
    found = strict(on_two_ranks("doctor", "--json"))
    assert [one["failed"] for one in found["interfaces"]] == [0]


def test_what_takes_long_says_how_far_it_is(monkeypatch, capsys):
    """Where no terminal shows it, in lines; only on rank 0, and not after the end."""
    monkeypatch.setattr(table, "_LINE_EVERY_S", 0.02)
    before = threading.active_count()
    for rank in (1, 0):
        with table.Display(rank).bar("counting", 3) as tick:
            tick()
            deadline = time.monotonic() + 20
            while rank == 0 and not capsys.readouterr().err.endswith("0 s ...\n"):
                assert time.monotonic() < deadline
                time.sleep(0.02)
    with table.working("waiting"):
        time.sleep(0.1)
    out, err = capsys.readouterr()
    assert out == ""
    assert set(err.splitlines()) <= {"stenograd: counting: 1 of 3, 0 s ...", "stenograd: waiting: 0 s ..."}
    assert "stenograd: waiting: 0 s ..." in err
    assert threading.active_count() == before


SLOW = {  # what a command waits for, by what it says meanwhile
    "rehearsing": "stenograd.cli.plan.plan",
    "before the clock starts": "stenograd.cli.compare._warm_up",
    "all-reduce": "stenograd.cli.doctor._all_reduce_problem",
    "simulating": "stenograd.cli.methods._cost",
}


@pytest.mark.parametrize("what", SLOW)
def test_commands_that_take_seconds_say_so(what, monkeypatch, unlaunched, capsys):
    def slow(*_, **__):
        while f"{what}" not in capsys.readouterr().err:
            time.sleep(0.01)
        raise stenograd.StenogradError("seen")

    words = {
        "rehearsing": QUICK_PLAN,
        "before the clock starts": ("compare", "--epochs", 1),
        "all-reduce": ("doctor",),
        "simulating": ("methods", "--size", 9),
    }[what]
    monkeypatch.setattr(table, "_LINE_EVERY_S", 0.01)
    monkeypatch.setattr(SLOW[what], slow)
    unlaunched.setattr(sys, "argv", ["stenograd", *map(str, words)])
    assert stenograd.cli.main() == 1
    stenograd.shutdown()


def test_options_have_one_spelling():
    flags = {name: {o for p in c.params for o in p.opts if o[:2] == "--"} for name, c in COMMANDS.items()}
    every = set().union(*flags.values())
    assert {flag for flag in every if "method" in flag} == {"--method"}
    assert {flag for flag in every if "out" in flag.split("-") or "folder" in flag} == {"--out"}
    assert {flag for flag in every if "host" in flag} == {"--hosts", "--ranks-per-host", "--cores-per-host"}
    several = {name: p.multiple for name, c in COMMANDS.items() for p in c.params if "--method" in p.opts}
    assert several == {"train": False, "compare": True, "plan": True}


@pytest.mark.parametrize("name", ["compare", "plan"])
def test_the_old_spelling_of_method_is_still_read(name, here):
    commands._spelled.cache_clear()
    status, out, err = here(name, "--workers", 2, "--link", "1gbit", "--methods", "dense,tpk")[:3]
    if name == "compare":
        assert "No such option: --link" in err
        commands._spelled.cache_clear()
        status, out, err = here(name, "--workers", 2, "--methods", "dense,tpk")
    first, second = err.splitlines()
    assert (status, out, first) == (
        2,
        "",
        "stenograd: --methods is deprecated and goes in 0.3: write --method, once for each method",
    )
    assert "unknown method 'tpk'" in second


def test_bash_completes_commands_options_and_methods(tmp_path):
    """Typer's own completion, in a real bash: commands, options, choices and the names of methods."""
    bash, beside = shutil.which("bash"), Path(sys.executable).parent
    if bash is None or not (beside / "stenograd").exists():
        pytest.skip("needs bash, and the command beside this Python")
    script = tmp_path / "complete.sh"
    script.write_text(
        'eval "$(_STENOGRAD_COMPLETE=source_bash stenograd)"\n'
        "try() {\n"
        '  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()\n'
        "  $(complete -p stenograd | sed 's/.*-F \\([^ ]*\\).*/\\1/') stenograd\n"
        '  echo "${COMPREPLY[*]}"\n'
        "}\n"
        "try stenograd em\ntry stenograd plan --acc\ntry stenograd train --task m\n"
        "try stenograd compare --method thr\n"
    )
    env = clean_env(PATH=f"{beside}:{os.environ['PATH']}")
    done = subprocess.run([bash, script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["emulate", "--accuracy", "mnist", "threshold"], done.stderr


def test_what_is_not_finite_becomes_null(capsys, tmp_path):
    table.show_json({"loss": float("nan"), "rates": (1.0, float("inf"))})
    assert strict(capsys.readouterr().out) == {"loss": None, "rates": [1.0, None]}


def test_every_file_that_is_written_is_named(tables, here, tmp_path):
    _, folder, said = tables
    for path in (folder / "plan").iterdir():
        assert f"wrote {path}\n" in said
    out = tmp_path / "run"
    status, said, _ = here(
        "train", "--epochs", 1, "--batch-size", 64, "--out", out, "--trace", tmp_path / "t.json"
    )
    assert status == 0
    assert f"wrote {out} (" in said
    assert f"wrote {tmp_path / 't.json'}\n" in said
    status, _, err = here("plan", "--plan", folder / "plan" / "plan.json", "--out", tmp_path / "p", "--json")
    assert {line for line in err.splitlines() if line.startswith("wrote ")} == {
        f"wrote {path}" for path in (tmp_path / "p").iterdir()
    }


def test_no_file_is_written_in_place():
    """A file that is whole or absent comes from `replacing`; metrics.jsonl alone grows, line by line."""
    package = Path(stenograd.__file__).parent
    sources = [*(package / "cli").glob("*.py"), *(package / "planning").glob("*.py")]
    plain = re.compile(r"write_text\(|write_bytes\(|savefig\(path|open\([^)]*[\"'][wax]")
    found = [line for path in sources for line in path.read_text().splitlines() if plain.search(line)]
    assert [line.strip() for line in found] == [
        'with (self.path / "metrics.jsonl").open("ab", buffering=0) as file:'
    ]


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tables, tmp_path, monkeypatch):
    _, folder, _ = tables
    path = tmp_path / "plan.json"
    found = stenograd.load_plan(folder / "plan" / "plan.json")
    found.save(path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        found.save(path)
    assert [path.read_bytes(), *tmp_path.iterdir()] == [before, path]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_an_option_that_it_does_not_have(name, here):
    """Also before the words that another program gets: `emulate --hosst 2 x.py` ran the program `--hosst`."""
    status, out, err = here(name, "--nonsense", 2, "x.py")
    assert (status, out) == (2, "")
    assert "No such option: --nonsense" in err
    assert f"see stenograd {name} --help" in err


LATE = {
    "an unknown method": (("--method", "dense,tpk"), "unknown method 'tpk'"),
    "no such trial": (("--trial", "nowhere.py:build"), "must name a file that exists"),
    "no such run": (("--check", "nowhere"), "nowhere: holds no finished run"),
    "a run of other workers": (("--check", "RUN"), "must be one of dense, sign"),
    "no tolerance": (("--check", "RUN", "--tolerance", 0), "--tolerance must be above 0"),
    "uneven hosts": (("--ranks-per-host", 3), "--ranks-per-host must divide the 2 workers"),
    "a folder that is a file": (("--out", __file__), "--out must be a folder"),
}


@pytest.mark.parametrize("case", LATE)
def test_what_is_wrong_with_a_plan_is_told_before_it_is_measured(case, here, tables, monkeypatch):
    def never(*_, **__):
        raise AssertionError("it measures")

    monkeypatch.setattr("stenograd.cli.plan.plan", never)
    monkeypatch.setattr("stenograd.cli.plan.measure_link", never)
    words, reason = LATE[case]
    words = [tables[1] / "run" if word == "RUN" else word for word in words]
    methods = () if "--method" in words else ("--method", "sign")
    batch = () if "--trial" in words else ("--batch-size", 64)
    status, out, err = here("plan", *batch, "--workers", 2, "--link", "1mbit", *methods, *words)
    assert (status, out) == (2, "")
    assert reason in err


@pytest.mark.parametrize("out", ["nowhere/link.json", ".", "pipe"])
def test_a_link_is_not_measured_for_a_file_that_cannot_be_written(out, here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    status, _, err = here("link", "--workers", 2, "--out", out)
    assert (status, re.search("--out must be a (regular )?file", err) is not None) == (2, True)


def test_a_measured_link_says_how_many_workers_there_are(here, tmp_path):
    path = tmp_path / "link.json"
    path.write_text(json.dumps(assumed("1mbit", [0, 1, 2]).as_json()))
    status, out, err = here("plan", "--link", path, "--seconds", 1, "--method", "topk", "--batch-size", 64)
    assert (status, err) == (0, "")
    assert "3 workers on 3 hosts" in " ".join(out.split())


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 0, 1, 2]])
def test_a_plan_is_not_for_hosts_with_unlike_numbers_of_workers(here, tmp_path, hosts):
    """Where the first host's number divided that of all, it was for other hosts, and nobody was told."""
    path = tmp_path / "link.json"
    path.write_text(json.dumps(assumed("1mbit", hosts).as_json()))
    status, out, err = here("plan", "--link", path, "--seconds", 1, "--method", "sign", "--batch-size", 64)
    assert (status, out) == (2, "")
    assert "hosts must have as many workers each for a plan, got 2, 1" in err


def _plans_on_a_host(rank, words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stenograd.cli.plan.own_host", lambda: "the other" if rank == 2 else "one")
        patch.delattr("stenograd.cli.plan.measure_link")
        return on_a_rank(rank, words)


@pytest.mark.parametrize("more", [[], ["--link", "1gbit"]])
def test_ranks_on_uneven_hosts_measure_no_link_for_a_plan(pool, more):
    """With a link that is described each was planned as alone on its host."""
    said = pool.run(3, _plans_on_a_host, ["plan", "--method", "sign", "--batch-size", 64, *more])
    assert [status for status, _, _ in said] == [2, 2, 2]
    assert "hosts must have as many workers each for a plan, got 2, 1" in said[0][2]


def test_the_words_of_choices_are_the_library_s():
    assert tuple(map(str, options.Task)) == tasks.names()
    assert tuple(map(str, options.Accuracy)) == ACCURACIES


def test_the_default_task_needs_no_other_package(monkeypatch, here):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, out, err = here("train", "--epochs", 0)
    assert (status, err) == (0, "")
    assert out.startswith(f"{options.Options().task}: ")
