"""Programs of this package as processes of their own."""

import sys
from pathlib import Path


def own_process(module: str, *arguments: str) -> list[str]:
    """A command line that runs a module of this package in this interpreter, as isolated as bin/rigctl does."""
    root = str(Path(__file__).resolve().parent.parent)
    code = f"import runpy, sys; sys.path.insert(0, {root!r}); runpy.run_module({module!r}, run_name='__main__')"
    return [sys.executable, "-I", "-c", code, *arguments]
