"""What pytest leaves out: modules for frameworks that are not installed, which cannot be imported."""

from importlib.util import find_spec

_MODULES = {"lightning": "lightning", "accelerate": "accelerate", "transformers": "transformers.py"}
collect_ignore = [f"src/stenograd/{path}" for name, path in _MODULES.items() if find_spec(name) is None]
