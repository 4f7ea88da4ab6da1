"""The command line as a user meets it: what it prints, what it leaves, and what it says to bad input."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

import fwzoo
from compare import error
from fwzoo import cli
from fwzoo.commands.generate import Conversation
from fwzoo.commands.memorize import Meter
from fwzoo.registry import architectures
from fwzoo.training.data import encode

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
TINY = ["--hidden-size", "32", "--layers", "2", "--heads", "2", "--sequence-length", "64", "--batch-size", "2"]


@pytest.fixture
def fwzoo_command(monkeypatch, capsys):
    """Runs a command line in this process; returns its exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fwzoo", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err

    monkeypatch.setenv("COLUMNS", "200")
    return run


def process(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "fwzoo", *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        **options,
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer()
    config = type(AutoConfig.for_model("falcon3a")).tiny(eos_token_id=tokenizer.eos_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def other_model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    AutoModelForCausalLM.from_config(type(AutoConfig.for_model("falcon1")).tiny()).save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


# --- Looking around --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [[], ["--help"], ["train", "--help"], ["generate", "--help"], ["quickstart", "--help"]]
)
def test_help(fwzoo_command, command):
    code, out, _ = fwzoo_command(*command)
    assert code == 0 and "Usage" in out
    if len(command) < 2:
        assert all(name in out for name in ("quickstart", "train", "generate", "info", "archs"))


def test_the_installed_script_runs():
    script = os.path.join(os.path.dirname(sys.executable), "fwzoo")
    assert "quickstart" in subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout


def test_version(fwzoo_command):
    assert fwzoo_command("--version")[:2] == (0, f"fwzoo {fwzoo.__version__}\n")


def test_archs_lists_all(fwzoo_command):
    code, out, _ = fwzoo_command("archs")
    assert code == 0
    for name, config_class in architectures().items():
        assert re.search(rf"\b{name}\b.*\b{config_class.__name__}\b", out)


@pytest.mark.parametrize("name", ["falcon1", "falcon3a"])
def test_info_of_an_architecture(fwzoo_command, name):
    code, out, _ = fwzoo_command("info", name)
    assert code == 0
    assert f"{name} with its default sizes" in out and "bytes of memory a sequence" in out


def test_info_of_a_folder(fwzoo_command, model_folder):
    code, out, _ = fwzoo_command("info", model_folder)
    assert code == 0
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert f"{model.num_parameters():,} parameters in all" in out
    assert f"{sum(model.state_bytes()):,} bytes of memory a sequence" in out
    assert re.search(r"\b(chunk|triton|reference)\b", out)


def test_info_shows_the_layout(fwzoo_command, tmp_path):
    config = fwzoo.FwzooConfig.from_layout(
        "falcon3a,swa+none@1+fa@3", num_hidden_layers=4, hidden_size=32, num_attention_heads=2, vocab_size=384
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hybrid")
    code, out, _ = fwzoo_command("info", str(tmp_path / "hybrid"))
    assert code == 0
    assert f"layout: {config.layout}\n" in out and config.layout.startswith("falcon3a")
    assert "kernel level sdpa: softmax attention is torch's own kernel" in out


# --- Training --------------------------------------------------------------------------------------------------------


def test_train_save_resume_generate(fwzoo_command, tmp_path, text_file):
    out = tmp_path / "run"
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": TEXT[i:]}) + "\n" for i in range(20)))
    command = ["train", lines, text_file, "--out", out, "--arch", "falcon1a", "--eval-fraction", "0.1", *TINY]
    code, said, err = fwzoo_command(*command, "--steps", 4, "--save-every", 2)
    assert code == 0, err
    assert "held-out" in said and (out / "loss.png").exists() and (out / "checkpoint-4").is_dir()
    assert AutoConfig.from_pretrained(out).model_type == "falcon1a"

    code, said, err = fwzoo_command("train", "--resume", "--out", out, "--steps", 6)
    assert code == 0, err
    assert [step for step, _ in json.loads((out / "loss.json").read_text())["train"]] == [1, 2, 3, 4, 5, 6]

    code, said, err = fwzoo_command("generate", out, "--prompt", "The ", "--max-new-tokens", 5, "--greedy")
    assert code == 0, err


def test_train_by_epochs_with_a_config_file(fwzoo_command, tmp_path, text_file):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(type(AutoConfig.for_model("falcon2")).tiny().to_dict()))
    out = tmp_path / "run"
    code, _, err = fwzoo_command(
        "train", text_file, "--out", out, "--config", config, "--epochs", 2, "--eval-text", text_file, *TINY[-4:]
    )
    assert code == 0, err
    rows = -(-(len(TEXT) + 1) // 64)
    assert json.loads((out / "loss.json").read_text())["eval"][-1][0] == round(2 * rows / 2)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A byte-pair tokenizer trained on a sentence, with an end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    return folder


def test_train_with_a_tokenizer_on_a_dataset(fwzoo_command, tmp_path, tokenizer_folder):
    """A dataset folder stands for a name on the Hub; losses are in nats a token, and the tokenizer is saved along."""
    data, out = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps({"body": TEXT[i:]}) + "\n" for i in range(30)))
    code, said, err = fwzoo_command(
        "train", "--dataset", data, "--text-column", "body", "--tokenizer", tokenizer_folder, "--out", out,
        "--eval-fraction", "0.1", "--eval-rows", "3", "--steps", "2", *TINY,
    )  # fmt: skip
    assert code == 0, err
    assert re.search(r"held-out [\d.]+ nats per token, perplexity [\d.]+", said)
    assert json.loads((out / "loss.json").read_text())["unit"] == "nats_per_token"
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(tokenizer_folder))
    code, said, err = fwzoo_command("generate", out, "--prompt", "The quick", "--greedy", "--max-new-tokens", 3)
    assert code == 0, err


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, text_file):
    out = tmp_path / "run"
    running = subprocess.Popen(
        [sys.executable, "-m", "fwzoo", "train", text_file, "--out", out, "--steps", "100000", *TINY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (out / "training_options.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2)
    running.send_signal(signal.SIGINT)
    said, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "Traceback" not in err
    assert f"go on with: fwzoo train --resume --out {out}" in said
    (checkpoint,) = out.glob("checkpoint-*")
    assert (checkpoint / "optimizer.pt").exists() and (checkpoint / "model.safetensors").exists()


@pytest.mark.slow
def test_quickstart_runs_to_the_end(fwzoo_command, tmp_path):
    """A few steps only: the model must lose against the bigram model, and the command must say so."""
    out = tmp_path / "q"
    code, said, err = fwzoo_command("quickstart", "--out", out, "--steps", 3, "--minutes", 0.5)
    assert code == 1, err
    assert "does not beat the bigram baseline" in said
    assert "the greedy text is the same without the cache: yes" in said
    for name in ("README.md", "loss.json", "loss.png", "model.safetensors"):
        assert (out / name).exists()
    assert (
        f"| falcon3a (this model) | {json.loads((out / 'loss.json').read_text())['eval'][-1][1]:.3f} |"
        in (out / "README.md").read_text()
    )


# --- Generating ------------------------------------------------------------------------------------------------------


def test_greedy_equals_generate(fwzoo_command, model_folder):
    code, out, err = fwzoo_command("generate", model_folder, "--prompt", "Hello", "--greedy", "--max-new-tokens", 12)
    assert code == 0, err
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    ids = tokenizer("Hello", add_special_tokens=False, return_tensors="pt").input_ids
    tokens = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=False)[0, ids.shape[1] :]
    assert out == tokenizer.decode(tokens, skip_special_tokens=True) + "\n"


def test_a_seed_repeats_a_sample(fwzoo_command, model_folder):
    outputs = [
        fwzoo_command("generate", model_folder, "--prompt", "A", "--seed", seed, "--max-new-tokens", 20)[1]
        for seed in (1, 1, 2)
    ]
    assert outputs[0] == outputs[1] != outputs[2]


def test_prompt_from_a_file(fwzoo_command, model_folder, text_file):
    options = ["--greedy", "--max-new-tokens", 8]
    assert (
        fwzoo_command("generate", model_folder, "--prompt-file", text_file, *options)[1]
        == fwzoo_command("generate", model_folder, "--prompt", TEXT, *options)[1]
    )


def test_memory_goes_on_in_a_new_process(model_folder, tmp_path):
    """Two processes with a memory file between them say what one conversation says."""
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    options = ["--greedy", "--max-new-tokens", "20"]
    one = process("generate", model_folder, "--prompt", "Once upon a time", "--save-memory", first, *options)
    assert one.returncode == 0, one.stderr
    two = process(
        "generate", model_folder, "--load-memory", first, "--prompt", " and then", "--save-memory", second, *options
    )
    assert two.returncode == 0, two.stderr

    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    conversation = Conversation(model, AutoTokenizer.from_pretrained(model_folder), do_sample=False)
    for text, said in (("Once upon a time", one.stdout), (" and then", two.stdout)):
        conversation.add(text)
        assert conversation.reply(20) + "\n" == said
    for name, tensor in conversation.cache.state_dict().items():
        torch.testing.assert_close(load_file(second)[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_conversation_equals_generation_without_memory(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    conversation = Conversation(model, AutoTokenizer.from_pretrained(model_folder), do_sample=False)
    for text in ("Tell me", " more of", " this"):
        conversation.add(text)
        before = list(conversation.ids)
        conversation.reply(15)
        fresh = model.generate(torch.tensor([before]), max_new_tokens=15, do_sample=False, use_cache=False)[0]
        assert conversation.ids == fresh.tolist()[: len(conversation.ids)]


def test_a_memory_file_loads_as_a_cache(fwzoo_command, model_folder, tmp_path):
    path = tmp_path / "memory.safetensors"
    fwzoo_command("generate", model_folder, "--prompt", "abc", "--max-new-tokens", 4, "--save-memory", path)
    cache = fwzoo.FastWeightCache(AutoConfig.from_pretrained(model_folder))
    cache.load_state_dict(load_file(path))
    assert cache.get_seq_length() in range(3, 7)


# --- Sharing ---------------------------------------------------------------------------------------------------------


def test_export_writes_a_folder_with_code_and_card(fwzoo_command, model_folder, tmp_path):
    code, said, err = fwzoo_command("export", model_folder, tmp_path / "out", "--license", "mit", "--language", "en")
    assert code == 0, err
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"modeling_fwzoo.py", "model.safetensors", "tokenizer_config.json", "README.md"} <= files
    assert f"{sum(name.endswith('.py') for name in files)} code files" in said
    card = (tmp_path / "out/README.md").read_text()
    assert "license: mit" in card.splitlines() and f'from_pretrained("{tmp_path}/out"' in card

    measured = shutil.copytree(model_folder, tmp_path / "measured")
    (measured / "loss.json").write_text(json.dumps({"unit": "bits_per_byte", "eval": [[2, 7.5]]}))
    code, _, err = fwzoo_command("export", measured, tmp_path / "plain")
    assert code == 0, err
    card = (tmp_path / "plain/README.md").read_text()  # not the one that saving wrote: with what was measured since
    assert "after 2 training steps" in card and f'from_pretrained("{tmp_path}/plain"' in card

    (tmp_path / "out/README.md").write_text(f'My own words on "{tmp_path}/out".')
    code, _, err = fwzoo_command("export", tmp_path / "out", tmp_path / "again")
    assert code == 0, err
    assert (tmp_path / "again/README.md").read_text() == f'My own words on "{tmp_path}/again".'


def test_card_tells_what_was_measured_and_nothing_else(fwzoo_command, model_folder, tmp_path):
    code, said, _ = fwzoo_command("card", model_folder, "--name", "me/small", "--base-model", "me/other")
    assert code == 0
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    front, _, text = said.removeprefix("---\n").partition("\n---\n")
    assert {"library_name: transformers", "base_model: me/other", "- falcon3a"} <= set(front.split("\n"))
    assert "license" not in front and "held-out" not in text
    assert f"| parameters | {model.num_parameters():,} |" in text and f"{sum(model.state_bytes()):,} bytes" in text

    shutil.copytree(model_folder, tmp_path / "trained")
    curve = {"unit": "bits_per_byte", "train": [], "eval": [[10, 5.0], [1200, 2.125]]}
    (tmp_path / "trained/loss.json").write_text(json.dumps(curve))
    code, _, err = fwzoo_command("card", tmp_path / "trained", "--out", tmp_path / "card.md")
    assert code == 0, err
    assert "| after 1,200 training steps | 2.125 |" in (tmp_path / "card.md").read_text()


def test_memorize_and_generate_from_the_memory(fwzoo_command, model_folder, text_file, tmp_path):
    out = tmp_path / "memory"
    code, said, err = fwzoo_command("memorize", model_folder, "--text", text_file, "--passes", 2, "--out", out)
    assert code == 0, err
    tokens = 2 * len(TEXT.encode())
    assert "pass 2: 1,800 tokens" in said and f"bytes after {tokens:,} tokens" in said
    assert json.loads((out / "memory.json").read_text())["source"] == "text.txt, read 2 times."

    options = ["--prompt", "The ", "--greedy", "--max-new-tokens", 12]
    code, remembered, err = fwzoo_command("generate", model_folder, "--memory", out, *options)
    assert code == 0, err
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    conversation = Conversation(model, ByT5Tokenizer(), do_sample=False)
    conversation.add(TEXT + TEXT + "The ")
    assert remembered.rstrip("\n") == conversation.reply(12).rstrip("\n")


def test_the_loss_of_a_pass_is_that_of_one_forward(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    tokens = torch.randint(3, 259, (1, 40))
    with Progress(disable=True) as progress:
        meter = Meter(model, tokens, progress, 1)
        model.memorize(tokens, piece_size=7, on_piece=meter)
    assert meter.losses == [pytest.approx(model(tokens, labels=tokens).loss.item(), rel=1e-5)]


@pytest.mark.parametrize("architecture", ["fwpkm", "fwmlp"])
def test_memorize_writes_the_tail_too(fwzoo_command, tmp_path, monkeypatch, architecture):
    """The command's memory is that of `model.memorize` in one call: nothing is pending."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(architectures()[architecture].tiny()).double().eval()
    model.save_pretrained(tmp_path / "model")
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr("fwzoo.commands.memorize.PIECE", 13)
    text, out = tmp_path / "text.txt", tmp_path / "memory"
    text.write_text(TEXT[:61], encoding="utf-8")
    code, said, err = fwzoo_command("memorize", tmp_path / "model", "--text", text, "--passes", 2, "--out", out)
    assert code == 0 and "pass 2: 61 tokens" in said, err
    found = fwzoo.FastWeightCache.from_pretrained(out, model).state_dict()
    tokens = torch.from_numpy(encode(ByT5Tokenizer(), TEXT[:61]))[None]
    expected = model.memorize(tokens, passes=2).state_dict()
    assert set(found) == set(expected)
    assert not found["layers.1.feed_forward.count"].any() and not found["layers.1.feed_forward.real"].any()
    assert all(error(found[name], x) < 1e-9 for name, x in expected.items())


# --- Bad input -------------------------------------------------------------------------------------------------------

BAD_INPUT = {
    "unknown command": ("trian", "trian"),
    "unknown option": ("archs --nope", "--nope"),
    "missing out": ("train text.txt", "'--out'"),
    "missing text": ("train --out new", "SOURCES.*text files or --dataset"),
    "text and dataset": ("train text.txt --dataset squad --out new", "SOURCES"),
    "dataset does not exist": ("train --dataset ./none --out new", "--dataset: .*'./none'.*does not load"),
    "text does not exist": ("train nowhere.txt --out new", r"nowhere\.txt.* does not exist"),
    "text is a folder": ("train . --out new", "is a folder"),
    "text is empty": ("train empty.txt --out new --steps 1 {tiny}", "SOURCES: .*no text to train on"),
    "text is no json": ("train bad.jsonl --out new --steps 1 {tiny}", r"SOURCES: .*bad\.jsonl.* line 1 is not JSON"),
    "json lacks the column": ("train other.jsonl --out new --steps 1 {tiny}", "no text under 'text'"),
    "out is a file": ("train text.txt --out text.txt", "--out: 'text.txt' is a file"),
    "out is not empty": ("train text.txt --out full", "--out: 'full' is not empty.*--resume"),
    "misspelt arch": ("train text.txt --out new --arch falcon3b", "--arch: .*'falcon3b'.*did you mean 'falcon3"),
    "arch and config": ("train text.txt --out new --arch falcon1 --config ok.json", "--config: .*exclude each other"),
    "config does not exist": (
        "train text.txt --out new --config none.json",
        r"--config: .*none\.json.* cannot be",
    ),
    "config is no json": ("train text.txt --out new --config text.txt", "--config: .*is not JSON"),
    "config has no model type": ("train text.txt --out new --config empty.json", "--config: .*'model_type'"),
    "config of another library": ("train text.txt --out new --config llama.json", "'llama'.*allowed: falcon1"),
    "config with a bad field": ("train text.txt --out new --config window.json", "--config: .*window.*-1"),
    "config with a small vocabulary": ("train text.txt --out new --config small.json", "vocab_size 100 is smaller"),
    "heads do not divide": (
        "train text.txt --out new --hidden-size 30 --heads 4",
        "heads is 4; it must divide hidden_size = 30",
    ),
    "tokenizer does not exist": ("train text.txt --out new --tokenizer ./none", "--tokenizer: .*does not load"),
    "steps 0": ("train text.txt --out new --steps 0", "'--steps': '0' is not allowed"),
    "steps not a number": ("train text.txt --out new --steps many", "'--steps': 'many' is not allowed"),
    "steps and epochs": ("train text.txt --out new --steps 1 --epochs 1", "--epochs: .*exclude each other"),
    "epochs negative": ("train text.txt --out new --epochs -1", "'--epochs': '-1' .*more than 0"),
    "lr 0": ("train text.txt --out new --lr 0", "'--lr': '0' .*more than 0"),
    "batch size 0": ("train text.txt --out new --batch-size 0", "'--batch-size': '0' is not allowed"),
    "sequence length 1": ("train text.txt --out new --sequence-length 1", "'--sequence-length': '1' is not allowed"),
    "eval fraction too large": (
        "train text.txt --out new --eval-fraction 0.9",
        "--eval-fraction': '0.9' .*at most 0.5",
    ),
    "eval fraction of one document": ("train text.txt --out new --eval-fraction 0.1", "no document is held out"),
    "eval text does not exist": ("train text.txt --out new --eval-text none.txt", r"--eval-text: .*none\.txt"),
    "resume of nothing": ("train --resume --out new", "--resume: .*new' holds no run"),
    "resume of another folder": ("train --resume --out full", "--resume: .*'full' holds no run"),
    "quickstart out not empty": ("quickstart --out full", "--out: 'full' is not empty"),
    "quickstart steps": ("quickstart --steps 0", "'--steps': '0' is not allowed"),
    "quickstart minutes": ("quickstart --minutes 0", "'--minutes': '0' is not allowed"),
    "model does not exist": ("generate ./none --prompt a", "MODEL: './none'"),
    "model is no model": ("generate full --prompt a", "MODEL: 'full'"),
    "model of another library": ("generate llama --prompt a", "MODEL: the model type of 'llama' is 'llama'"),
    "prompt twice": ("generate MODEL --prompt a --prompt-file text.txt", "--prompt-file: .*exclude each other"),
    "prompt file does not exist": ("generate MODEL --prompt-file none.txt", r"--prompt-file: 'none\.txt'"),
    "empty prompt": ("generate MODEL --prompt-file empty.txt", "--prompt: '' is empty"),
    "temperature 0": ("generate MODEL --prompt a --temperature 0", "'--temperature': '0' .*more than 0"),
    "temperature nan": ("generate MODEL --prompt a --temperature nan", "'--temperature': 'nan' .*more than 0"),
    "top-p too large": ("generate MODEL --prompt a --top-p 1.5", "'--top-p': '1.5' .*at most 1"),
    "greedy with temperature": ("generate MODEL --prompt a --greedy --temperature 1", "--temperature: .*exclude"),
    "no new tokens": ("generate MODEL --prompt a --max-new-tokens 0", "'--max-new-tokens': '0' is not allowed"),
    "memory does not exist": ("generate MODEL --load-memory none", "--load-memory: 'none' is not a readable"),
    "memory is no memory": ("generate MODEL --load-memory text.txt", "--load-memory: 'text.txt' is not a readable"),
    "weights are no memory": ("generate MODEL --load-memory MODEL/model.safetensors", "holds no memory"),
    "memory of another model": ("generate MODEL --load-memory other.safetensors", "memory of a falcon1 model"),
    "memory into no folder": ("generate MODEL --prompt a --save-memory none/m", "--save-memory: .*does not exist"),
    "memory folder does not exist": ("generate MODEL --memory none --prompt a", "--memory: "),
    "memory folder of another model": ("generate MODEL --memory other-memory --prompt a", "--memory: .*fingerprint"),
    "memory twice": ("generate MODEL --memory a --load-memory b --prompt a", "--memory: 'a' and --load-memory exclude"),
    "memorize nothing": ("memorize MODEL --text empty.txt --out new", "--text: 'empty.txt' has . tokens"),
    "memorize no text": ("memorize MODEL --text none.txt --out new", "--text: 'none.txt' is not a readable"),
    "memorize into a full folder": ("memorize MODEL --text text.txt --out full", "--out: 'full' is not empty"),
    "memorize no passes": ("memorize MODEL --text text.txt --out new --passes 0", "'--passes': '0' is not allowed"),
    "export into a full folder": ("export MODEL full", "OUT: 'full' is not empty"),
    "export of nothing": ("export none new", "MODEL: 'none'"),
    "card into no folder": ("card MODEL --out none/card.md", r"--out: 'none/card\.md' cannot be written"),
    "info of nothing": ("info falcon9", "MODEL_OR_ARCH: 'falcon9' is not"),
}


@pytest.fixture(scope="module")
def bad_input_folder(tmp_path_factory, other_model_folder):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "text.txt").write_text(TEXT)
    (folder / "empty.txt").touch()
    (folder / "bad.jsonl").write_text("{\n")
    (folder / "other.jsonl").write_text('{"body": "a"}\n')
    (folder / "full").mkdir()
    (folder / "full/file").touch()
    (folder / "llama").mkdir()
    (folder / "llama/config.json").write_text('{"model_type": "llama"}')
    for name, fields in {
        "ok": {"model_type": "falcon1"},
        "empty": {},
        "llama": {"model_type": "llama"},
        "window": {"model_type": "falcon3", "window": -1},
        "small": {"model_type": "falcon1", "vocab_size": 100},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    other = AutoModelForCausalLM.from_pretrained(other_model_folder).eval()
    conversation = Conversation(other, ByT5Tokenizer(), do_sample=False)
    conversation.add("abc")
    conversation.reply(2)
    conversation.save(folder / "other.safetensors")
    conversation.cache.save_pretrained(folder / "other-memory")
    return folder


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence(case, fwzoo_command, bad_input_folder, model_folder, monkeypatch, tmp_path):
    command, complaint = BAD_INPUT[case]
    monkeypatch.chdir(bad_input_folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, value in (("{tiny}", " ".join(TINY)), ("MODEL", model_folder), ("--out new", f"--out {tmp_path}/new")):
        command = command.replace(name, str(value))
    code, _, err = fwzoo_command(*command.split())
    assert code == 2
    assert re.search(complaint, err), err
    assert err.startswith("fwzoo: ") and err.count("\n") == 1 and "Traceback" not in err


def test_resume_refuses_another_run(fwzoo_command, tmp_path, text_file):
    out = tmp_path / "run"
    assert fwzoo_command("train", text_file, "--out", out, "--steps", 2, *TINY)[0] == 0
    code, _, err = fwzoo_command("train", "--resume", "--out", out, "--sequence-length", 32)
    assert code == 2
    assert "--sequence-length: the run was begun with 64, not 32" in err


def test_training_without_accelerate_says_what_to_install(fwzoo_command, tmp_path, text_file, monkeypatch):
    def refuse(**_):
        raise ImportError("Using the `Trainer` requires accelerate")

    monkeypatch.setattr("fwzoo.training.trainer.TrainingArguments", refuse)
    code, _, err = fwzoo_command("train", text_file, "--out", tmp_path / "run", *TINY)
    assert code == 2
    assert "pip install 'fwzoo[train]'" in err
