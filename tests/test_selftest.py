"""`fwzoo selftest` runs every operator, finds a wrong kernel, and says so with its exit code."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import pytest
import torch

from fwzoo.analysis import selftest as module
from fwzoo.analysis.selftest import Verdict, selftest
from fwzoo.commands import selftest as command
from fwzoo.kernels import contract
from fwzoo.kernels.samples import Sizes

SMALL = (Sizes(batch=1, tokens=12, heads=2, key=16, value=24),)
CPU = torch.device("cpu")


def test_every_operator_is_tried_and_the_chunk_forms_are_right() -> None:
    verdicts = list(selftest(CPU, sizes=SMALL))
    assert {v.op for v in verdicts} == set(contract.operators())
    assert {(v.level, v.mode) for v in verdicts} == {
        (level, mode) for level in ("chunk", "triton") for mode in ("training", "decoding")
    }
    chunk = [v for v in verdicts if v.level == "chunk"]
    assert all(v.passed for v in chunk), [v for v in chunk if not v.passed]
    assert all(v.passed is None and v.note for v in verdicts if v.level == "triton" and not contract.INTERPRETING)


def test_processes_share_the_work() -> None:
    alone, shared = (
        [dataclasses.replace(v, seconds=0.0) for v in selftest(CPU, "linear_attention", SMALL, processes)]
        for processes in (1, 2)
    )
    assert alone == shared and len(alone) > 2


def broken(op: str, monkeypatch: Any, change: Any) -> list[Verdict]:
    """What a self-test finds when the output of an operator's chunk level is changed."""
    own = contract.operators()[op]
    wrong = dataclasses.replace(own, levels={**own.levels, "chunk": lambda *args: change(*own.levels["chunk"](*args))})
    monkeypatch.setitem(contract._OPS, op, wrong)
    monkeypatch.setattr(sys.modules[f"fwzoo.kernels.{op}"], op.upper(), wrong)
    return [v for v in selftest(CPU, only=op, sizes=SMALL) if v.level == "chunk"]


def test_a_kernel_that_is_wrong_is_found(monkeypatch: Any) -> None:
    assert not any(v.passed for v in broken("gated_delta", monkeypatch, lambda o, state: (1.2 * o, state)))


def test_a_kernel_that_loses_the_state_is_found(monkeypatch: Any) -> None:
    def forget(o: torch.Tensor, state: Any) -> Any:
        return o, type(state)(*(torch.zeros_like(x) for x in state))

    assert not any(v.passed for v in broken("gated_delta", monkeypatch, forget))


def test_a_step_that_is_wrong_is_found_in_decoding_only(monkeypatch: Any) -> None:
    def wrong_step(o: torch.Tensor, state: Any) -> Any:
        return (o if o.requires_grad or o.shape[1] != 1 else 1.2 * o), state

    verdicts = broken("gated_delta", monkeypatch, wrong_step)
    assert {v.mode for v in verdicts if not v.passed} == {"decoding"}
    assert not any(v.passed for v in verdicts if v.mode == "decoding")


def test_a_kernel_that_does_not_run_is_a_finding(monkeypatch: Any) -> None:
    def crash(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    (found, *_) = broken("gated_delta", monkeypatch, crash)
    assert found.passed is False and "illegal memory access" in found.note


def test_the_report_is_json_and_the_exit_code_says_whether_all_is_right(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "SIZES", SMALL)
    assert command.run("pkm", "cpu", as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and {case["op"] for case in report["cases"]} == {"pkm"}
    assert {"device", "triton", "torch", "transformers", "fwzoo"} <= set(report["machine"])
    own = contract.operators()["pkm"]
    wrong = dataclasses.replace(
        own, levels={**own.levels, "chunk": lambda *args: own.levels["reference"](*args)[0] * 2}
    )
    monkeypatch.setattr(sys.modules["fwzoo.kernels.pkm"], "PKM", wrong)
    monkeypatch.setitem(contract._OPS, "pkm", wrong)
    assert command.run("pkm", "cpu", as_json=False) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(("op", "device", "named"), [("falcom", "cpu", "falcom"), (None, "abacus", "abacus")])
def test_bad_arguments_are_named(op: str | None, device: str, named: str) -> None:
    with pytest.raises(Exception, match=named):
        command.run(op, device, as_json=True)
