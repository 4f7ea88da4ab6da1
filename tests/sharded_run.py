"""What each process of `test_distributed.py` runs: training sharded by FSDP2, in accelerate's arrangement.

accelerate shards on GPUs alone (`AcceleratorState` leaves the plugin aside on a CPU), so it is told afterwards that the
processes here are such.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from fwzoo.modeling import loss
from fwzoo.training.data import PackedRows, Texts, collate, load_tokenizer
from rows import ROWS

TEXTS = [f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * (1 + i % 4) for i in range(24)]
STEPS = 3


def trainer(name: str, out: Path, batch_size: int) -> Trainer:
    """The plain Trainer on a row's model, four rows a step, without logits."""
    row = next(row for row in ROWS if row.name == name)
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=STEPS,
        per_device_train_batch_size=batch_size,
        learning_rate=3e-3,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        remove_unused_columns=False,
        accelerator_config={"dispatch_batches": False, "split_batches": False},
        report_to="none",
        disable_tqdm=True,
    )

    def without_logits(rows: list[Any]) -> dict[str, Any]:
        return {**collate(rows), "skip_logits": True}

    rows = PackedRows(Texts(TEXTS), load_tokenizer("bytes"), 64, seed=0)
    return Trainer(model=row.model().train(), args=arguments, train_dataset=rows, data_collator=without_logits)


def losses(run: Trainer) -> list[float]:
    return [record["loss"] for record in run.state.log_history if "loss" in record]


def shard(run: Trainer) -> None:
    """Tell accelerate and the Trainer that this is FSDP2."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="FULL_STATE_DICT"
    )
    state = run.accelerator.state
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    run.is_fsdp_enabled = True


def main(out: Path, names: list[str]) -> None:
    loss.LOGITS_AT_ONCE = 50 * 384
    for name in names:
        run = trainer(name, out / name, batch_size=2)
        shard(run)
        run.train()
        shard(run)  # the attributes of accelerate's state are found anew by each `TrainingArguments`
        sharded = [n for n, p in run.model.named_parameters() if isinstance(p, DTensor)]
        assert len(sharded) == len(list(run.model.parameters())), "a parameter is not sharded"
        gathered = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in run.model.state_dict().items()}
        run.save_model()
        dist.barrier()
        loaded = AutoModelForCausalLM.from_pretrained(out / name).state_dict()
        assert loaded.keys() == gathered.keys()
        assert all(torch.equal(loaded[n], gathered[n]) for n in loaded), "what was saved is not what was trained"
        if dist.get_rank() == 0:
            torch.save({"losses": losses(run), "weights": loaded}, out / f"{name}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
