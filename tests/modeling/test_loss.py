"""The loss without logits: equal to the plain one in value and gradients, in memory that the vocabulary does not multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.distributed._tools.mem_tracker import MemTracker

import fwzoo
from compare import error
from fwzoo.modeling import loss as loss_module
from rows import ROWS, Row

TOKENS = torch.randint(2, 384, (2, 40), generator=torch.Generator().manual_seed(0))
FALCON = next(row for row in ROWS if row.name == "falcon3a")


@pytest.fixture(autouse=True, params=["torch's", "pieces"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to the loss; in pieces of seven tokens."""
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", 7 * 384)
    if request.param == "pieces":
        monkeypatch.setattr(loss_module, "_fits_torch", lambda head, hidden: False)
    elif not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch.nn.functional.linear_cross_entropy is new in torch 2.13")


def loss_and_gradients(model: torch.nn.Module, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=TOKENS, **inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: torch.nn.Module, **inputs: Any) -> None:
    """Loss and every gradient with `skip_logits` are those without, to rounding."""
    plain, gradients = loss_and_gradients(model, **inputs)
    loss, found = loss_and_gradients(model, skip_logits=True, **inputs)
    assert error(loss, plain) < 1e-6
    assert found.keys() == gradients.keys() and found
    for name, gradient in gradients.items():
        scale = gradient.abs().max().clamp(min=1e-9)
        assert error(found[name] / scale, gradient / scale) < 1e-4, name


def ignoring(labels: torch.Tensor) -> torch.Tensor:
    labels = labels.clone()
    labels[0, :25], labels[1, 30:] = -100, -100
    return labels


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_it_is_the_plain_loss_for_every_architecture(row: Row) -> None:
    assert_same(row.model().train(), labels=ignoring(TOKENS))


@pytest.mark.parametrize(
    "inputs",
    [
        {"labels": TOKENS, "num_items_in_batch": 11},
        {"labels": TOKENS, "num_items_in_batch": torch.tensor(11)},
        {"shift_labels": ignoring(TOKENS)},
        {"labels": TOKENS, "shift_labels": ignoring(TOKENS), "num_items_in_batch": 50},
    ],
    ids=["count", "tensor-count", "shifted", "both"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_plain_loss_for_every_kind_of_label(inputs: dict[str, Any], tied: bool) -> None:
    assert_same(FALCON.model(tie_word_embeddings=tied).train(), **inputs)


def test_labels_shifted_by_one_are_noticed() -> None:
    """The negative control: labels that are not shifted give another loss."""
    model = FALCON.model().train()
    plain, _ = loss_and_gradients(model, labels=TOKENS)
    wrong, _ = loss_and_gradients(model, shift_labels=TOKENS, skip_logits=True)
    assert error(wrong, plain) > 1e-3


@pytest.mark.parametrize("options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_adapters_of_the_head_count(options: dict[str, Any]) -> None:
    config = LoraConfig(**{"target_modules": ["o_proj"], "r": 2, "task_type": "CAUSAL_LM", **options})
    model = get_peft_model(FALCON.model(tie_word_embeddings=False), config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    assert_same(model, labels=TOKENS)


@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings_count(tied: bool) -> None:
    model = FALCON.model(tie_word_embeddings=tied)
    model.resize_token_embeddings(401)
    assert_same(model.train(), labels=TOKENS)


def test_hooks_on_the_head_count() -> None:
    model = FALCON.model(tie_word_embeddings=False).train()
    model.lm_head.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert_same(model, labels=TOKENS)


def test_it_is_the_plain_loss_under_autocast_and_checkpointing() -> None:
    model = FALCON.model().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, gradients = loss_and_gradients(model, labels=TOKENS)
        loss, found = loss_and_gradients(model, labels=TOKENS, skip_logits=True)
    assert error(loss, plain) < 1e-6
    assert all(error(found[name], gradients[name]) < 0.02 for name in gradients)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(model, labels=TOKENS)


def test_it_is_the_plain_loss_of_a_model_in_bfloat16() -> None:
    model = FALCON.model().to(torch.bfloat16).train()
    plain, gradients = loss_and_gradients(model, labels=TOKENS)
    loss, found = loss_and_gradients(model, labels=TOKENS, skip_logits=True)
    assert loss.dtype == torch.float32 and error(loss, plain) < 1e-6
    assert all(error(found[name], gradients[name]) < 0.02 for name in gradients)


def test_evaluation_too_and_without_labels_it_is_refused() -> None:
    model = FALCON.model()
    with torch.no_grad():
        out = model(TOKENS, labels=TOKENS, skip_logits=True)
        assert out.logits is None and error(out.loss, model(TOKENS, labels=TOKENS).loss) < 1e-6
        loss, *_ = model(TOKENS, labels=TOKENS, skip_logits=True, return_dict=False, use_cache=False)
        assert torch.equal(loss, out.loss)
        with pytest.raises(ValueError, match="skip_logits is True; it needs labels or shift_labels"):
            model(TOKENS, skip_logits=True)
        with pytest.raises(ValueError, match=r"shift_labels has shape \[2, 39\]; it must be \[2, 40\]"):
            model(TOKENS, shift_labels=TOKENS[:, 1:], skip_logits=True)


def test_memory_of_a_token_does_not_grow_with_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak bytes of one more token in a training step: the same for 1,000 and 16,000 words; not so with logits."""
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", 1 << 18)

    def bytes_a_token(vocabulary: int, **options: Any) -> float:
        model = fwzoo.Falcon3AForCausalLM(fwzoo.Falcon3AConfig.tiny(vocab_size=vocabulary)).train()
        peaks = []
        for tokens in (512, 1536):
            ids = torch.randint(2, 900, (1, tokens))
            with MemTracker() as tracker:
                model(ids, labels=ids, use_cache=False, **options).loss.backward()
            peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
            model.zero_grad()
        return (peaks[1] - peaks[0]) / 1024

    small, large = (bytes_a_token(vocabulary, skip_logits=True) for vocabulary in (1000, 16_000))
    assert large < 1.1 * small
    assert bytes_a_token(16_000) > large + 2 * 4 * 16_000  # logits and their gradient
