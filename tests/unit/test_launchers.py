"""Environment tables of the launchers, and the meeting points that follow from them."""

import os
import tempfile

import pytest

from stenograd.errors import LaunchError
from stenograd.launch.detect import World, detect
from stenograd.launch.rendezvous import Meeting, expand_hosts, meeting_point

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "2"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_NNODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),2",
    "SLURM_STEP_NODELIST": "n[09-11]",
}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "6", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("env", "world"),
    [
        ({}, World(0, 1, 0, 1, "alone")),
        ({"WORLD_SIZE": "1"}, World(0, 1, 0, 1, "alone")),
        (TORCHRUN, World(3, 4, 1, 2, "torchrun")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, World(1, 2, 1, 2, "torchrun")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}, World(1, 2, 0, 1, "torchrun")),
        ({"RANK": "1", "WORLD_SIZE": "2", "STENOGRAD_STORE": "/x"}, World(1, 2, 1, 2, "stenograd")),
        (OPENMPI, World(1, 4, 1, 2, "openmpi")),
        (HYDRA, World(2, 4, 0, 2, "mpich")),
        (PALS, World(2, 4, 0, 2, "mpich")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, World(1, 2, 1, 2, "mpich")),
        (SLURM, World(4, 6, 1, 2, "slurm")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "5", "SLURM_NNODES": "1"}, World(4, 5, 1, 5, "slurm")),
        (SLURM | {"PMI_RANK": "4", "PMI_SIZE": "6"}, World(4, 6, 1, 2, "slurm")),
        (SLURM | HYDRA, World(2, 4, 0, 2, "mpich")),
        (SLURM | OPENMPI, World(1, 4, 1, 2, "openmpi")),
        (SLURM | {"WORLD_SIZE": "6"}, World(4, 6, 1, 2, "slurm")),
        (SLURM | OPENMPI | TORCHRUN, World(3, 4, 1, 2, "torchrun")),
        (BATCH, World(0, 1, 0, 1, "alone")),
        (BATCH | {"SLURM_STEP_ID": "4294967291"}, World(0, 1, 0, 1, "alone")),
    ],
)
def test_detect_finds_the_launcher(env, world):
    assert detect(env) == world


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, ("WORLD_SIZE", "must be set", "None")),
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE", "needs RANK", "'2'", "torchrun")),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, ("WORLD_SIZE", "needs RANK", "trainer.fit()")),
        (TORCHRUN | {"RANK": "4"}, ("RANK", "below the world size 4", "got 4")),
        (TORCHRUN | {"RANK": "-1"}, ("RANK", "at least 0", "got -1")),
        (TORCHRUN | {"RANK": ""}, ("RANK", "integer", "''")),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ("LOCAL_RANK", "local world size 2", "got 2")),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, ("LOCAL_RANK", "may not exceed the world size 4")),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "two"}, ("OMPI_COMM_WORLD_SIZE", "integer", "'two'")),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ("OMPI_COMM_WORLD_SIZE", "must be set")),
        (HYDRA | {"PMI_RANK": "9"}, ("PMI_RANK", "below the world size 4", "got 9")),
        (SLURM | {"SLURM_PROCID": "6"}, ("SLURM_PROCID", "below the world size 6")),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2*3"}, ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1", "'2*3'")),
        (SLURM | {"SLURM_NODEID": "3"}, ("SLURM_NODEID", "3 hosts", "got 3")),
    ],
)
def test_contradictions_name_variable_rule_value(env, words):
    with pytest.raises(LaunchError) as caught:
        detect(env)
    for word in ("environment variable", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("a[1-3,5],b07", ["a1", "a2", "a3", "a5", "b07"]),
        ("n[008-010]", ["n008", "n009", "n010"]),
        ("r[1-2]c[0-1]-ib", ["r1c0-ib", "r1c1-ib", "r2c0-ib", "r2c1-ib"]),
        ("x.example.org,y[9-10].lan", ["x.example.org", "y9.lan", "y10.lan"]),
    ],
)
def test_host_lists_expand(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a[1-3", "a]", "a,,b", "a[1-]", "a[]", "a b", "a[x]"])
def test_malformed_host_lists_are_refused(text):
    with pytest.raises(LaunchError, match="host list must look like"):
        expand_hosts(text)


def meet(env):
    return meeting_point(detect(env), env)


def test_meeting_point_follows_the_environment():
    master = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert meet({}) == meet(master) == Meeting("alone")
    assert meet(TORCHRUN | {"STENOGRAD_STORE": "/s"} | master) == Meeting("file", path="/s")
    assert meet(TORCHRUN | master) == meet(OPENMPI | master) == Meeting("tcp", host="node1", port=29500)
    assert meet(SLURM) == Meeting("tcp", host="n09", port=10_000 + 77 * 31 + 2)
    assert meet(HYDRA) == meet(OPENMPI) == Meeting("mpi")


@pytest.mark.parametrize(
    ("env", "word"),
    [
        (TORCHRUN, "MASTER_ADDR"),
        (TORCHRUN | {"MASTER_ADDR": "a"}, "MASTER_PORT"),
        (TORCHRUN | {"MASTER_PORT": "1"}, "MASTER_ADDR"),
        (TORCHRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "1 to 65535, got '70000'"),
        (SLURM | {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID"),
    ],
)
def test_a_missing_address_says_what_to_export(env, word):
    with pytest.raises(LaunchError) as caught:
        meet(env)
    assert word in str(caught.value)
    assert "export MASTER_ADDR" in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="file modes of POSIX")
def test_ranks_of_one_host_meet_in_a_private_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one_host = SLURM | {"SLURM_NNODES": "1", "SLURM_RESTART_COUNT": "1"}
    meeting = meet(one_host)
    assert meeting.owned
    assert meeting.path == str(tmp_path / f"stenograd-{os.getuid()}" / "slurm-77-2-1")
    assert meet(one_host | {"SLURM_PROCID": "0"}) == meeting
    assert meet(one_host | {"SLURM_STEP_ID": "3"}) != meeting
    directory = tmp_path / f"stenograd-{os.getuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    assert meet(one_host) == meeting
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)
    with pytest.raises(LaunchError, match=r"others can write there \(mode 0777\).*TMPDIR"):
        meet(one_host)
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="must be a directory that belongs to you"):
        meet(one_host)
