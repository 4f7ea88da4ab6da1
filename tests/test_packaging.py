"""The package as it is installed: metadata, the wheel, the Makefile, and an import with nothing optional there."""

import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import fwzoo

ROOT = Path(__file__).parent.parent


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_version_is_written_once():
    assert fwzoo.__version__ == metadata.version("fwzoo")


def test_extras():
    extras = metadata.metadata("fwzoo").get_all("Provides-Extra")
    assert set(extras) == {"train", "plot", "track", "eval", "triton", "fla", "serve", "dev", "all"}


def test_no_optional_package_is_required_at_run_time():
    required = [line for line in metadata.requires("fwzoo") if "extra ==" not in line]
    names = {re.match(r"[\w-]+", line).group() for line in required}
    assert names == {"torch", "transformers", "safetensors", "huggingface-hub", "filelock", "typer", "rich", "numpy"}


def test_import_and_train_step_without_optional_packages():
    run_python(
        "import sys\n"
        "optional = ('triton', 'fla', 'accelerate', 'datasets', 'peft', 'matplotlib', 'einops')\n"
        "sys.modules.update(dict.fromkeys(optional))\n"
        "import torch, fwzoo\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "config = type(AutoConfig.for_model('falcon3a')).tiny()\n"
        "ids = torch.arange(20)[None]\n"
        "AutoModelForCausalLM.from_config(config)(input_ids=ids, labels=ids).loss.backward()\n"
    )


def test_import_registers_every_architecture():
    names = run_python(
        "import fwzoo\n"
        "from transformers import AutoConfig\n"
        "from fwzoo.registry import architectures\n"
        "print(*[AutoConfig.for_model(name).model_type for name in architectures()])"
    ).split()
    assert {"falcon1", "falcon2", "falcon3", "falcon1a", "falcon2a", "falcon3a"} <= set(names)


@pytest.mark.slow
def test_wheel_is_pure_python_and_complete(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    (wheel,) = tmp_path.iterdir()
    assert wheel.name == f"fwzoo-{fwzoo.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/fwzoo").rglob("*.py")}
    assert sources <= names
    assert "fwzoo/py.typed" in names
    assert not [name for name in names if name.endswith((".so", ".pyd", ".c", ".cu"))]


def test_makefile_has_the_targets():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {
        "setup",
        "quickstart",
        "test",
        "lint",
        "typecheck",
        "test-gpu",
        "bench",
        "bundles",
        "conformance",
        "clean",
    } <= targets


def test_continuous_integration_runs_the_makefile():
    script = (ROOT / ".ci/run").read_text()
    assert "set -euo pipefail" in script
    assert all(f"make {target}" in script for target in ("lint", "typecheck", "test", "test-oldest"))


def test_constraints_pin_exact_versions():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", pin) for pin in pins)
