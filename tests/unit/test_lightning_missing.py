"""What a program is told that imports `stenograd.lightning` without Lightning."""

import importlib.util
import sys

import pytest


def test_the_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("stenograd.lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install stenograd\[lightning\]"):
        importlib.import_module("stenograd.lightning")
