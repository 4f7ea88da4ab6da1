"""Import every module of a package, so that what it registers is known."""

from __future__ import annotations

import importlib
import pkgutil


def import_all(package_name: str) -> None:
    """Import the modules of `package_name`, in alphabetical order."""
    package = importlib.import_module(package_name)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package_name}.{module.name}")
