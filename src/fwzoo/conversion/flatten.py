"""A package's modules as flat sibling files, the only form of remote code that transformers loads.

A flat file may say `from .sibling import name` and nothing else about its own package. So every import within the
package is followed to the module that defines the name (not one that passes it on), and where a module itself was
imported, as in `from .. import registry`, the names used of it are. Only the text of imports and of those uses changes.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PRESENT = frozenset({"torch", "transformers", "numpy", "safetensors", "huggingface_hub", "tokenizers"})
"""Packages that are there wherever transformers runs; others are optional."""


class NotFlattenable(ValueError):
    """A module says something that has no flat form."""


class Package:
    """The source of an installed package.

    Args:
        name: its import name. folder: where its modules lie. prefix: beginning of every flat file name.
    """

    def __init__(self, name: str, folder: Path, prefix: str) -> None:
        self.name, self.folder, self.prefix = name, folder, prefix
        self._modules: dict[str, Module] = {}

    def flat_name(self, module: str) -> str:
        """The flat module's name: `fwzoo.kernels.falcon.chunk` becomes `fwzoo_kernels_falcon_chunk`."""
        return self.prefix + module.removeprefix(f"{self.name}.").replace(".", "_")

    def path(self, module: str) -> Path | None:
        """The file of a module, or None when there is none."""
        stem = self.folder.joinpath(*module.split(".")[1:])
        return next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None)

    def module(self, name: str) -> Module:
        """The parsed module."""
        if name not in self._modules:
            path = self.path(name)
            if path is None:
                raise NotFlattenable(f"{name} is not a module of {self.name}")
            self._modules[name] = Module(self, name, path)
        return self._modules[name]

    def resolve(self, module: str, name: str) -> tuple[str, str | None]:
        """Where `from module import name` leads: the defining module and the name, or a module and None."""
        origin = self.module(module).passed_on.get(name)
        if origin is not None and origin != (module, name):
            return self.resolve(*origin)
        submodule = f"{module}.{name}"
        if self.module(module).is_package and name not in self.module(module).defined and self.path(submodule):
            return submodule, None
        if name not in self.module(module).defined:
            raise NotFlattenable(f"{name} is not defined in {module}")
        return module, name

    def flatten(self, roots: Iterable[str]) -> dict[str, str]:
        """Flat file name to text, for the modules `roots` and all that they import."""
        files: dict[str, str] = {}
        waiting = list(roots)
        while waiting:
            name = waiting.pop()
            file = f"{self.flat_name(name)}.py"
            if file not in files:
                files[file], needed = self.module(name).flat()
                waiting += needed
        return dict(sorted(files.items()))


class Module:
    """One parsed module.

    Attributes:
        passed_on: names that it imports from the package, with the module and name they come from.
        defined: names bound at its top level otherwise.
    """

    def __init__(self, package: Package, name: str, path: Path) -> None:
        self.package, self.name = package, name
        self.is_package = path.name == "__init__.py"
        self.source = path.read_bytes()
        self.tree = ast.parse(self.source)
        self.passed_on: dict[str, tuple[str, str]] = {}
        self.defined: set[str] = set()
        for node in _top_level(self.tree.body):
            if isinstance(node, ast.ImportFrom) and (origin := self._origin(node)):
                self.passed_on.update({alias.asname or alias.name: (origin, alias.name) for alias in node.names})
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self.defined.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.defined.add(node.name)
            else:
                names = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
                self.defined.update(n.id for n in names)

    def _origin(self, node: ast.ImportFrom) -> str | None:
        """The package's module that `node` imports from, or None for another package's."""
        if node.level == 0:
            root = (node.module or "").split(".")[0]
            return node.module if root == self.package.name else None
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def flat(self) -> tuple[str, list[str]]:
        """The text of the flat file, and the modules that it imports."""
        edits: list[tuple[int, int, str]] = []
        needed: list[str] = []
        taken = {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name)}
        for node, guarded, only_types in _imports(self.tree):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
                if self.package.name in roots:
                    raise NotFlattenable(f"{self.name}, line {node.lineno}: imports {self.package.name} as a whole")
                if not guarded and not roots <= PRESENT | sys.stdlib_module_names:
                    edits.append((*self._span(node), self._guard(node)))
                continue
            origin = self._origin(node)
            if origin is None:
                root = (node.module or "").split(".")[0]
                if not guarded and root not in PRESENT | sys.stdlib_module_names:
                    edits.append((*self._span(node), self._guard(node)))
            elif only_types:
                edits.append((*self._span(node), "pass"))
            else:
                names: dict[str, list[str]] = {}
                for alias in node.names:
                    found, uses = self._rewrite(origin, alias, taken)
                    for module, name in found:
                        names.setdefault(module, []).append(name)
                    edits += uses
                needed += names
                lines = [
                    f"from .{self.package.flat_name(module)} import {', '.join(dict.fromkeys(imported))}"
                    for module, imported in names.items()
                ]
                edits.append((*self._span(node), ("\n" + " " * node.col_offset).join(lines) or "pass"))
        text = self.source
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new.encode() + text[end:]
        return text.decode(), needed

    def _rewrite(
        self, origin: str, alias: ast.alias, taken: set[str]
    ) -> tuple[list[tuple[str, str]], list[tuple[int, int, str]]]:
        """(module, name to import from it) for one imported name, and the edits of its uses where it was a module."""
        if alias.name == "*":
            raise NotFlattenable(f"{self.name}: imports everything from {origin}")
        module, name = self.package.resolve(origin, alias.name)
        bound = alias.asname or alias.name
        if name is not None:
            return [(module, name if name == bound else f"{name} as {bound}")], []
        found, edits = [], []
        inner = {id(n.value) for n in ast.walk(self.tree) if isinstance(n, ast.Attribute)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.arg) and node.arg == bound:
                raise NotFlattenable(f"{self.name}, line {node.lineno}: {bound} is a module and an argument")
            if isinstance(node, ast.Name) and node.id == bound and id(node) not in inner:
                raise NotFlattenable(f"{self.name}, line {node.lineno}: the module {bound} is used as a value")
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == bound):
                continue
            if not isinstance(node.ctx, ast.Load):
                raise NotFlattenable(f"{self.name}, line {node.lineno}: {bound}.{node.attr} is assigned")
            definer, attribute = self.package.resolve(module, node.attr)
            if attribute is None:
                raise NotFlattenable(f"{self.name}, line {node.lineno}: {bound}.{node.attr} is a module")
            own = f"{bound}_{attribute}"
            while own in taken:
                own += "_"
            found.append((definer, f"{attribute} as {own}"))
            edits.append((*self._span(node), own))
        return found, edits

    def _guard(self, node: ast.stmt) -> str:
        """The statement in a `try` block: transformers asks for every package that is imported outside of one."""
        start, end = self._span(node)
        indent = " " * node.col_offset
        statement = self.source[start:end].decode()
        return f"try:\n{indent}    {statement}\n{indent}except ImportError:\n{indent}    raise"

    def _span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        """Byte offsets of a node in the source."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        starts = self._line_starts
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    @functools.cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self.source.split(b"\n"):
            starts.append(starts[-1] + len(line) + 1)
        return starts


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those within `if` and `try` too."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try)):
            handlers = node.handlers if isinstance(node, ast.Try) else []
            blocks = [node.body, node.orelse, *(h.body for h in handlers), getattr(node, "finalbody", [])]
            yield from _top_level(child for block in blocks for child in block)
        else:
            yield node


def _imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """Every import statement, whether it is in a `try` block, and whether it is for type checkers only."""
    waiting: list[tuple[ast.AST, bool, bool]] = [(tree, False, False)]
    while waiting:
        node, guarded, only_types = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, guarded, only_types
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += [(child, guarded, True) for child in node.body]
            waiting += [(child, guarded, only_types) for child in node.orelse]
            continue
        waiting += [(child, guarded or isinstance(node, ast.Try), only_types) for child in ast.iter_child_nodes(node)]
