"""`fwzoo serve` as a client of OpenAI's API meets it: what it answers is what `generate` gives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

import fwzoo
from fwzoo import cli
from fwzoo.commands.serve import _streamable
from rows import ROWS

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
BOOK, PROMPT = "The book that the model has read. " * 3, "And then it "
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextmanager
def served(*arguments: Any, folder: Path) -> Iterator[openai.OpenAI]:
    """A server in a process of its own, offline, and a client of it; in the end it is interrupted and must stop cleanly."""
    port = free_port()
    command = [sys.executable, "-m", "fwzoo", "serve", *map(str, arguments), "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log, text=True
        )
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"http://localhost:{port}/health").close()
                    break
                except OSError:
                    assert process.poll() is None, (folder / "log").read_text()
                    time.sleep(0.1)
            yield openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=60)
    assert code == 0, (folder / "log").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bytes`: a model with ByT5's tokenizer; `chat`: the same with a chat template and a `tokenizers` tokenizer."""
    base = tmp_path_factory.mktemp("serve")
    model, tokenizer = ROWS[5].model(), ByT5Tokenizer()
    with torch.no_grad():  # it prefers what can be printed
        model.lm_head.weight[:35], model.lm_head.weight[130:] = 0, 0
    for name in ("bytes", "chat"):
        model.save_pretrained(base / name)
        tokenizer.save_pretrained(base / name)
        tokenizer = _streamable(tokenizer)
        tokenizer.chat_template = CHAT
    cache = fwzoo.FastWeightCache(model.config)
    with torch.no_grad():
        model(ids(BOOK), past_key_values=cache, use_cache=True)
    cache.save_pretrained(base / "memory")
    return base


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[openai.OpenAI]:
    with served("bytes", folder=folder) as client:
        yield client


@pytest.fixture(scope="module")
def remembering(folder: Path) -> Iterator[openai.OpenAI]:
    with served("chat", "--memory", "memory", folder=folder) as client:
        yield client


def ids(text: str) -> torch.Tensor:
    return torch.tensor([[3 + byte for byte in text.encode()]])


def expected(folder: Path, text: str, before: str = "") -> str:
    """What the model says greedily after `before` and `text`."""
    model = AutoModelForCausalLM.from_pretrained(folder / "bytes").eval()
    prompt = ids(before + text)
    out = model.generate(prompt, max_new_tokens=12, do_sample=False)
    return _streamable(ByT5Tokenizer()).decode(out[0, prompt.shape[1] :], skip_special_tokens=True)


def test_chats_and_completions_are_what_generate_gives(plain: openai.OpenAI, folder: Path) -> None:
    assert [model.id for model in plain.models.list()] == ["bytes"]
    said = plain.completions.create(model="bytes", prompt=PROMPT, **GREEDY)
    assert said.choices[0].text == expected(folder, PROMPT)
    assert said.usage is not None and said.usage.prompt_tokens == len(PROMPT)
    messages: Any = [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]
    answer = plain.chat.completions.create(model="bytes", messages=messages, **GREEDY)
    assert answer.choices[0].message.content == expected(folder, "One.\nTwo.\n")


def test_streams_say_the_same_piece_by_piece(plain: openai.OpenAI, folder: Path) -> None:
    pieces = [x.choices[0].text for x in plain.completions.create(model="bytes", prompt=PROMPT, stream=True, **GREEDY)]
    assert len(pieces) > 3 and "".join(pieces) == expected(folder, PROMPT)
    messages: Any = [{"role": "user", "content": "One."}]
    chunks = list(plain.chat.completions.create(model="bytes", messages=messages, stream=True, **GREEDY))
    text = "".join(x.choices[0].delta.content or "" for x in chunks)
    assert text == expected(folder, "One.\n") and chunks[-1].choices[0].finish_reason == "length"


def test_requests_sample_unless_the_temperature_is_0(plain: openai.OpenAI) -> None:
    drawn = [
        plain.completions.create(model="bytes", prompt=PROMPT, max_tokens=12, seed=seed).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_stop_strings_and_wrong_names(plain: openai.OpenAI, folder: Path) -> None:
    whole = expected(folder, PROMPT)
    stop = whole[4]
    said = plain.completions.create(model="bytes", prompt=PROMPT, stop=[stop], **GREEDY).choices[0].text
    assert said == whole[: whole.index(stop) + 1]
    with pytest.raises(openai.BadRequestError) as refusal:
        plain.completions.create(model="other", prompt=PROMPT, **GREEDY)
    assert "pinned to 'bytes'" in refusal.value.response.text


def test_every_conversation_begins_with_the_memory(remembering: openai.OpenAI, folder: Path) -> None:
    after_book = expected(folder, PROMPT, BOOK)
    assert after_book != expected(folder, PROMPT)
    for _ in range(2):
        said = remembering.completions.create(model="chat", prompt=PROMPT, **GREEDY)
        assert said.choices[0].text == after_book
    answer = remembering.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "One."}], stream=True, **GREEDY
    )
    text = "".join(x.choices[0].delta.content or "" for x in answer)
    assert text == expected(folder, "<user>One.<assistant>", BOOK)


def test_the_tokenizer_that_streams_has_the_ids_of_bytes(folder: Path) -> None:
    slow, fast = ByT5Tokenizer(), _streamable(ByT5Tokenizer())
    text = "hällo wörld €\n\t  \x00🙂" + "".join(map(chr, range(32, 3000, 7)))
    assert fast(text)["input_ids"] == slow(text, add_special_tokens=False)["input_ids"] == ids(text)[0].tolist()
    assert fast.decode(fast(text)["input_ids"]) == text and len(fast) == len(slow)
    assert fast.all_special_ids == slow.all_special_ids
    assert fast.decode([72, 3 + 0xE2, 73, 300, 1], skip_special_tokens=True) == "E\ufffdF"
    assert _streamable(tokenizer := AutoTokenizer.from_pretrained(folder / "chat")) is tokenizer


def complaint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> str:
    monkeypatch.setattr(sys, "argv", ["fwzoo", "serve", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


def test_what_cannot_be_served_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*arguments: Any) -> str:
        return complaint(capsys, monkeypatch, *arguments)

    assert "70000" in ask(folder / "bytes", "--port", 70000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"{port} on '127.0.0.1' cannot be used" in ask(folder / "bytes", "--host", "127.0.0.1", "--port", port)
    other = ROWS[0].model()
    cache = fwzoo.FastWeightCache(other.config)
    other(ids(BOOK), past_key_values=cache, use_cache=True)
    cache.save_pretrained(tmp_path)
    assert "--memory" in (said := ask(folder / "bytes", "--memory", tmp_path)) and "fingerprint" in said
    monkeypatch.setattr("fwzoo.commands.serve.is_serve_available", lambda: False)
    assert "pip install 'fwzoo[serve]'" in ask(folder / "bytes")
