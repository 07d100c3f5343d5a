"""Join the ranks: through a token passed to `multiprocessing` children, or the launcher's variables."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from stenograd.arguments import whole
from stenograd.errors import ConfigError, LaunchError, bad_value
from stenograd.launch.detect import STORE_VARIABLE
from stenograd.launch.local_workers import environment
from stenograd.launch.process_group import World, init, refuse_open, shutdown
from stenograd.launch.process_group import join as join_ranks

__all__ = ["NcclIdHolder", "join"]

_AFTER_CHILDREN = -10  # at exit multiprocessing joins the children before finalizers of priority below 0


class NcclIdHolder:
    """A token for the rendezvous of a parent's children; make one per launch, in the parent.

    It names a private file on this host, so no port is needed and nobody else can join. It can be pickled,
    and works with gloo and NCCL alike. The file is removed when the process that made the token exits.

    Example:
        >>> import pickle
        >>> token = NcclIdHolder()
        >>> pickle.loads(pickle.dumps(token)).path == token.path
        True
    """

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="stenograd-singa-")
        self.path = str(Path(folder) / "store")
        # Not atexit: `Finalize` does nothing in a forked child, which would take the folder from the others.
        Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=_AFTER_CHILDREN)

    def claim(self, rank: int) -> None:
        """Claim a rank for this process.

        Raises:
            LaunchError: another process has claimed it, or the process that made the token has exited.
        """
        mark = Path(f"{self.path}-rank-{rank}")
        try:
            # It may exist: a second DistOpt of this process claims the same rank again. A link is there with
            # its content or not at all, so nobody reads a mark that is not written yet.
            with suppress(FileExistsError):  # claimed: read below by whom
                mark.symlink_to(str(os.getpid()))
            owner = os.readlink(mark)
        except OSError as cause:
            raise LaunchError(
                f"the token's folder {mark.parent} is gone: keep the parent alive until its children end"
            ) from cause
        if owner != str(os.getpid()):
            raise LaunchError(
                f"rank {rank} of this token is taken by process {owner}: give each process its own "
                "local_rank, and make a new NcclIdHolder() for each launch"
            )


def join(
    token: Any,
    local_rank: int | None,
    world_size: int | None,
    timeout_s: float,
    *,
    per_node: int | None = None,
) -> World:
    """Join the process group, and return which rank this process is.

    Arguments are `DistOpt`'s: token is its nccl_id, and per_node the number of ranks on this host, or None.
    Without a token local_rank and world_size are None or the launcher's values.

    Raises:
        ConfigError: a rank or size is missing, out of range, or contradicts the launcher.
        LaunchError: ranks did not come, or two processes claim the same one.
    """
    if token is None:
        world = join_ranks(timeout_s=timeout_s)
    elif isinstance(token, NcclIdHolder):
        world = _join_with_token(token, *_checked(local_rank, world_size), timeout_s)
    else:
        raise TypeError(f"nccl_id must be an NcclIdHolder or None, got {token!r}: make one in the parent")
    _check_equal("local_rank", local_rank, world.local_rank, world)
    _check_equal("world_size", world_size, world.world_size, world)
    _check_equal("gpu_per_node", per_node, world.local_world_size, world)
    return world


def _join_with_token(token: NcclIdHolder, rank: int, size: int, timeout_s: float) -> World:
    refuse_open()
    # First: of two processes with one rank the second is told so here, instead of waiting for the group.
    token.claim(rank)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with environment({STORE_VARIABLE: token.path} | {key: str(value) for key, value in place.items()}):
        world = init(timeout_s=timeout_s)
    Finalize(None, shutdown, exitpriority=0)  # children of multiprocessing run no atexit functions
    return world


def _checked(local_rank: int | None, world_size: int | None) -> tuple[int, int]:
    size = whole("world_size", world_size, "with a token, give the number of processes that get it")
    rank = whole("local_rank", local_rank, f"with a token, give each its own in [0, {size})", least=0)
    if rank >= size:
        rule = f"must be in [0, {size}) with a token of {size} processes"
        raise bad_value("local_rank", rule, rank, "give each process its own, from 0 on")
    return rank, size


def _check_equal(name: str, given: int | None, found: int, world: World) -> None:
    if given is not None and given != found:
        rule = f"must be {found}, as {world.launcher} started rank {world.rank} of {world.world_size}"
        raise bad_value(name, rule, given, "leave it out, or pass an NcclIdHolder", ConfigError)
