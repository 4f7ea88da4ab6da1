"""Run transformers' own model tests on the zoo: `make conformance`.

The source distribution of the installed transformers is fetched from the package index into a cache folder and never
into this repository. It holds the common test mixins but not three modules that they import; empty stand-ins take their
place. Our models, Mamba2 and Qwen3-Next run in one pytest call; then every skip is listed with its reason, and a test
that is skipped for ours but runs for both of those is an error.

Usage: python tests/conformance/run.py [--cache DIR] [pytest options]
"""

from __future__ import annotations

import argparse
import collections
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
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
EXEMPT = {"test_bc_cache_name_forward": "hands the model a stock cache, which a fwzoo model refuses by contract"}
NEEDS_ATTENTION_MAPS = ("attention", "attn", "sdpa", "flash", "eager", "flex")


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
    report = args.cache / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options, target]
    report.unlink(missing_ok=True)
    subprocess.run(command, cwd=folder, check=False)
    return summarise(report)


def summarise(report: Path) -> int:
    """Print the table of skips; 1 if a test of ours failed, or is skipped for ours and runs for both peers."""
    problems: list[str] = []
    skipped: dict[str, str] = {}
    ran: dict[str, set[str]] = collections.defaultdict(set)
    ours_skipped: dict[str, set[str]] = collections.defaultdict(set)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        owner, test = case.attrib["classname"].rsplit(".", 1)[-1], case.attrib["name"]
        peer = owner.startswith(PEERS)
        if not peer and (case.find("failure") is not None or case.find("error") is not None):
            problems.append(f"{owner}.{test}: failed")
        skip = case.find("skipped")
        if skip is None:
            ran[test].add(owner)
        elif not peer:
            skipped[test] = skip.attrib.get("message", "").split("\n")[0][:90]
            ours_skipped[test].add(owner)
    table = Table("test", "models", "reason", title="skipped for ours")
    for test, reason in sorted(skipped.items()):
        table.add_row(test, str(len(ours_skipped[test])), reason)
        peers = {owner for owner in ran[test] if owner.startswith(PEERS)}
        if test not in EXEMPT and len(peers) == len(PEERS) and not any(word in test for word in NEEDS_ATTENTION_MAPS):
            problems.append(f"{test}: skipped for {sorted(ours_skipped[test])}, runs for both peers")
    console = Console(width=160)
    console.print(table)
    for test, why in EXEMPT.items():
        console.print(f"exempt: {test}, which {why}")
    console.print(f"{sum(len(owners) for owners in ran.values())} tests ran, {len(problems)} problems")
    for line in problems:
        console.print(line)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
