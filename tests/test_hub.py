"""A round trip over the Hub's protocol: push with fwzoo, read in a process that has only torch and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, ByT5Tokenizer

import fwzoo
from bundle_reader import read
from compare import error
from hub_server import Hub, serve
from rows import ROWS
from test_export import read_elsewhere

BY_NAME = {row.name: row for row in ROWS}
COMMAND = BY_NAME["every-falcon"]  # pushed by `fwzoo push`
METHOD = BY_NAME["falcon1"]  # pushed by `push_to_hub`


PREPARE = """
import os, sys
from fwzoo import cli

def command(*words):
    sys.argv = ["fwzoo", *words]
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code
"""


def process(
    hub: Hub, home: Path, script: str, *arguments: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as a user of the server; in it, `command(...)` runs the command line."""
    return subprocess.run(
        [sys.executable, "-c", PREPARE + script, *map(str, arguments)],
        env={**os.environ, **hub.environment(home), **variables},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def pushed(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models on the server, pushed from another process; the folder of the first."""
    base = tmp_path_factory.mktemp("hub")
    for row, folder in ((COMMAND, base / "command"), (METHOD, base / "method")):
        row.model().save_pretrained(folder)
        ByT5Tokenizer().save_pretrained(folder)
    script = """
import fwzoo
import torch
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM
by_command, by_method = sys.argv[1:]
assert not command("push", by_command, "reader/by-command", "--license", "mit")
model = AutoModelForCausalLM.from_pretrained(by_method)
model.push_to_hub("by-method", private=True, tags=["tried"])
repository = HfApi().create_repo("reader/described").repo_id
HfApi().upload_file(path_or_fileobj=b"Words of my own.", path_in_repo="README.md", repo_id=repository)
model.push_to_hub(repository)
open(by_method + "/README.md", "w").write("My words.")
model.save_pretrained(by_method, push_to_hub=True, repo_id="reader/saved-and-pushed")
memory = fwzoo.FastWeightCache(model.config)
model(torch.arange(2, 40)[None], past_key_values=memory, use_cache=True)
memory.push_to_hub("a-memory", source="Numbers.", base_model="reader/by-method")
"""
    done = process(hub, base / "writer", script, base / "command", base / "method")
    assert done.returncode == 0 and "pushed reader/by-command" in done.stdout, done.stderr
    read_elsewhere(
        base / "results", str(base / "again"), ["reader/by-command", "reader/by-method"],
        **hub.environment(base / "reader"),
    )  # fmt: skip
    return base


@pytest.mark.parametrize("name", ["command", "method"])
def test_what_was_pushed_reads_the_same_without_fwzoo(name: str, pushed: Path) -> None:
    found = load_file(pushed / "results" / f"by-{name}.safetensors")
    for key, expected in read(AutoModelForCausalLM.from_pretrained(pushed / name).eval()).items():
        assert torch.equal(found[key], expected), key


def test_the_repository_holds_code_card_and_tokenizer(hub: Hub, pushed: Path) -> None:
    command, method = hub.repositories["reader/by-command"], hub.repositories["reader/by-method"]
    assert method.private and not command.private
    files = command.at("main")[1]  # type: ignore[index]
    assert {"config.json", "model.safetensors", "tokenizer_config.json", "modeling_fwzoo.py"} <= set(files)
    card = files["README.md"].decode()
    assert card.startswith("---\n") and 'from_pretrained("reader/by-command", trust_remote_code=True)' in card
    for line in ("library_name: transformers", "license: mit", "pipeline_tag: text-generation", "- fwzoo", "- falcon3"):
        assert line in card.splitlines()
    files_of_method = method.at("main")[1]  # type: ignore[index]
    assert "modeling_fwzoo.py" in files_of_method
    card = files_of_method["README.md"].decode()
    assert 'from_pretrained("reader/by-method", trust_remote_code=True)' in card and "# by-method" in card
    assert {"- fwzoo", "- falcon1", "- tried", "pipeline_tag: text-generation"} <= set(card.splitlines())
    for name, words in (("reader/described", "Words of my own."), ("reader/saved-and-pushed", "My words.")):
        described = hub.repositories[name].at("main")[1]  # type: ignore[index]
        assert "model.safetensors" in described and described["README.md"].decode().strip().endswith(words)
    assert (pushed / "method" / "README.md").read_text() == "My words."
    assert not any(name.endswith((".bin", ".pkl", ".pt")) for name in files)


def test_a_snapshot_is_the_folder_that_was_pushed(
    hub: Hub, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    HfApi(hub.endpoint).snapshot_download("reader/by-command", local_dir=tmp_path, cache_dir=tmp_path / "cache")
    for name, data in hub.repositories["reader/by-command"].at("main")[1].items():  # type: ignore[index]
        assert (tmp_path / name).read_bytes() == data, name
    same = ("model.safetensors", "config.json", "modeling_fwzoo.py")
    assert all((tmp_path / name).read_bytes() == (pushed / "command" / name).read_bytes() for name in same)


def test_a_memory_travels_over_the_hub(hub: Hub, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = hub.repositories["reader/a-memory"].at("main")[1]  # type: ignore[index]
    assert {"memory.safetensors", "memory.json", "README.md"} <= set(files)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    model = METHOD.model()
    memory = fwzoo.FastWeightCache.from_pretrained(tmp_path, model)
    expected = model(torch.arange(2, 45)[None]).logits[:, 38:]
    assert error(model(torch.arange(40, 45)[None], past_key_values=memory).logits, expected) < 1e-5
    assert 'from_pretrained("reader/a-memory", model)' in files["README.md"].decode()


def test_commands_take_hub_names_and_an_edited_file_is_detected(hub: Hub, pushed: Path, tmp_path: Path) -> None:
    repository = hub.repositories["reader/by-command"]
    good, files = repository.at("main")  # type: ignore[misc]
    name = "fwzoo_registry.py"
    repository.commit({**files, name: files[name] + b"\n# edited\n"})
    script = """
from fwzoo.conversion import verify_bundle
good, out = sys.argv[1:]
verify_bundle("reader/by-command", revision=good)
assert not command("export", "reader/by-command", out)
import fwzoo
model = fwzoo.Falcon1ForCausalLM.from_pretrained("reader/by-method")
assert fwzoo.FastWeightCache.from_pretrained("reader/a-memory", model).get_seq_length() == 38
verify_bundle("reader/by-command")
"""
    done = process(hub, tmp_path / "home", script, good, tmp_path / "out")
    repository.commit(files)
    assert done.returncode == 1
    assert f"ValueError: {name} of 'reader/by-command' was edited" in done.stderr
    assert (tmp_path / "out" / name).read_bytes() == files[name]  # exported again from the installed package
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["auto_map"]["AutoConfig"] == "modeling_fwzoo.Falcon3Config"


def test_a_push_that_cannot_be_is_one_sentence(hub: Hub, pushed: Path, tmp_path: Path) -> None:
    script = """
folder = sys.argv[1]
codes = [command("push", folder, "no good name")]
os.environ["HF_TOKEN"] = "hf_wrong"
codes += [command("push", folder, "reader/other")]
sys.exit(codes != [2, 2])
"""
    done = process(hub, tmp_path, script, pushed / "command")
    assert done.returncode == 0, done.stderr
    closed = process(hub, tmp_path, 'sys.exit(command("push", sys.argv[1], "reader/other"))', pushed / "command",
                     HF_ENDPOINT="http://127.0.0.1:9")  # fmt: skip
    assert closed.returncode == 2, closed.stderr
    said = (done.stderr + closed.stderr).strip().splitlines()
    assert len(said) == 3, said
    assert "REPOSITORY: 'no good name' is not a Hub name" in said[0]
    assert "REPOSITORY: 'reader/other' cannot be written" in said[1] and "401" in said[1]
    assert "REPOSITORY: 'reader/other' cannot be written" in said[2] and "refused" in said[2]
    assert "reader/other" not in hub.repositories


UPCYCLE = """
from transformers import LlamaConfig, LlamaForCausalLM
target = sys.argv[1]
sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(**sizes)).push_to_hub("reader/llama")
assert not command("upcycle", "reader/llama", target, "--layout", "lact", "--window", "8")
import fwzoo
from transformers import AutoModelForCausalLM
fwzoo.conversion.freeze_copied(AutoModelForCausalLM.from_pretrained(target))
"""


def test_a_model_of_the_hub_is_upcycled(hub: Hub, tmp_path: Path) -> None:
    done = process(hub, tmp_path / "home", UPCYCLE, tmp_path / "hybrid")
    assert done.returncode == 0, done.stderr
    assert "base_model: reader/llama" in (tmp_path / "hybrid" / "README.md").read_text()
    assert "copied 15, initialised 24, joined 2, zero 4" in done.stdout
