"""A saved folder loads where fwzoo is not installed, and gives the same numbers to the last bit."""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import fwzoo
from bundle_reader import read
from compare import error
from fwzoo.conversion import bundle_sources, verify_bundle
from fwzoo.conversion.card import render_card
from fwzoo.conversion.flatten import NotFlattenable, Package
from rows import ROWS, Row

rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def read_elsewhere(results: Path, again: str, names: list[str], **variables: str) -> None:
    """Run `bundle_reader.py` in a process of its own, with its own cache of remote code."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": f"{results}-code", "HF_HUB_OFFLINE": "1", **variables}
    command = [sys.executable, Path(__file__).with_name("bundle_reader.py"), results, again, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every row saved, read in a process without fwzoo, saved there and read once more in another such process."""
    base = tmp_path_factory.mktemp("bundles")
    for row in ROWS:
        row.model().save_pretrained(base / "saved" / row.name)
    read_elsewhere(base / "results", str(base / "again"), [str(base / "saved" / row.name) for row in ROWS])
    read_elsewhere(base / "results-again", "-", [str(base / "again" / row.name) for row in ROWS])
    return base


@rows
@pytest.mark.parametrize(("folder", "results"), [("saved", "results"), ("again", "results-again")])
def test_equal_to_the_last_bit_without_fwzoo(row: Row, folder: str, results: str, folders: Path) -> None:
    """Compared with what the package loads from the same file: the last bit can depend on how weights lie in memory."""
    found = load_file(folders / results / f"{row.name}.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folders / folder / row.name).eval()
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in row.model().state_dict().items())
    for name, expected in read(model).items():
        assert torch.equal(found[name], expected), name


def test_saving_again_keeps_code_version_and_digests(folders: Path) -> None:
    for row in ROWS:
        first, second = folders / "saved" / row.name, folders / "again" / row.name
        assert {p.name for p in first.glob("*.py")} == {p.name for p in second.glob("*.py")}
        one, two = (json.loads((folder / "config.json").read_text()) for folder in (first, second))
        assert one["auto_map"] == two["auto_map"] and one["fwzoo_code"] == two["fwzoo_code"]
        assert one["fwzoo_code"]["version"] == fwzoo.__version__
        verify_bundle(second)


def test_saving_writes_a_card_and_keeps_one_that_is_there(tmp_path: Path) -> None:
    model, before = ROWS[0].model().train(), torch.get_rng_state()
    model.save_pretrained(tmp_path / "my-model")
    readme = tmp_path / "my-model" / "README.md"
    assert readme.read_text() == render_card(model, "my-model")
    assert torch.equal(torch.get_rng_state(), before)
    readme.write_text("Mine.")
    model.save_pretrained(readme.parent)
    assert readme.read_text() == "Mine."


def test_a_wrong_weight_shows(folders: Path) -> None:
    """The comparison above can fail."""
    model = ROWS[0].model()
    with torch.no_grad():
        model.model.layers[0].mixer.beta_proj.weight[0, 0] += 1e-3
    found = load_file(folders / "results" / f"{ROWS[0].name}.safetensors")
    assert not torch.equal(read(model)["logits"], found["logits"])


@rows
def test_only_sibling_imports_and_only_what_is_reached(row: Row) -> None:
    files = bundle_sources(row.config())
    reached = {name.removesuffix(".py") for name in files}
    for text in files.values():
        for line in text.splitlines():
            words = line.split()
            if len(words) > 3 and words[0] == "from" and words[2] == "import" and words[1].startswith("."):
                assert words[1][1:] in reached, line
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] == "fwzoo" for alias in node.names), ast.unparse(node)
            elif isinstance(node, ast.ImportFrom):
                absolute = node.level == 0 and (node.module or "").split(".")[0] != "fwzoo"
                assert absolute or (node.level == 1 and node.module in reached), ast.unparse(node)
    others = {part.__module__ for name in fwzoo.registry.mixer_options() for part in [fwzoo.registry.mixer(name)]}
    needed = {fwzoo.registry.mixer(name).__module__ for name in row.config().mixers}
    for module in others - needed:
        assert Package("fwzoo", Path(), "fwzoo_").flat_name(module) not in reached


def test_an_edited_or_missing_code_file_is_detected(tmp_path: Path) -> None:
    ROWS[0].model().save_pretrained(tmp_path)
    verify_bundle(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, verify=True)
    edited = tmp_path / "fwzoo_kernels_tiling.py"
    edited.write_text(edited.read_text() + "\nprint('hello')\n")
    AutoModelForCausalLM.from_pretrained(tmp_path)
    for check in (verify_bundle, lambda name: AutoModelForCausalLM.from_pretrained(name, verify=True)):
        with pytest.raises(ValueError, match=r"fwzoo_kernels_tiling\.py of .* was edited"):
            check(tmp_path)
    # whoever edits can also write the new digest: the installed version knows what the file should be
    config = json.loads((tmp_path / "config.json").read_text())
    config["fwzoo_code"]["sha256"][edited.name] = hashlib.sha256(edited.read_bytes()).hexdigest()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"fwzoo_kernels_tiling\.py of .* differs"):
        verify_bundle(tmp_path)
    edited.unlink()
    with pytest.raises(ValueError, match=r"fwzoo_kernels_tiling\.py of .* is missing"):
        verify_bundle(tmp_path)
    config.pop("fwzoo_code")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="records no digests"):
        verify_bundle(tmp_path)


def test_caches_of_the_package_and_of_a_bundle_go_with_models_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = ROWS[2].model()
    ours.save_pretrained(tmp_path / "some_bundle")
    (tmp_path / "some_bundle" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    code = importlib.import_module("some_bundle.modeling_fwzoo")
    assert code.__fwzoo_version__ == fwzoo.__version__ and code.FastWeightCache is not fwzoo.FastWeightCache
    theirs = code.Falcon3ForCausalLM.from_pretrained(tmp_path / "some_bundle").eval()
    tokens = torch.randint(2, 384, (2, 30))
    with torch.no_grad():
        expected = ours(tokens).logits[:, 20:]
        for reader, writer in ((ours, theirs), (theirs, ours)):
            for cache in (fwzoo.FastWeightCache(ours.config), code.FastWeightCache(theirs.config)):
                reader(tokens[:, :20], past_key_values=cache, use_cache=True)
                assert error(writer(tokens[:, 20:], past_key_values=cache, use_cache=True).logits, expected) < 1e-5
    with pytest.raises(TypeError, match="DynamicCache"):
        theirs(tokens, past_key_values=DynamicCache())


def test_saving_over_another_model_leaves_no_stale_code(tmp_path: Path) -> None:
    ROWS[0].model().save_pretrained(tmp_path)
    stale = tmp_path / "fwzoo_kernels_older.py"
    shutil.copy(tmp_path / "fwzoo_registry.py", stale)
    (tmp_path / "fwzoo_notes.py").write_text("# a user's own file\n")
    ROWS[1].model().save_pretrained(tmp_path)
    assert not stale.exists() and (tmp_path / "fwzoo_notes.py").exists()


def test_a_configuration_of_foreign_parts_is_saved_without_code(tmp_path: Path) -> None:
    class OwnConfig(fwzoo.Falcon1Config):
        pass

    config = OwnConfig.tiny()
    with pytest.raises(ValueError, match="OwnConfig is defined in"):
        bundle_sources(config)
    config.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}


def test_fields_of_a_newer_version_are_named_in_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("fwzoo.configuration.base.logger.warning", said.append)
    for row in ROWS:
        row.model().save_pretrained(tmp_path)
        AutoModelForCausalLM.from_pretrained(tmp_path).config.save_pretrained(tmp_path)
        copied = AutoConfig.from_pretrained(tmp_path)
        type(copied)(**copied.to_dict())
        type(copied).from_dict(copied.to_diff_dict())
    assert not said
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "third_memory": 3, "a_gate": True}))
    assert AutoConfig.from_pretrained(tmp_path).third_memory == 3
    assert len(said) == 1 and "a_gate, third_memory" in said[0] and "newer version" in said[0]


@pytest.mark.parametrize("size", [0, 7, 3000])
def test_damaged_weights_are_named(size: int, tmp_path: Path) -> None:
    ROWS[0].model().save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(OSError, match=r"the weights of .* are damaged or incomplete") as complaint:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(complaint.value)


# --- the rewriting itself, on a package made for it ---

SOURCES = {
    "zoo/__init__.py": "from . import tools\nfrom .shapes import round_one as disc\n",
    "zoo/tools.py": '"""π and a module name: tools.scale"""\nfactor = 2\ndef scale(x):\n    return factor * x\n',
    "zoo/shapes/__init__.py": "from .round import circle as round_one\nfrom .round import *\n",
    "zoo/shapes/round.py": "from .. import tools\ndef circle(x):\n    return 'π' and tools.scale(tools.scale(x))\n",
    "zoo/use.py": (
        "import json, os\nimport absent_package\nfrom typing import TYPE_CHECKING\nfrom . import disc\n"
        "if TYPE_CHECKING:\n    from .tools import factor\n"
        "try:\n    import another_absent\nexcept ImportError:\n    pass\n"
        "def late(x):\n    from . import tools as t, disc as d\n    return 'π', t.scale(x) + d(x)\n"
    ),
    "zoo/value.py": "from . import tools\nprint(tools)\n",
    "zoo/assigns.py": "from . import tools\ntools.factor = 3\n",
    "zoo/star.py": "from .tools import *\n",
    "zoo/whole.py": "import zoo\n",
    "zoo/missing.py": "from .tools import nothing\n",
}


@pytest.fixture
def zoo(tmp_path: Path) -> Package:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return Package("zoo", tmp_path / "zoo", "z_")


def test_imports_lead_to_where_names_are_defined(zoo: Package) -> None:
    files = zoo.flatten(["zoo.use"])
    assert set(files) == {"z_use.py", "z_tools.py", "z_shapes_round.py"}
    assert files["z_use.py"].splitlines() == [
        "import json, os",
        "try:",
        "    import absent_package",
        "except ImportError:",
        "    raise",
        "from typing import TYPE_CHECKING",
        "from .z_shapes_round import circle as disc",
        "if TYPE_CHECKING:",
        "    pass",
        "try:",
        "    import another_absent",
        "except ImportError:",
        "    pass",
        "def late(x):",
        "    from .z_tools import scale as t_scale",
        "    from .z_shapes_round import circle as d",
        "    return 'π', t_scale(x) + d(x)",
    ]
    assert "return 'π' and tools_scale(tools_scale(x))" in files["z_shapes_round.py"]
    assert files["z_tools.py"] == SOURCES["zoo/tools.py"]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("value", "line 2: the module tools is used as a value"),
        ("assigns", r"line 2: tools\.factor is assigned"),
        ("star", "imports everything"),
        ("whole", "imports zoo as a whole"),
        ("missing", "nothing is not defined in zoo.tools"),
        ("nowhere", "not a module"),
    ],
)
def test_what_has_no_flat_form_is_refused(zoo: Package, module: str, message: str) -> None:
    with pytest.raises(NotFlattenable, match=message):
        zoo.flatten([f"zoo.{module}"])
