"""What a scenario found on its ranks, for all tests of a file that look at it."""

import pytest
from processes import run_ranks

from stenograd.testing.pool import start_context

IMPORTED = ("lightning.pytorch", "lightning.fabric", "accelerate", "transformers.trainer")


@pytest.fixture(scope="session", autouse=True)
def _imported_once():
    """Ranks are forks of a process with the frameworks imported, which takes each of them ten seconds."""
    start_context(*IMPORTED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("frameworks")


@pytest.fixture(scope="module")
def ran(request, folder):
    """Run `SCRIPT SCENARIO ARGUMENTS FOLDER` on ranks, once for a file of tests, and return what they found.

    SCRIPT is the file's. A scenario that has failed fails every test that looks at it, and no other.
    """
    found = {}

    def run(scenario, *arguments, world_size=2, **options):
        key = (scenario, *arguments, world_size)
        if key not in found:
            try:
                words = [scenario, *arguments, folder]
                found[key] = run_ranks(request.module.SCRIPT, world_size, args=words, **options)
            except AssertionError as error:
                found[key] = error
        if isinstance(found[key], AssertionError):
            raise found[key]
        return found[key]

    return run
