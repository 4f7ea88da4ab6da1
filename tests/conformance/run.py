"""Run transformers' own model tests on the zoo: `make conformance`.

The source distribution of the installed transformers is fetched from the package index into a cache folder and never
into this repository. It holds the common test mixins but not three modules that they import; empty stand-ins take their
place. Our models, Mamba2 and Qwen3-Next run in one pytest call; then every skip is listed with its reason, and a test
that is skipped for ours but runs for both of those is an error.

Usage: python tests/conformance/run.py [--cache DIR] [--append PAGE] [pytest options]
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

import transformers
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
STAND_INS = {
    "tests/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "tests/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "tests/utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}
PEERS = ("Mamba2", "Qwen3Next")
CLASS_NAME = re.compile(r"<class 'fwzoo\.\w+'>|\b(Falcon\w*|Lact|Fwpkm|Fwmlp)Model( class)?\b")
PARAMETERS = re.compile(r"_\d+(_\w+)?$")  # of a parameterised test


def source(cache: Path) -> Path:
    """Folder of the unpacked source distribution of the installed transformers."""
    name = f"transformers-{transformers.__version__}"
    folder = cache / name
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"fetching {name} (source distribution) into {cache}")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary", "transformers", f"transformers=={transformers.__version__}", "-d", str(cache)]
        subprocess.run(command, check=True)
        with tarfile.open(cache / f"{name}.tar.gz") as archive:
            archive.extractall(cache, filter="data")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fwzoo")
    parser.add_argument("--append", type=Path, help="a Markdown page to append the tables to")
    args, options = parser.parse_known_args()
    folder = source(args.cache)
    target = folder / "tests" / "models" / "fwzoo" / "test_zoo.py"
    files = {**STAND_INS, str(target.relative_to(folder)): (HERE / "zoo.py").read_text(encoding="utf-8")}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for package in path.parent.relative_to(folder).parents[:-1]:
            (folder / package / "__init__.py").touch()
        (path.parent / "__init__.py").touch()
    report = args.cache / f"{folder.name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options, target]
    report.unlink(missing_ok=True)
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]  # for the rows of our own tests
    subprocess.run(command, cwd=folder, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    return summarise(report, args.append)


@dataclass
class Results:
    """What a report says: test to model to reason of a skip, and model to names of tests that passed and failed."""

    skipped: dict[str, dict[str, str]] = field(default_factory=lambda: collections.defaultdict(dict))
    passed: dict[str, set[str]] = field(default_factory=lambda: collections.defaultdict(set))
    failed: dict[str, set[str]] = field(default_factory=lambda: collections.defaultdict(set))

    @property
    def models(self) -> list[str]:
        """Ours first, then the peers."""
        return sorted({*self.passed, *self.failed}, key=lambda model: (model in PEERS, model))

    def problems(self) -> list[str]:
        """Tests of ours that failed, and tests that are skipped for ours and run for both peers."""
        found = [
            f"{model}: {test} failed" for model in self.failed if model not in PEERS for test in self.failed[model]
        ]
        for test, reasons in self.skipped.items():
            ours = sorted(reasons.keys() - set(PEERS))
            if ours and all(test in self.passed[peer] | self.failed[peer] for peer in PEERS):
                found.append(f"{test} is skipped for {', '.join(ours)}, but runs for {' and '.join(PEERS)}")
        return found

    def skips(self) -> list[tuple[str, str, str, str]]:
        """Rows of the table of skips of ours: test, our models, peers that are skipped too, reason.

        Tests that differ only in their parameters are one row.
        """
        rows: dict[tuple[str, str, str, str], int] = {}
        everyone = len(set(self.models) - set(PEERS))
        for test, reasons in sorted(self.skipped.items()):
            ours = [model for model in self.models if model in reasons and model not in PEERS]
            if ours:
                reason = CLASS_NAME.sub("the model", reasons[ours[0]])
                owners = "all" if len(ours) == everyone else ", ".join(ours)
                row = PARAMETERS.sub("_*", test), owners, ", ".join(peer for peer in PEERS if peer in reasons), reason
                rows[row] = rows.get(row, 0) + 1
        return list(rows)


def read(report: Path) -> Results:
    results = Results()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        model = case.attrib["classname"].rsplit(".", 1)[-1].removesuffix("Test")
        test, skip = case.attrib["name"], case.find("skipped")
        if skip is not None:
            results.skipped[test][model] = " ".join(skip.attrib.get("message", "").split())
        elif case.find("failure") is not None or case.find("error") is not None:
            results.failed[model].add(test)
        else:
            results.passed[model].add(test)
    return results


def tables(results: Results) -> list[tuple[str, list[str], list[tuple[str, ...]]]]:
    """Title, headings and rows of what is printed."""
    counts: list[tuple[str, ...]] = []
    for model in results.models:
        skipped = sum(model in reasons for reasons in results.skipped.values())
        counts.append((model, str(len(results.passed[model])), str(len(results.failed[model])), str(skipped)))
    version = f"transformers {transformers.__version__}"
    return [
        (f"Results with {version}", ["model", "passed", "failed", "skipped"], counts),
        (f"Skipped for ours with {version}", ["test", "models", "also skipped for", "reason"], [*results.skips()]),
    ]


def summarise(report: Path, page: Path | None = None) -> int:
    """Print the tables, and append them to a Markdown page; 1 if there is a problem."""
    results = read(report)
    console = Console(width=200)
    for title, headings, rows in tables(results):
        table = Table(*headings, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    problems = results.problems()
    console.print(f"{sum(map(len, results.passed.values()))} tests passed, {len(problems)} problems")
    for line in problems:
        console.print(line)
    if page is not None:
        with page.open("a", encoding="utf-8") as file:
            for title, headings, rows in tables(results):
                file.write(f"\n## {title}\n\n")
                for row in (headings, ["---"] * len(headings), *rows):
                    file.write(f"| {' | '.join(row)} |\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
