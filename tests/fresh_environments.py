"""Load the bundle of every architecture in new environments that hold only torch and transformers: `make bundles`.

For every version of transformers given, and the installed one: a virtual environment is made, `bundle_reader.py` reads
the bundles there, saves them again and reads those, and what it makes of fixed tokens must be what the package makes of
them, to the last bit. Then a code file is edited, and the reader must refuse it.

Usage: python tests/fresh_environments.py VERSION ...
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bundle_reader import read
from rows import ROWS

READER = Path(__file__).with_name("bundle_reader.py")
BUNDLES = {row.name: row for row in ROWS if row.name in (row.architecture, "everything")}


def environment(folder: Path, version: str) -> Path:
    """A new virtual environment with this torch, that transformers and what they need; its Python."""
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    torch_version = torch.__version__.partition("+")[0]
    packages = [f"torch=={torch_version}", f"transformers=={version}"]
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
    subprocess.run(command, check=True)
    return python


def read_in(python: Path, results: Path, again: Path | str, names: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run the reader with another Python, offline, with its own cache of remote code."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    variables |= {"HF_MODULES_CACHE": f"{results}-code", "HF_HUB_OFFLINE": "1"}
    command = [python, READER, results, again, *names]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def check(python: Path, base: Path) -> dict[str, str]:
    """What is wrong with each bundle, "" where nothing is, and with an edited one under the name "edited code"."""
    saved, again, results = base / "saved", base / "again", base / "results"
    wrong = {}
    for folder, keep, found in ((saved, again, results), (again, "-", base / "results-again")):
        done = read_in(python, found, keep, [folder / name for name in BUNDLES])
        if done.returncode:
            return {"the reader": done.stderr.strip().splitlines()[-1]}
    for name in BUNDLES:
        expected = read(AutoModelForCausalLM.from_pretrained(saved / name).eval())
        differing = [
            f"{key} in {folder.name}"
            for folder in (results, base / "results-again")
            for key, value in load_file(folder / f"{name}.safetensors").items()
            if not torch.equal(value, expected[key])
        ]
        wrong[name] = ", ".join(differing)
    edited = again / next(iter(BUNDLES))
    with (edited / "fwzoo_modeling_blocks.py").open("a") as file:
        file.write("# edited\n")
    refusal = read_in(python, base / "results-edited", "-", [edited]).stderr
    wrong["edited code"] = "" if "fwzoo_modeling_blocks.py" in refusal and "was edited" in refusal else "not detected"
    return wrong


def main(versions: list[str]) -> int:
    transformers.utils.logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True, warn_only=True)  # as the reader does
    table = Table("transformers", "bundle", "logits, greedy text, continuation; saved again")
    failed = False
    for version in dict.fromkeys([*versions, transformers.__version__]):
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder)
            for name, row in BUNDLES.items():
                row.model().save_pretrained(base / "saved" / name)
            print(f"making an environment with transformers {version}")
            for name, problem in check(environment(base / "environment", version), base).items():
                table.add_row(
                    version, name, problem or ("detected" if name == "edited code" else "equal to the last bit")
                )
                failed = failed or bool(problem)
    Console().print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
