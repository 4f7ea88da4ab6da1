"""Memories inside models: isolation, copy on write, scopes, carrying, saving, optimisers, ranks."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from test_model import ids, stream
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import fwzoo
from compare import error
from fwzoo.modeling.cache import CACHE_KEY
from fwzoo.modeling.memories.base import FastMemory
from rows import ROWS, Row

MEMORIES = [row for row in ROWS if row.name in ("fwpkm", "fwmlp", "falcon-with-every-memory")]
memories = pytest.mark.parametrize("row", MEMORIES, ids=lambda row: row.name)
fast = pytest.mark.parametrize("architecture", ["fwpkm", "fwmlp"])


def build(architecture: str, seed: int = 0, **fields: Any) -> Any:
    more = {"fwmlp_lr": 0.2} if architecture == "fwmlp" else {}
    return Row(architecture, architecture, {**more, **fields}).model(seed)


def fast_weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: x.clone() for n, x in model.named_buffers()}


# --- isolation ---


@memories
@torch.no_grad()
def test_a_row_never_changes_the_logits_of_another(row: Row) -> None:
    """Bit for bit: prompts of several chunks, and decoding after them."""
    model = row.model()
    tokens = ids(2, 60)
    other = torch.cat([tokens[:1], ids(1, 60, seed=9)])
    a, b = (stream(model, x, [45, 46, 47])[0] for x in (tokens, other))
    assert torch.equal(a[0], b[0]) and not torch.equal(a[1], b[1])
    assert torch.equal(model(tokens).logits[0], model(other).logits[0])


@memories
@torch.no_grad()
def test_a_document_never_changes_the_logits_of_another(row: Row) -> None:
    model = row.model()
    tokens = ids(1, 60)
    bounds = torch.tensor([0, 31, 60])
    other = torch.cat([ids(1, 31, seed=9), tokens[:, 31:]], 1)
    a, b = (model(x, cu_seq_lens_q=bounds).logits for x in (tokens, other))
    assert torch.equal(a[:, 31:], b[:, 31:]) and not torch.equal(a[:, :31], b[:, :31])


@memories
def test_beams_of_one_prompt_never_change_those_of_another(row: Row) -> None:
    model = row.model()
    options: dict[str, Any] = {"max_new_tokens": 20, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    more: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    tokens = ids(2, 30)
    other = torch.cat([tokens[:1], ids(1, 30, seed=9)])
    a, b = (model.generate(x, **options, **more) for x in (tokens, other))
    assert torch.equal(a.sequences[0], b.sequences[0]) and a.sequences_scores[0] == b.sequences_scores[0]


# --- copy on write ---


@torch.no_grad()
def test_the_cache_holds_the_rows_a_sequence_wrote() -> None:
    model = build("fwpkm", fwpkm_subkeys=64)
    row_bytes = model.config.memory_value_dim * 4
    sizes = [stream(model, ids(1, n), [])[1].nbytes for n in (1, 20, 40, 80, 160)]
    assert sizes == sorted(sizes) and sizes[-1] > sizes[0]
    for n, size in zip((20, 40, 80, 160), sizes[1:], strict=True):
        # at most n * top_k rows, and three numbers for each in lists of a power of two
        assert size - sizes[0] <= n * model.config.fwpkm_top_k * (row_bytes + 48)
    assert sizes[-1] - sizes[0] < 64 * 64 * row_bytes


@torch.no_grad()
def test_beams_share_rows() -> None:
    model = build("fwpkm", fwpkm_subkeys=64)
    _, cache = stream(model, ids(1, 80), [])
    rows = cache.layers[1].tensors["feed_forward.shared_rows"]
    cache.batch_repeat_interleave(4)
    cache.reorder_cache(torch.tensor([3, 1, 1, 0]))
    assert cache.layers[1].tensors["feed_forward.shared_rows"] is rows and cache.batch_size == 4


@torch.no_grad()
def test_selecting_sequences_drops_the_rows_of_the_others() -> None:
    model = build("fwpkm", fwpkm_subkeys=64)
    tokens, follow = ids(4, 80), ids(2, 30, seed=1)
    _, cache = stream(model, tokens, [])
    rows = cache.layers[1].tensors["feed_forward.shared_rows"]
    before = cache.nbytes
    keep = torch.tensor([3, 1])
    cache.batch_select_indices(keep)
    tensors = cache.layers[1].tensors
    held, kept = int((tensors["feed_forward.slots"] < 64 * 64).sum()), tensors["feed_forward.shared_rows"]
    assert kept.shape[0] == held < rows.shape[0]
    assert before - cache.nbytes >= (rows.shape[0] - held) * rows.shape[1] * 4
    expected = stream(model, torch.cat([tokens[keep], follow], 1), [80])[0][:, 80:]
    assert error(model(follow, **{CACHE_KEY: cache}).logits, expected) < 1e-5
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, True, True]))
    assert cache.batch_size == 3 and cache.layers[1].tensors["feed_forward.shared_rows"].shape[0] <= kept.shape[0] * 2
    fresh = fwzoo.FastWeightCache(model.config)  # nothing written yet: nothing to drop
    model(ids(2, 1), use_cache=True, **{CACHE_KEY: fresh})
    fresh.batch_select_indices(torch.tensor([1]))
    assert fresh.batch_size == 1


@torch.no_grad()
def test_a_batch_never_allocates_a_second_table() -> None:
    """Peak of what is alive during a call with 8 sequences, as the profiler counts it."""
    memory = build("fwpkm", fwpkm_subkeys=256, memory_value_dim=128, memory_chunk_size=32).model.layers[1].feed_forward
    table = memory.values.numel() * 4
    hidden = torch.randn(8, 96, 32)
    memory(hidden)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        memory(hidden)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = list(itertools.accumulate(event.nbytes() for event in events))
    assert len(events) > 100 and 0 < max(alive) < table


@torch.no_grad()
def test_a_full_memory_is_refused_by_layer_or_forgets() -> None:
    model = build("fwpkm", fwpkm_max_slots=10)
    with pytest.raises(ValueError, match="layer 1: max_slots is 10"):
        model(ids(1, 60))
    model = build("fwpkm", fwpkm_max_slots=10, fwpkm_evict=True)
    whole = model(ids(1, 60)).logits
    pieces, cache = stream(model, ids(1, 60), [7, 30, 31])
    slots = cache.layers[1].tensors["feed_forward.slots"]
    assert error(pieces, whole) < 1e-5 and int((slots < 64).sum()) == 10


# --- fast weights are buffers ---


@fast
def test_fast_weights_are_saved_and_never_optimised(architecture: str, tmp_path: Path) -> None:
    model = build(architecture)
    names = {n for n, _ in model.named_buffers()}
    own = {"keys", "values"} if architecture == "fwpkm" else {"w_gate", "b_gate", "w_up", "b_up", "w_down", "b_down"}
    assert {n.rpartition(".")[2] for n in names} == own and not names & {n for n, _ in model.named_parameters()}
    before = fast_weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    tokens = ids(2, 30)
    model.train()(tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert all(torch.equal(x, before[n]) for n, x in model.named_buffers())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(x, before[n]) for n, x in loaded.named_buffers())
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    assert all(torch.equal(x, before[n]) for n, x in placed.named_buffers())


@fast
def test_missing_fast_weights_get_initial_values(architecture: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = build(architecture)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    names = {n for n, _ in model.named_buffers()}
    save_file({n: w for n, w in weights.items() if n not in names}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, x in loaded.named_buffers():
        assert x.isfinite().all() and (name.rpartition(".")[2].startswith("b_") or 0 < x.std() < 2), name


@fast
def test_fast_weights_survive_peft(architecture: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = build(architecture)
    before = fast_weights(model)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2))
    tokens = ids(2, 30)
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], 0.01)
    tuned.train()(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    adapted = {n for n, _ in tuned.named_parameters() if "lora_A" in n and "feed_forward" in n}
    assert len(adapted) >= 4
    merged = tuned.merge_and_unload()
    assert all(torch.equal(x, before[n]) for n, x in merged.named_buffers())
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(x, before[n]) for n, x in loaded.named_buffers())


# --- scope and carrying ---


@fast
def test_training_shares_one_memory_and_generation_does_not(architecture: str) -> None:
    model, tokens = build(architecture), ids(2, 40)
    other = torch.cat([tokens[:1], ids(1, 40, seed=9)])
    with torch.no_grad():
        a, b = (model.train()(x).logits[0] for x in (tokens, other))
        assert torch.equal(a[:8], b[:8]) and not torch.equal(a[9:], b[9:])
        model.config.training_scope = "sequence"
        a, b = (model.train()(x).logits[0] for x in (tokens, other))
        assert torch.equal(a, b)


@fast
def test_a_shared_memory_streams(architecture: str) -> None:
    model, tokens = build(architecture).double().train(), ids(2, 40)
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        pieces, cache = stream(model, tokens, [3, 20, 21])
    assert error(pieces, whole) < 1e-9 and cache.batch_size == 2


@fast
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_carried_fast_weights_are_those_of_one_long_memory(architecture: str, checkpointing: bool | None) -> None:
    model, tokens = build(architecture, carry_fast_weights=True), ids(2, 21)
    memory = next(iter(model.model.memories().values()))
    before = fast_weights(model)
    cache = fwzoo.FastWeightCache(model.config)
    with torch.no_grad():
        model.config.carry_fast_weights = False
        model.train()(tokens, use_cache=True, **{CACHE_KEY: cache})
        model.config.carry_fast_weights = True
    state = memory.flush(memory.state(cache.layers[1].memory("feed_forward").read()))
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    model(tokens, labels=tokens).loss.backward()
    assert all(torch.equal(x, before[n]) for n, x in model.named_buffers())  # staged until the next step
    after = model.state_dict()
    if architecture == "fwpkm":
        expected = {"keys": state.keys[0], "values": state.table(memory.values.new_tensor(before_values(before)))[0]}
    else:
        expected = {name: getattr(state, name)[0] for name in state._fields[:6]}
    for name, x in expected.items():
        full = next(n for n in before if n.endswith(f".{name}"))
        assert error(after[full], x) < 1e-6 and not torch.equal(after[full], before[full])
    evaluated = fast_weights(model)
    model.eval()(tokens)
    assert all(torch.equal(x, evaluated[n]) for n, x in model.named_buffers())


def before_values(before: dict[str, Tensor]) -> list[list[float]]:
    return next(x for n, x in before.items() if n.endswith(".values")).tolist()


def test_batch_statistics_of_queries_come_from_real_tokens() -> None:
    fields = {"feed_forwards": ["pkm", "mlp"], "pkm_subkeys": 6, "pkm_top_k": 3, "memory_key_dim": 16}
    model = Row("pkm", "falcon1a", {**fields, "pkm_query_norm": "batch"}).model().double()
    memory = model.model.layers[0].feed_forward
    hidden = torch.randn(2, 9, 32, dtype=torch.float64)
    mask = torch.rand(2, 9) < 0.6
    wild = torch.where(mask[..., None], hidden, torch.nan)
    memory.train()
    assert torch.equal(memory(hidden, mask=mask)[mask], memory(wild, mask=mask)[mask])
    memory.commit()
    q = memory.q_proj(hidden)[mask]
    assert error(memory.query_mean, 0.1 * q.mean(0)) < 1e-12
    assert error(memory.query_variance, 0.9 + 0.1 * q.var(0, correction=0)) < 1e-12
    pieces, _ = stream(model.eval(), ids(2, 20), [3, 11])
    assert error(pieces, model(ids(2, 20)).logits) < 1e-9


# --- ranks ---


def shared_batch(step: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(4, 29, dtype=torch.long)
    mask[0, :5] = mask[3, 20:] = 0
    return ids(4, 29, seed=step), mask


def _rank(rank: int, folder: str) -> None:
    """One of two processes: half of the batch each, two steps, carried fast weights."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    part = slice(2 * rank, 2 * rank + 2)
    for architecture in ("fwpkm", "fwmlp"):
        model = build(architecture, carry_fast_weights=True).double().train()
        logits = []
        for step in range(2):
            tokens, mask = shared_batch(step)
            logits.append(model(tokens[part], attention_mask=mask[part]).logits.detach())
        torch.save((logits, dict(model.state_dict())), f"{folder}/{architecture}{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_the_whole_batch(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(i, str(tmp_path))) for i in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(200)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    for architecture in ("fwpkm", "fwmlp"):
        results = [torch.load(tmp_path / f"{architecture}{i}.pt") for i in range(2)]
        (logits_0, weights_0), (logits_1, weights_1) = results
        assert all(torch.equal(x, weights_1[n]) for n, x in weights_0.items())
        model = build(architecture, carry_fast_weights=True).double().train()
        for step in range(2):
            tokens, mask = shared_batch(step)
            whole, real = model(tokens, attention_mask=mask).logits, mask == 1
            assert error(torch.cat([logits_0[step], logits_1[step]])[real], whole[real]) < 1e-9
        assert all(error(weights_0[n], x) < 1e-9 for n, x in model.state_dict().items())


def test_the_modules_know_their_layer() -> None:
    model = build("fwpkm", num_hidden_layers=4)
    assert list(model.model.memories()) == [2] and model.config.feed_forwards == ["mlp", "mlp", "fwpkm", "mlp"]
    assert fwzoo.FwpkmConfig().feed_forwards == ["mlp", "mlp", "fwpkm", "mlp"] * 3
    assert all(isinstance(m, FastMemory) and m.layer_index == i for i, m in model.model.memories().items())
    assert copy.deepcopy(model).model.memories()[2] is not model.model.memories()[2]


@memories
def test_state_bytes_without_storage(row: Row) -> None:
    model = row.model()
    with torch.device("meta"):
        assert row.model().state_bytes() == model.state_bytes()


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_equals_eager() -> None:
    model, tokens = build("fwpkm"), ids(2, 30)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")(tokens, use_cache=False).logits
    assert error(compiled, model(tokens, use_cache=False).logits) < 1e-6


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("activation", ["sigmoid", "identity", "none"])
def test_what_is_read_and_the_value_are_mixed_as_the_options_say(activation: str, residual: bool) -> None:
    torch.manual_seed(0)
    config = fwzoo.FwpkmConfig.tiny(gate_activation=activation, value_residual=residual, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(config).eval()
    (memory,) = (m for m in model.modules() if isinstance(m, FastMemory))
    seen: dict[str, Tensor] = {}
    remember = memory.remember

    def keep(q: Tensor, v: Tensor, gate: Tensor, past: Any, **options: Any) -> Any:
        read, state = remember(q, v, gate, past, **options)
        seen.update(v=v, g=gate[..., None], read=read)
        return read, state

    memory.remember = keep  # type: ignore[method-assign]
    hidden = torch.randn(2, 20, config.hidden_size)
    out = memory(hidden)
    rest = 1.0 if activation == "none" else 1 - seen["g"]
    mixed = seen["g"] * seen["read"] + (rest * seen["v"] if residual else 0)
    assert error(out, memory.o_proj(memory.o_norm(mixed))) < 1e-6
    assert (seen["g"] == 1).all() == (activation == "none") and (memory.g_proj is None) == (activation == "none")
