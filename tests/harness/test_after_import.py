"""Registering with a library when a program imports it."""

import importlib
import sys

from sparsebench.harness.models.after_import import after_import


def test_a_function_is_called_after_the_import_and_then_at_once(tmp_path, monkeypatch) -> None:
    (tmp_path / "imported_later.py").write_text("LOADED = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_later", raising=False)
    before, calls = [*sys.meta_path], []
    for which in ("first", "second"):
        after_import("imported_later", lambda which=which: calls.append(which))
    assert not calls
    assert importlib.import_module("imported_later").LOADED
    assert sorted(calls) == ["first", "second"]
    assert sys.meta_path == before
    after_import("imported_later", lambda: calls.append("third"))
    assert calls[2:] == ["third"]
