"""transformers' own Trainer on the zoo: evaluation with metrics gathers logits, and no cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import EvalPrediction, Trainer, TrainingArguments

from rows import ROWS, Row

SOME = [row for row in ROWS if row.name in ("falcon3", "lact", "fwpkm", "every-mixer")]
TOKENS = torch.randint(2, 384, (5, 20), generator=torch.Generator().manual_seed(0))


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float((predictions[:, :-1].argmax(-1) == labels[:, 1:]).mean())


@pytest.mark.parametrize("row", SOME, ids=lambda row: row.name)
def test_evaluation_with_metrics(row: Row, tmp_path: Path) -> None:
    """Five rows in batches of two, with the cache that a model returns by default."""
    model, seen = row.model(), []

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {"accuracy": accuracy(prediction.predictions, prediction.label_ids)}

    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=2, eval_accumulation_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )  # fmt: skip
    data = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
    trainer = Trainer(model, arguments, eval_dataset=data, compute_metrics=metrics)
    found = trainer.evaluate()
    with torch.no_grad():
        logits, loss = model(TOKENS).logits, model(TOKENS, labels=TOKENS).loss
    assert isinstance(seen[0].predictions, np.ndarray) and seen[0].predictions.shape == logits.shape
    assert found["eval_accuracy"] == accuracy(logits.numpy(), TOKENS.numpy())
    assert found["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert trainer.predict(data).predictions.shape == logits.shape
