"""No file of the package is a copy of another."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def lines(text: str) -> Counter[str]:
    """Lines of code, one a statement however it is wrapped, and how often each stands there.

    Imports, docstrings and bare declarations of fields (`q: Tensor`) do not count.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [x for x in body if not is_declaration(x)]
    written = (line.strip() for line in ast.unparse(tree).splitlines())
    return Counter(line for line in written if any(c.isalnum() for c in line))


def is_declaration(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    return isinstance(node, (ast.Import, ast.ImportFrom))


def shared(a: Counter[str], b: Counter[str]) -> float:
    """Share of the shorter file's lines that the other has too."""
    return (a & b).total() / max(1, min(a.total(), b.total()))


def test_no_two_files_share_more_than_thirty_percent() -> None:
    files = {path.relative_to(SOURCE): lines(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    assert len(files) > 30
    copies = {
        f"{a} and {b}": round(share, 2)
        for a, b in itertools.combinations(sorted(files), 2)
        if (share := shared(files[a], files[b])) > 0.3
    }
    assert not copies, copies


def test_the_measure_finds_a_copy() -> None:
    text = (SOURCE / "fwzoo/modeling/mixers/falcon.py").read_text(encoding="utf-8")
    copy = "# another file\n" + text.replace("FalconMixer", "CopiedMixer").replace("hidden: Tensor", "x: Tensor")
    other = (SOURCE / "fwzoo/modeling/cache.py").read_text(encoding="utf-8")
    assert shared(lines(text), lines(copy)) > 0.8
    assert shared(lines(text), lines(other)) < 0.2
