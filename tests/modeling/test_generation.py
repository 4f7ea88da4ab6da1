"""`generate` in every mode equals its slow twin: without a cache, without padding, without an assistant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_model import ids
from transformers import ByT5Tokenizer, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList, TextStreamer
from transformers.generation.streamers import BaseStreamer

import fwzoo
from compare import error
from fwzoo.modeling.cache import CACHE_KEY
from rows import ROWS, Row

rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
BEAMS: dict[str, Any] = {
    **GREEDY,
    "num_beams": 3,
    "num_return_sequences": 2,
    "return_dict_in_generate": True,
    "output_scores": True,
}


@rows
def test_greedy_and_sampled_tokens_do_not_depend_on_the_cache(row: Row) -> None:
    model, prompt = row.model(), ids(2, 17)
    assert torch.equal(model.generate(prompt, **GREEDY), model.generate(prompt, use_cache=False, **GREEDY))
    sampled = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        sampled.append(model.generate(prompt, use_cache=use_cache, **{**GREEDY, "do_sample": True, "top_p": 0.95}))
    assert torch.equal(*sampled)


@rows
def test_beam_scores_do_not_depend_on_the_cache(row: Row) -> None:
    model, prompt = row.model(), ids(2, 17)
    a, b = model.generate(prompt, **BEAMS), model.generate(prompt, use_cache=False, **BEAMS)
    assert torch.equal(a.sequences, b.sequences) and error(a.sequences_scores, b.sequences_scores) < 1e-5


@rows
@pytest.mark.parametrize("beams", [1, 3])
def test_a_left_padded_batch_equals_single_prompts(row: Row, beams: int) -> None:
    model = row.model()
    lengths = (25, 3, 12)
    prompts = [ids(1, n, seed=n) for n in lengths]
    batch, mask = torch.zeros(3, 25, dtype=torch.long), torch.zeros(3, 25, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        batch[i, 25 - lengths[i] :], mask[i, 25 - lengths[i] :] = prompt[0], 1
    together = model.generate(batch, attention_mask=mask, num_beams=beams, **GREEDY)
    for i, prompt in enumerate(prompts):
        assert torch.equal(together[i, 25:], model.generate(prompt, num_beams=beams, **GREEDY)[0, lengths[i] :])


@rows
def test_padding_token_equal_to_end_token_does_not_matter(row: Row) -> None:
    model, prompt = row.model(), ids(1, 9)
    padded = torch.cat([torch.ones(1, 4, dtype=torch.long), prompt], 1)
    mask = (torch.arange(13) >= 4).long()[None]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 1, "pad_token_id": 1}
    assert torch.equal(
        model.generate(padded, attention_mask=mask, **options)[0, 13:], model.generate(prompt, **options)[0, 9:]
    )


@rows
@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 4}, {"assistant": 1}, {"assistant": 0}], ids=str)
def test_assisted_decoding_equals_greedy(row: Row, options: dict[str, Any]) -> None:
    """Prompt lookup, an assistant that is mostly wrong, and one that is always right."""
    model = row.model()
    prompt = ids(1, 6).repeat(1, 4)
    if "assistant" in options:
        options = {"assistant_model": row.model(seed=options["assistant"])}
    assert torch.equal(model.generate(prompt, **GREEDY, **options), model.generate(prompt, **GREEDY))


@rows
def test_continuing_from_a_returned_cache_equals_from_scratch(row: Row) -> None:
    model, prompt = row.model(), ids(2, 15)
    first = model.generate(prompt, return_dict_in_generate=True, **{**GREEDY, "max_new_tokens": 6})
    cache = getattr(first, CACHE_KEY)
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    turn = torch.cat([first.sequences, ids(2, 7, seed=5)], 1)
    continued = model.generate(turn, **{CACHE_KEY: cache}, **GREEDY)
    assert torch.equal(continued, model.generate(turn, **GREEDY))


@rows
def test_embeddings_as_prompt(row: Row) -> None:
    model, prompt = row.model(), ids(2, 11)
    embeds = model.get_input_embeddings()(prompt)
    expected = model.generate(prompt, **GREEDY)
    assert torch.equal(model.generate(inputs_embeds=embeds, **GREEDY), expected[:, 11:])
    assert torch.equal(model.generate(inputs_embeds=embeds, use_cache=False, **GREEDY), expected[:, 11:])
    assert torch.equal(model.generate(prompt, inputs_embeds=embeds, **GREEDY), expected)
    beams = {"num_beams": 2, **GREEDY, "max_new_tokens": 5}
    assert torch.equal(model.generate(inputs_embeds=embeds, **beams), model.generate(prompt, **beams)[:, 11:])
    first = model.generate(inputs_embeds=embeds, return_dict_in_generate=True, **{**GREEDY, "max_new_tokens": 6})
    read = torch.cat([prompt, first.sequences], 1)
    cache = getattr(first, CACHE_KEY)
    assert torch.equal(model.generate(read, **{CACHE_KEY: cache}, **{**GREEDY, "max_new_tokens": 14}), expected)


@rows
def test_prefill_in_chunks_and_in_train_mode(row: Row) -> None:
    model, prompt = row.model(), ids(2, 19)
    expected = model.generate(prompt, **GREEDY)
    assert torch.equal(model.generate(prompt, prefill_chunk_size=5, **GREEDY), expected)
    assert torch.equal(model.train().generate(prompt, **GREEDY), expected)


@rows
def test_two_requests_do_not_share_a_state(row: Row) -> None:
    model = row.model()
    alone = model.generate(ids(1, 8, seed=1), **GREEDY)
    model.generate(ids(1, 8, seed=2), **GREEDY)
    assert torch.equal(model.generate(ids(1, 8, seed=1), **GREEDY), alone)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "num_return_sequences": 2},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "beam-sample": {"num_beams": 2, "do_sample": True},
}


@rows
@pytest.mark.parametrize(("mode", "use_cache"), [*((mode, True) for mode in MODES), ("beam", False)])
def test_outputs_have_their_shapes_and_are_those_of_one_forward(row: Row, mode: str, use_cache: bool) -> None:
    model, prompt, new = row.model(), ids(2, 7), 4
    options = {**GREEDY, "max_new_tokens": new, **MODES[mode]}
    torch.manual_seed(3)
    out = model.generate(
        prompt,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        **options,
    )
    beams, returned = options.get("num_beams", 1), options.get("num_return_sequences", 1)
    lanes = 2 * (beams if beams > 1 else returned)
    assert out.sequences.shape == (2 * returned, 7 + new)
    assert torch.equal(out.sequences[:, :7], prompt.repeat_interleave(returned, 0))
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == new
    assert all(x.shape == (lanes, 384) for x in (*out.scores, *out.logits))
    for step, hidden in enumerate(out.hidden_states):
        width = 7 if step == 0 else 1 if use_cache else 7 + step
        assert [x.shape for x in hidden] == [(lanes, width, 32)] * (len(row.config().mixers) + 1)
    cache = getattr(out, CACHE_KEY)
    assert (isinstance(cache, fwzoo.FastWeightCache) and cache.get_seq_length() == 6 + new) if use_cache else not cache
    logits = torch.stack(out.logits, 1)
    if beams == 1:
        assert error(logits, model(out.sequences).logits[:, 6:-1]) < 1e-4
        if mode == "greedy":
            assert torch.equal(out.sequences[:, 7:], logits.argmax(-1))
    else:
        assert out.sequences_scores.shape == (2 * returned,) and out.beam_indices.shape == (2 * returned, new)
        chosen = out.beam_indices[:, :, None, None].expand(-1, -1, 1, 384)
        along = torch.stack([logits[chosen[:, step, 0, 0], step] for step in range(new)], 1)
        assert error(along, model(out.sequences).logits[:, 6:-1]) < 1e-4


@rows
def test_processors_do_not_depend_on_the_cache(row: Row) -> None:
    model, prompt = row.model(), ids(2, 9)
    rules = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 9]], "min_new_tokens": 6}
    rules["logits_processor"] = LogitsProcessorList([Forbid()])
    options = {**GREEDY, "max_new_tokens": 8, "eos_token_id": 250, "pad_token_id": 0, **rules}
    found = model.generate(prompt, **options)
    assert torch.equal(found, model.generate(prompt, use_cache=False, **options))
    assert (found[:, 9:15] >= 200).all() and not (found[:, 9:15] == 250).any()


@rows
def test_streams_and_stops(row: Row) -> None:
    """A streamer gets the prompt and then every token; stopping criteria and stop strings end the text."""
    model, prompt, tokenizer = row.model(), ids(1, 8), ByT5Tokenizer()
    got: list[int] = []

    class Collect(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            got.extend(value.flatten().tolist())

        def end(self) -> None:
            got.append(-1)

    whole = model.generate(prompt, streamer=Collect(), **GREEDY)
    assert got == [*whole[0].tolist(), -1]
    criterion = StoppingCriteriaList([lambda tokens, scores: torch.full(tokens.shape[:1], tokens.shape[1] >= 12)])
    assert torch.equal(model.generate(prompt, stopping_criteria=criterion, **GREEDY), whole[:, :12])
    printable: dict[str, Any] = {"logits_processor": LogitsProcessorList([Printable()]), **GREEDY}
    whole = model.generate(prompt, **printable)
    text = tokenizer.convert_ids_to_tokens(whole[0, 8:].tolist())
    stopped = model.generate(prompt, stop_strings=text[4], tokenizer=tokenizer, **printable)
    assert torch.equal(stopped, whole[:, : 8 + text.index(text[4]) + 1])


def test_text_streams_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ROWS[0].model().generate(ids(1, 8), streamer=TextStreamer(ByT5Tokenizer()), **GREEDY)
    assert capsys.readouterr().out


class Printable(LogitsProcessor):
    """Only tokens of printable ASCII."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, :35] = scores[:, 130:] = -torch.inf
        return scores


class Forbid(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, :200] = -torch.inf
        return scores


def test_generation_with_a_compiled_forward() -> None:
    model, prompt = ROWS[1].model(num_hidden_layers=1), ids(2, 9)
    options = {**GREEDY, "max_new_tokens": 3}
    expected = model.generate(prompt, **options)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(prompt, **options), expected)


def test_a_stock_cache_is_refused() -> None:
    from transformers import DynamicCache

    model = ROWS[0].model()
    with pytest.raises(TypeError, match="FastWeightCache"):
        model(ids(1, 4), **{CACHE_KEY: DynamicCache()})
    with pytest.raises(TypeError, match="FastWeightCache"):
        model.generate(ids(1, 4), **{CACHE_KEY: DynamicCache()}, **GREEDY)


def test_both_names_of_the_cache_work() -> None:
    model = ROWS[0].model()
    for name in ("past_key_values", "cache"):
        cache = fwzoo.FastWeightCache(model.config)
        model(ids(1, 4), use_cache=True, **{name: cache})
        assert cache.get_seq_length() == 4
    with pytest.raises(ValueError, match="two names"):
        model(ids(1, 4), past_key_values=cache, cache=fwzoo.FastWeightCache(model.config))


def test_pipeline() -> None:
    from transformers import pipeline

    text = pipeline("text-generation", model=ROWS[3].model(), tokenizer=ByT5Tokenizer())("Hello", max_new_tokens=5)
    assert text[0]["generated_text"].startswith("Hello")


@pytest.mark.gpu
@rows
def test_on_a_gpu(row: Row) -> None:
    """The same tokens as on the CPU in float64; beams, padding, rewinding and bf16 training run."""
    model, prompt = row.model().double(), ids(2, 17)
    expected = model.generate(prompt, **GREEDY)
    model.cuda()
    assert torch.equal(model.generate(prompt.cuda(), **GREEDY).cpu(), expected)
    a, b = (model.generate(prompt.cuda(), use_cache=use, **BEAMS) for use in (True, False))
    assert torch.equal(a.sequences, b.sequences)
    one = prompt[:1].cuda()
    looked_up = model.generate(one, prompt_lookup_num_tokens=4, **GREEDY)
    assert torch.equal(looked_up, model.generate(one, **GREEDY))
    model.to(torch.bfloat16).train()
    tokens = ids(2, 200).cuda()
    mask = torch.ones_like(tokens)
    mask[0, :30] = mask[1, 90:95] = 0
    model(tokens, attention_mask=mask, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
