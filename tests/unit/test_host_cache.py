"""Compiled kernels on disk: a change of any source is noticed, and one process of a host compiles."""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stenograd
from stenograd.kernels import host_cache

EDITED = """
import sys
from pathlib import Path
import torch
from stenograd.kernels import backend
from stenograd.kernels import dispatch
assert dispatch.pack_values(torch.tensor([4.0]), "int8")[1] == 4
helper = Path(backend.__file__).parent / "cpu" / "jit.py"
before = helper.read_text()
helper.write_text(before.replace("np.uint32(0x7FFFFFFF)", "np.uint32(0x3FFFFFFF)"))
assert helper.read_text() != before
for name in [name for name in sys.modules if name.startswith("stenograd.kernels")]:
    del sys.modules[name]  # as a new process
from stenograd.kernels import dispatch
sys.exit(bool(dispatch.pack_values(torch.tensor([4.0]), "int8")[1] == 4))
"""


def test_a_change_of_an_inlined_helper_takes_effect(tmp_path, monkeypatch):
    """`_to_int8` is in cpu/values.py and calls `bits_of` of cpu/jit.py, whose mask then takes a bit of 4."""
    shutil.copytree(
        Path(stenograd.__file__).parent, tmp_path / "stenograd", ignore=shutil.ignore_patterns("__pycache__")
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    done = subprocess.run(
        [sys.executable, "-B", "-c", EDITED], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "stenograd" / "kernels" / "__pycache__").glob("stenograd-*"))) == 2


RANK = """
import torch
from numba.core import event
from stenograd.kernels import host_cache
from stenograd.catalog.method import method
from stenograd.comm.kernel_loading import load_kernels
host_cache._PATIENCE_S = 0
compiled = event.RecordingListener()
event.register("numba:compile", compiled)
load_kernels(method("dense"), 4, [torch.zeros(1)], checks=True)
print(len(compiled.buffer))
"""


def test_one_process_of_a_host_compiles_and_says_so(tmp_path, monkeypatch):
    """Two ranks meet an empty folder at once. The one that waited, or came later, loads from disk."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    ranks = [_start() for _ in range(2)]
    loading, compiling = sorted(rank.communicate(timeout=240) for rank in ranks)
    assert int(loading[0]) == 0
    assert int(compiling[0]) > 0
    assert compiling[1] == "stenograd: compiling kernels for dense (first use on this machine) ...\n"


def _start():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", RANK], **pipes)


def test_the_lock_of_a_process_that_dies_is_free(tmp_path):
    """It compiles for ever; after it was killed, another takes the lock at once."""
    code = f"""
import sys, time
from pathlib import Path
from stenograd.kernels import host_cache
host_cache._turn.take(Path({str(tmp_path)!r}))
print("mine", flush=True)
time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "mine\n"
    with (tmp_path / "lock").open("wb") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder.kill()
    holder.communicate()
    with host_cache.compiling("nothing"):
        host_cache._turn.take(tmp_path)
        with (tmp_path / "lock").open("wb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "lock").open("wb") as lock:  # given back with the block's end
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_nothing_is_kept_where_nothing_can_be_written(tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert host_cache.folder(str(file), ("1",)) is None
    assert host_cache.folder(str(tmp_path), ("1",)).is_dir()
    assert host_cache.folder(str(tmp_path), ("1",)) != host_cache.folder(str(tmp_path), ("2",))
