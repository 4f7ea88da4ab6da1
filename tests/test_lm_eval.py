"""lm-evaluation-harness runs a zoo model on local tasks, and gets what the model itself says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import ByT5Tokenizer

import fwzoo

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'fwzoo[eval]'")

CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  cache_dir: {cache}
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
"""
PERPLEXITY = """
task: tiny_perplexity
dataset_path: json
dataset_kwargs:
  cache_dir: {cache}
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: byte_perplexity
"""
GENERATION = """
task: tiny_generation
dataset_path: json
dataset_kwargs:
  cache_dir: {cache}
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{continued}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
"""
QUESTIONS = ["The sky is", "Two and two make", "A day has so many hours:"]
CHOICES = [["blue", "loud", "square"], ["four", "seventeen"], ["24", "3", "a thousand"]]


def bytes_of(text: str) -> torch.Tensor:
    return torch.tensor([list(text.encode())]) + 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, fwzoo.FwzooForCausalLM]:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = fwzoo.FwzooConfig.from_layout(
        "falcon3a,fa", num_hidden_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=384, initializer_range=0.2
    )
    causal = fwzoo.Falcon3AForCausalLM(model).eval()
    causal.save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)
    return folder, causal


def test_local_tasks_give_what_the_model_says(saved, tmp_path, monkeypatch) -> None:
    from fwzoo.evaluation.lm_eval import FwzooLM

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    folder, model = saved
    continued = []
    for question in QUESTIONS:
        ids = bytes_of(question)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        continued.append(ByT5Tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True).split("\n")[0])
    data = tmp_path / "data.jsonl"
    rows = [
        {"question": q, "choices": c, "answer": 0, "continued": text}
        for q, c, text in zip(QUESTIONS, CHOICES, continued, strict=True)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    for task in (CHOICE, PERPLEXITY, GENERATION):
        name = task.split()[1]
        (tmp_path / f"{name}.yaml").write_text(task.format(data=data, cache=tmp_path / "cache"))
    found = lm_eval.simple_evaluate(
        FwzooLM(str(folder), device="cpu", batch_size=4),
        tasks=["tiny_choice", "tiny_perplexity", "tiny_generation"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )

    correct = []
    for sample in found["samples"]["tiny_choice"]:
        question, choices = sample["doc"]["question"], sample["doc"]["choices"]
        expected = [log_probability(model, question, f" {choice}") for choice in choices]
        scored = [float(answer[0][0]) for answer in sample["resps"]]
        assert scored == pytest.approx(expected, abs=1e-3)
        correct.append(expected.index(max(expected)) == 0)
    assert found["results"]["tiny_choice"]["acc,none"] == pytest.approx(sum(correct) / 3)
    total = sum(log_probability(model, "", question) for question in QUESTIONS)
    perplexity = math.exp(-total / sum(map(len, QUESTIONS)))
    assert found["results"]["tiny_perplexity"]["byte_perplexity,none"] == pytest.approx(perplexity, rel=1e-4)
    assert found["results"]["tiny_generation"]["exact_match,none"] == 1


@torch.no_grad()
def log_probability(model: fwzoo.FwzooForCausalLM, context: str, continuation: str) -> float:
    """Of a continuation's bytes; an empty context is the end of the text before."""
    before = bytes_of(context) if context else torch.tensor([[1]])
    after = bytes_of(continuation)
    logits = model(torch.cat([before, after], 1), use_cache=False).logits[0, before.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(1, after.T).sum().item()


def test_an_end_of_text_in_the_context_would_change_the_scores(saved) -> None:
    """What the harness does with a byte tokenizer when it is not told otherwise."""
    from lm_eval.models.huggingface import HFLM

    from fwzoo.evaluation.lm_eval import FwzooLM

    folder, _ = saved
    ours, plain = FwzooLM(str(folder), device="cpu"), HFLM(str(folder), device="cpu")
    assert ours.tok_encode("ab") == [100, 101]
    assert plain.tok_encode("ab") == [100, 101, 1]


def test_the_harness_knows_the_model_by_name(saved) -> None:
    from lm_eval.api.registry import get_model

    import fwzoo.evaluation.lm_eval as adapter

    assert get_model("fwzoo") is adapter.FwzooLM
    made = adapter.FwzooLM(saved[1], ByT5Tokenizer(), max_length=77)
    assert made.max_length == 77 and made.model is saved[1]


def test_without_the_harness_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['lm_eval.api'] = None\nimport fwzoo.evaluation.lm_eval"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install 'fwzoo[eval]'" in done.stderr
