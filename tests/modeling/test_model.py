"""Every architecture as a causal language model: streaming, padding, packing, causality, gradients, saving, initial values."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import fwzoo
from compare import error
from fwzoo.kernels.falcon import RULES
from fwzoo.modeling.cache import CACHE_KEY
from rows import ROWS, Row

rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def ids(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 384, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def stream(
    model: Any, tokens: Tensor, cuts: list[int], mask: Tensor | None = None
) -> tuple[Tensor, fwzoo.FastWeightCache]:
    """Logits of a sequence given in pieces, with a cache."""
    cache = fwzoo.FastWeightCache(model.config)
    logits = []
    for start, end in zip([0, *cuts], [*cuts, tokens.shape[1]], strict=True):
        own = None if mask is None else mask[:, :end]
        out = model(tokens[:, start:end], attention_mask=own, use_cache=True, **{CACHE_KEY: cache})
        assert getattr(out, CACHE_KEY) is cache
        logits.append(out.logits)
    assert cache.get_seq_length() == tokens.shape[1]
    return torch.cat(logits, 1), cache


@rows
def test_auto_classes_find_it(row: Row) -> None:
    config = row.config()
    assert isinstance(AutoConfig.for_model(row.architecture), type(config))
    causal, base = AutoModelForCausalLM.from_config(config), AutoModel.from_config(config)
    assert causal.config_class is type(config) is base.config_class
    name = type(config).__name__.removesuffix("Config")
    assert (type(causal).__name__, type(base).__name__) == (f"{name}ForCausalLM", f"{name}Model")
    assert getattr(fwzoo, f"{name}ForCausalLM") is type(causal)


@rows
def test_tiny_is_tiny(row: Row) -> None:
    start = time.perf_counter()
    config = row.config()
    AutoModelForCausalLM.from_config(config)
    assert time.perf_counter() - start < 1
    assert config.vocab_size == 384 and config.hidden_size <= 64
    assert config.num_hidden_layers <= row.overrides.get("num_hidden_layers", 4)


@rows
@settings(max_examples=12)
@given(data=st.data())
def test_any_cut_with_any_mask_equals_one_call(row: Row, data: st.DataObject) -> None:
    model = row.model().double()
    count = data.draw(st.integers(1, 45))
    cuts = sorted(set(data.draw(st.lists(st.integers(1, count), max_size=5))) - {count})
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=count, max_size=count), min_size=2, max_size=2))
    )
    tokens = ids(2, count)
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask.long()).logits
        pieces, _ = stream(model, tokens, cuts, mask.long())
        assert error(pieces[mask], whole[mask]) < 1e-9
        for b in range(2):
            if mask[b].any():
                alone = model(tokens[b : b + 1, mask[b]]).logits
                assert error(whole[b, mask[b]], alone[0]) < 1e-9


@rows
@settings(max_examples=12)
@given(data=st.data())
def test_any_packing_equals_the_documents_alone(row: Row, data: st.DataObject) -> None:
    model = row.model().double()
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any))
    tokens = ids(1, sum(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    numbers = torch.repeat_interleave(torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        by_bounds = model(tokens, cu_seq_lens_q=bounds).logits
        assert torch.equal(model(tokens, cu_seq_lens_q=bounds.int()).logits, by_bounds)
        by_number, by_position = model(tokens, seq_idx=numbers).logits, model(tokens, position_ids=positions).logits
        for start, end in itertools.pairwise(bounds):
            if end > start:
                alone = model(tokens[:, start:end]).logits
                assert all(error(x[:, start:end], alone) < 1e-9 for x in (by_bounds, by_number, by_position))


@rows
def test_packed_gradients_equal_separate_ones(row: Row) -> None:
    model = row.model().double()
    tokens, bounds = ids(1, 50), [0, 13, 14, 50]
    labels = tokens.clone()
    labels[0, bounds[:-1]] = -100
    packed = model(tokens, labels=labels, cu_seq_lens_q=torch.tensor(bounds), num_items_in_batch=47).loss
    names = [name for name, _ in model.named_parameters()]
    a = torch.autograd.grad(packed, list(model.parameters()))
    apart = sum(
        model(tokens[:, s:e], labels=labels[:, s:e], num_items_in_batch=47).loss for s, e in itertools.pairwise(bounds)
    )
    b = torch.autograd.grad(apart, list(model.parameters()))
    assert error(packed, apart) < 1e-6  # the loss itself is computed in float32
    assert {n: e for n, x, y in zip(names, a, b, strict=True) if not (e := error(x, y)) < 1e-6} == {}


@rows
def test_every_parameter_gets_a_gradient(row: Row) -> None:
    model = row.model()
    tokens = ids(2, 40)
    model(tokens, labels=tokens).loss.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@rows
def test_a_token_changes_nothing_before_it(row: Row) -> None:
    model = row.model()
    tokens = ids(2, 70)
    with torch.no_grad():
        before = model(tokens).logits
        for t in (1, 15, 16, 40, 69):
            changed = tokens.clone()
            changed[:, t] = (changed[:, t] + 1) % 384
            after = model(changed).logits
            assert torch.equal(before[:, :t], after[:, :t])
            assert not torch.equal(before[:, t:], after[:, t:])


@rows
def test_levels_agree(row: Row) -> None:
    tokens = ids(2, 45)
    with torch.no_grad():
        a, b = (row.model(kernel_level=level).double()(tokens).logits for level in ("reference", "chunk"))
    assert error(a, b) < 1e-9


@rows
def test_forward_changes_no_parameter_and_no_buffer(row: Row) -> None:
    model = row.model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for mode in (True, False):
        model.train(mode)
        model(ids(1, 20), labels=ids(1, 20))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@rows
def test_gradient_checkpointing_gives_the_same_gradients(row: Row) -> None:
    tokens = ids(2, 40)
    grads = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = row.model().train()
        if options is not None:
            model.gradient_checkpointing_enable(options)
        model(tokens, labels=tokens, use_cache=options is not None).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for other in grads[1:]:
        assert all(torch.equal(grads[0][name], x) for name, x in other.items())


@rows
def test_loss_with_unequal_accumulation_equals_one_batch(row: Row) -> None:
    model = row.model().double()
    tokens = ids(4, 20)
    labels = tokens.clone()
    labels[0, 3:] = -100
    labels[2, :9] = -100
    count = (labels[:, 1:] != -100).sum()
    whole = model(tokens, labels=labels, num_items_in_batch=count).loss
    parts = sum(model(tokens[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=count).loss for i in range(4))
    assert error(whole, parts) < 1e-6  # the loss itself is computed in float32
    assert error(whole, model(tokens, labels=labels).loss) < 1e-6


@rows
def test_outputs_are_those_of_a_transformers_model(row: Row) -> None:
    model = row.model()
    tokens = ids(2, 12)
    with torch.no_grad():
        out = model(tokens, labels=tokens, output_hidden_states=True)
        assert out.logits.shape == (2, 12, 384)
        assert len(out.hidden_states) == model.config.num_hidden_layers + 1
        assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
        shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        assert torch.equal(model(tokens, shift_labels=shifted).loss, out.loss)
        assert torch.equal(model(tokens, logits_to_keep=3).logits, out.logits[:, -3:])
        assert torch.equal(model(tokens, logits_to_keep=torch.tensor([0, 5])).logits, out.logits[:, [0, 5]])
        embeds = model.get_input_embeddings()(tokens)
        assert torch.equal(model(inputs_embeds=embeds).logits, out.logits)
        loss, logits = model(tokens, labels=tokens, return_dict=False, use_cache=False)
        assert torch.equal(loss, out.loss) and torch.equal(logits, out.logits)
        assert getattr(model(tokens, use_cache=False), CACHE_KEY) is None
        assert getattr(model(tokens), CACHE_KEY) is not None
        assert getattr(model.train()(tokens), CACHE_KEY) is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@rows
def test_save_and_load(row: Row, dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = row.model(tie_word_embeddings=tied, hidden_size=64, vocab_size=4096).to(dtype)
    tokens = ids(2, 30)
    with torch.no_grad():
        expected = model(tokens).logits
    model.save_pretrained(tmp_path, max_shard_size="1MB" if dtype == torch.float32 else "500KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1 and not list(tmp_path.glob("*.bin"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    assert type(loaded) is type(model) and loaded.dtype == dtype
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, expected)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.to_dict() == loaded.config.to_dict() and again.mixers == model.config.mixers
    softmax = ("full_attention", "sliding_attention")
    assert again.layer_types == [name if name in softmax else "linear_attention" for name in again.mixers]


@rows
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_initial_values_in_sixteen_bit_have_the_statistics_of_float32(row: Row, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = AutoModelForCausalLM.from_config(row.config(hidden_size=64))
    torch.manual_seed(0)
    narrow = AutoModelForCausalLM.from_config(row.config(hidden_size=64), dtype=dtype)
    for (name, a), b in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert b.dtype == dtype and b.isfinite().all()
        assert abs(a.std().item() - b.float().std().item()) < 0.1 * a.std().item() + 1e-6, name
        few = a.std().item() / a.numel() ** 0.5  # the dtypes draw different numbers: a mean of few of them varies
        assert abs(a.mean().item() - b.float().mean().item()) < 0.01 + few, name


@rows
def test_missing_weights_get_initial_values_after_loading_on_the_meta_device(row: Row, tmp_path: Path) -> None:
    """A checkpoint without the mixers' weights: what is missing is initialised, what is there is not touched."""
    from safetensors.torch import load_file, save_file

    model = row.model()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    missing = [name for name in weights if ".mixer." in name]
    save_file({n: w for n, w in weights.items() if n not in missing}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in model.state_dict().items():
        if name in missing:
            assert loaded[name].isfinite().all() and abs(loaded[name].mean() - weight.mean()) < 0.1 + 0.1 * weight.std()
            assert abs(loaded[name].std() - weight.std()) <= 0.5 * weight.std()
        else:
            assert torch.equal(loaded[name], weight)


@pytest.mark.parametrize("row", [row for row in ROWS if row.name in RULES], ids=lambda row: row.name)
def test_the_memory_forgets_over_hundreds_of_tokens_at_first(row: Row) -> None:
    """At initialisation the gain is about 1 and the half-life of the memory a few hundred tokens."""
    config = row.config(hidden_size=64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    mixer = model.model.layers[0].mixer
    hidden = model.model.layers[0].mixer_norm(model.model.embed_tokens(ids(1, 200)))
    beta, ridge = mixer._gates(hidden)
    assert 0.9 < beta.mean() < 1.1
    half_life = torch.log(torch.tensor(0.5)) / torch.log1p(-(beta.mean() * ridge.mean() / (1 + ridge.mean())))
    assert 200 < half_life < 500


@rows
def test_resize_token_embeddings(row: Row) -> None:
    model = row.model()
    tokens = ids(1, 10)
    before = model(tokens).logits
    model.resize_token_embeddings(400)
    assert model(tokens).logits.shape[-1] == 400
    assert torch.equal(model(tokens).logits[..., :384], before)


@rows
def test_bfloat16_stays_near_float32(row: Row) -> None:
    model = row.model()
    tokens = ids(2, 40)
    with torch.no_grad():
        exact = model(tokens).logits
        narrow = model.to(torch.bfloat16)(tokens).logits
    assert narrow.dtype == torch.bfloat16 and narrow.isfinite().all()
    layers = model.config.num_hidden_layers  # whose roundings add up in squares
    assert (narrow.float() - exact).pow(2).mean().sqrt() < 0.1 * (layers / 2) ** 0.5 * exact.std()


@rows
def test_autocast_trains_and_leaves_the_fast_weights_in_float32(row: Row) -> None:
    model, tokens = row.model().train(), ids(2, 40)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
        _, cache = stream(model, tokens, [17])
    loss.backward()
    assert error(loss, model(tokens, labels=tokens).loss) < 0.01
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    weights = [x for layer in cache.layers for name, x in layer.tensors.items() if name in ("mixer.S", "mixer.w0")]
    assert all(x.dtype == torch.float32 for x in weights)


def test_state_bytes_and_kernel_report() -> None:
    model = ROWS[0].model()
    c = model.config
    per_layer = c.num_attention_heads * c.head_dim * c.head_dim * 4 + c.num_attention_heads * c.head_dim * 4
    conv = 3 * (3 * c.num_attention_heads * c.head_dim) * 4
    assert model.state_bytes() == [per_layer + conv + 9] * c.num_hidden_layers  # and has_key (1 byte), count (8)
    assert model.kernel_report()[0][:3] == (0, "falcon1", "chunk")
    assert model.kernel_report(tokens=1)[0][2] == "reference"
    with torch.device("meta"):
        assert ROWS[0].model().state_bytes() == model.state_bytes()


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.name in ("falcon2", "falcon3", "falcon3a", "every-mixer")],
    ids=lambda row: row.name,
)
def test_compiled_model_equals_eager(row: Row) -> None:
    """One graph, no breaks, forward and backward."""
    model, tokens = row.model().train(), ids(2, 40)
    torch._dynamo.reset()
    losses = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        run(tokens, labels=tokens).loss.backward()
        losses.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(error(losses[1][name], grad) < 1e-6 for name, grad in losses[0].items())


def test_a_hybrid_names_options_of_every_family_it_uses() -> None:
    config = fwzoo.Falcon1Config.tiny(mixers=["falcon1", "falcon3a"], window=2)
    assert config.mixers == ["falcon1", "falcon3a"] and config.window == 2


def test_class_names_follow_the_model_type_too() -> None:
    assert fwzoo.Falcon1aConfig is fwzoo.Falcon1AConfig and fwzoo.Falcon3aForCausalLM is fwzoo.Falcon3AForCausalLM
    with pytest.raises(AttributeError, match="Falcon3AConfig"):
        fwzoo.Falcon3ACnfig  # noqa: B018
