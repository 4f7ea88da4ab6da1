"""Memory health: the numbers are right, every architecture has some, and asking for them changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from compare import error
from fwzoo.kernels.falcon import RULES, falcon, falcon_log_decay
from fwzoo.modeling.blocks import half_life
from fwzoo.training.health import MemoryHealthCallback, memory_health, plot_health
from rows import ROWS, Row

TOKENS = torch.randint(2, 384, (1, 60), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if not rule.regression])
@pytest.mark.parametrize("options", [{}, {"pairing": "same_step"}, {"scale_coupled": True}, {"step": "eta"}], ids=str)
def test_falcons_decay_is_what_its_state_loses(rule: str, options: dict[str, Any]) -> None:
    """Two states differ, after 9 tokens, by their first difference times the decays; an inner-product rule adds the same."""
    generator = torch.Generator().manual_seed(0)
    options = {"rule": rule, "window": 3, **options}

    def inputs(tokens: int) -> list[torch.Tensor]:
        gain = (2, 4) if RULES[rule].per_column else (2,)
        shapes = [(2, 4), (2, 4), (2, 4), gain, (2,)]
        q, k, v, beta, ridge = (torch.rand(1, tokens, *shape, generator=generator).double() for shape in shapes)
        return [q, k, v, beta, 0.1 * ridge]

    before, after = inputs(6), inputs(9)
    _, state = falcon(*before, **options)
    other = state._replace(S=state.S + 1)
    ends = [falcon(*after, state=start, **options)[1].S for start in (state, other)]
    k, beta, ridge = (torch.cat([before[i], after[i]], 1) for i in (1, 3, 4))
    decay = falcon_log_decay(k, beta, ridge, **{"pairing": "shifted", **defaults(), **options})[:, -9:].sum(1).exp()
    expected = decay[..., None, :] if RULES[rule].per_column else decay[..., None, None]
    assert error(ends[1] - ends[0], expected.expand_as(ends[0])) < 1e-9


def defaults() -> dict[str, Any]:
    return {"timing": "read_after_write", "step": "beta", "scale_coupled": False, "eps": 1e-6, "decay_floor": 1e-4}


def test_half_life_is_the_median_heads() -> None:
    log_decay = torch.log(torch.tensor([0.5, 0.5**0.1, 0.5**0.01])).expand(1, 7, 3)
    assert half_life(log_decay).item() == pytest.approx(10)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_memory_is_asked_and_nothing_changes(row: Row) -> None:
    model = row.model().train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    numbers = memory_health(model, TOKENS)
    assert model.training and all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    attention = {"full_attention", "sliding_attention"}
    for i, names in enumerate(zip(row.config().mixers, row.config().feed_forwards, strict=True)):
        asked = {key for key in numbers if key.endswith(f"/{i}")}
        silent = names[0] in attention and names[1] in {"mlp", "none", "pkm"}
        assert bool(asked) != silent, (i, names)
    assert all(value > 0 for key, value in numbers.items() if "/half_life/" in key or "/state_norm/" in key)


def test_the_numbers_are_the_models() -> None:
    """Gates and slots of a memory, against the report that reads them token by token; the norm against the cache."""
    from fwzoo.analysis.memory import memory_report

    model = next(row for row in ROWS if row.name == "fwpkm").model()
    numbers, report = memory_health(model, TOKENS), memory_report(model, TOKENS)
    for i, layer in report.layers.items():
        assert numbers[f"memory/gate/{i}"] == pytest.approx(sum(layer.gate) / len(layer.gate), rel=1e-5)
        assert 0 < numbers[f"memory/slots_used/{i}"] <= layer.slots
    model = next(row for row in ROWS if row.name == "falcon1").model()
    cache = model(TOKENS, use_cache=True)
    cache = getattr(cache, "cache", None) or cache.past_key_values
    norm = cache.layers[0].memory("mixer").read()["S"].norm(dim=(-2, -1)).mean().item()
    assert memory_health(model, TOKENS)["memory/state_norm/0"] == pytest.approx(norm, rel=1e-5)


def test_the_plain_trainer_logs_them_and_trains_as_without(tmp_path: Path) -> None:
    def run(*callbacks: Any) -> Trainer:
        model = next(row for row in ROWS if row.name == "falcon-with-every-memory").model().train()
        data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(2, 384, (8, 20)).tolist()]
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True
        )
        torch.manual_seed(0)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=list(callbacks))
        trainer.train()
        return trainer

    torch.manual_seed(1)
    watched = run(MemoryHealthCallback(TOKENS))
    torch.manual_seed(1)
    plain = run()
    for name, x in plain.model.state_dict().items():
        assert torch.equal(x, watched.model.state_dict()[name]), name
    records = [record for record in watched.state.log_history if "loss" in record]
    assert len(records) == 3
    for record in records:
        assert {"memory/gate/0", "memory/half_life/0", "memory/state_norm/1", "memory/slots_used/1"} <= record.keys()
    assert plot_health(tmp_path, watched.state.log_history)[0].stat().st_size > 0
    assert plot_health(tmp_path, plain.state.log_history) == []
    json.dumps(watched.state.log_history)


def test_a_text_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input_ids is \[60\]; it must be a tensor \[B, T\]"):
        MemoryHealthCallback(TOKENS[0])
