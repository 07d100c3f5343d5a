"""Legs on other versions of Python and PyTorch, wherever their wheels can be had: `nox -s tests`.

`.ci/run` stays on the versions of `constraints.txt`. With the uv backend, `UV_TORCH_BACKEND=cpu` takes the
builds of PyTorch for the CPU; with pip, give their index by `PIP_EXTRA_INDEX_URL`.
"""

import nox

nox.options.default_venv_backend = "uv|virtualenv"

# (Python, torch, NumPy): the lowest that are supported, the newest, and some between; not their product.
LEGS = [
    ("3.10", "2.6.0", "1.26.4"),
    ("3.11", "2.9.1", None),
    ("3.12", "2.13.0", None),
    ("3.13", "2.14.1", None),
    ("3.14", "2.15.0", None),
]


@nox.session
@nox.parametrize("python,torch,numpy", [nox.param(*leg, id=f"{leg[0]}-{leg[1]}") for leg in LEGS])
def tests(session: nox.Session, torch: str, numpy: str | None) -> None:
    """Run all tests, or those given after `--`."""
    pins = [f"torch=={torch}", *([f"numpy=={numpy}"] if numpy else [])]
    session.install("-e", ".[dev]", *pins)
    session.run("pytest", "-q", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(python="3.11")
def reference_kernels(session: nox.Session) -> None:
    """Run the tests of compressors without numba's kernels."""
    session.install("-e", ".[dev]", "-c", "constraints.txt")
    env = {"OMP_NUM_THREADS": "1", "STENOGRAD_KERNELS": "reference"}
    session.run("pytest", "-q", "tests/unit", "tests/conformance", *session.posargs, env=env)


@nox.session(python="3.11")
@nox.parametrize("framework", ["lightning", "accelerate", "transformers", "ray"])
def frameworks(session: nox.Session, framework: str) -> None:
    """Run the tests inside one framework, at its newest version."""
    session.install("-e", f".[dev,{framework}]", "-c", "constraints.txt")
    session.run("pytest", "-q", "-m", "frameworks", "tests/frameworks", env={"OMP_NUM_THREADS": "1"})
