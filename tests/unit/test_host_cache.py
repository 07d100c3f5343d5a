"""Compiled kernels on disk: a change of any source is noticed, and one process of a host compiles."""

import errno
import fcntl
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from damage import DAMAGES, Kernel

import stenograd
from stenograd.kernels import host_cache

EDITED = """
import sys
from pathlib import Path
import torch
from stenograd.kernels import backend
from stenograd.kernels import values
assert values.pack_values(torch.tensor([4.0]), "int8")[1] == 4
helper = Path(backend.__file__).parent / "cpu" / "jit.py"
before = helper.read_text()
helper.write_text(before.replace("np.uint32(0x7FFFFFFF)", "np.uint32(0x3FFFFFFF)"))
assert helper.read_text() != before
for name in [name for name in sys.modules if name.startswith("stenograd.kernels")]:
    del sys.modules[name]  # as a new process
from stenograd.kernels import values
sys.exit(bool(values.pack_values(torch.tensor([4.0]), "int8")[1] == 4))
"""


def test_a_change_of_an_inlined_helper_takes_effect(tmp_path, monkeypatch):
    """`_to_int8` of cpu/values.py comes to `bits_of` of cpu/jit.py, whose mask then takes a bit of 4."""
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


@pytest.fixture(scope="module")
def kept_kernel(tmp_path_factory):
    return Kernel(tmp_path_factory.mktemp("kernel"))


@pytest.mark.parametrize("how", sorted(DAMAGES))
def test_a_damaged_kernel_is_compiled_anew(kept_kernel, how):
    for seed in range(2):
        kept_kernel(random.Random(f"{how}/{seed}"), how)


def test_a_full_disk_costs_only_the_file(monkeypatch, tmp_path):
    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert not list(Kernel(tmp_path).place.glob("*.kernel*"))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="file modes of POSIX")
def test_kernels_that_others_could_have_written_are_not_loaded(tmp_path):
    """Wherever the folder comes from; the pickle in it would run, though its SHA-256 is right."""
    place = host_cache.folder(str(tmp_path), ("1",))
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o755)
    host_cache.folder.cache_clear()
    assert host_cache.folder(str(tmp_path), ("1",)) == place
    assert place.stat().st_mode & 0o777 == 0o700
    for spoil in (_opened, _linked, _given_away):
        host_cache.folder.cache_clear()
        if spoil(place):
            with pytest.warns(RuntimeWarning, match="not to be trusted.*NUMBA_CACHE_DIR"):
                assert host_cache.folder(str(tmp_path), ("1",)) is None
    file = place / "planted.kernel"
    sealed = host_cache._Sealed(place, Named())
    sealed._path = lambda key: file
    raw = pickle.dumps(Trap())
    for mode, runs in ((0o666, False), (0o600, True)):
        file.write_bytes(host_cache.hashlib.sha256(raw).digest() + raw)
        file.chmod(mode)
        sealed._read(file)
        assert Trap.sprung == runs


class Named:
    _index_name, _source_stamp = "kernel", 0


class Trap:
    sprung = False

    def __reduce__(self):
        return setattr, (Trap, "sprung", True)


def _opened(place):
    place.chmod(0o777)
    return True


def _linked(place):
    place.rename(place.with_name("elsewhere"))
    place.symlink_to(place.with_name("elsewhere"))
    return True


def _given_away(place):
    place.unlink()
    place.mkdir(0o700)
    if os.getuid() != 0:
        return False
    os.chown(place, 65534, 65534)
    return True


def test_a_stopped_compiler_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(host_cache, "_LOCK_S", 0.2)
    with (tmp_path / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with host_cache.compiling("nothing"):
            host_cache._turn.take(tmp_path)


RANK = """
import torch
from numba.core import event
from stenograd.kernels import host_cache
from stenograd.catalog.method import method
from stenograd.exchange.kernel_loading import load_kernels
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


def test_the_lock_of_a_process_that_dies_is_free(tmp_path, capfd, monkeypatch):
    """It compiles for ever; meanwhile another says that it waits, and takes the lock once it was killed."""
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
    monkeypatch.setattr(host_cache, "_PATIENCE_S", 0.3)
    threading.Timer(1.5, holder.kill).start()
    with host_cache.compiling("nothing"):
        host_cache._turn.take(tmp_path)
        said = capfd.readouterr().err
        assert said.startswith("stenograd: waiting for a process that is compiling kernels for nothing ...\n")
        holder.communicate()
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


def test_a_user_without_a_name_and_a_home_has_kernels(tmp_path, monkeypatch):
    """As in a container that runs under a number: HOME is not set, and nothing knows the user."""

    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert host_cache.folder(str(tmp_path), ("no home",)).is_dir()


def test_a_disk_that_is_read_only_or_full_still_has_what_was_kept(tmp_path, monkeypatch, recwarn):
    """As in an image where a training has run once. Without kernels a folder is no use."""

    def full(**where):
        raise OSError(errno.EROFS, "Read-only file system")

    place = host_cache.folder(str(tmp_path), ("kept",))
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    host_cache.folder.cache_clear()
    assert host_cache.folder(str(tmp_path), ("kept",)) is None
    (place / "some.kernel").touch()
    host_cache.folder.cache_clear()
    assert host_cache.folder(str(tmp_path), ("kept",)) == place
    assert not recwarn.list
