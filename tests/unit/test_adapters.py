"""Adapters of frameworks that are not installed."""

import importlib.util
import sys

import pytest


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_without_the_framework_the_error_names_the_extra(name, monkeypatch):
    for module in [module for module in sys.modules if module.startswith(f"stenograd.{name}")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)  # makes `import name` fail, also where it is installed
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"pip install stenograd\[{name}\]"):
        importlib.import_module(f"stenograd.{name}")
