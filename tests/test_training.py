"""Packing, baselines, the loss under accumulation, and a run that is stopped and gone on with."""

import gzip
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import fwzoo  # noqa: F401 (registers the architectures)
from fwzoo.training.baselines import ByteModel
from fwzoo.training.data import (
    BYTE_OFFSET,
    IGNORED_LABEL,
    Files,
    PackedRows,
    Place,
    Records,
    Row,
    Share,
    SourceError,
    Texts,
    collate,
    encode,
    load_tokenizer,
    pack,
)
from fwzoo.training.sample_text import pydoc_topics
from fwzoo.training.trainer import PLACE_FILE, PackedTrainer, RunError, Schedule, train
from rows import ROWS

TOKENIZER = load_tokenizer("bytes")
END = TOKENIZER.eos_token_id
TEXTS = [f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * (1 + i % 4) for i in range(24)]


def tiny_model(model_type="falcon3a", **overrides):
    torch.manual_seed(0)
    config = type(AutoConfig.for_model(model_type)).tiny(**overrides)
    return AutoModelForCausalLM.from_config(config)


def packed(texts, length):
    return list(PackedRows(Texts(texts), TOKENIZER, length))


# --- Text and tokens -------------------------------------------------------------------------------------------------


def test_bytes_are_encoded_as_the_tokenizer_does():
    text = "naïve – 東京\n"
    assert encode(TOKENIZER, text).tolist() == TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_a_text_cannot_inject_special_tokens():
    assert encode(TOKENIZER, "</s><pad>").min() >= BYTE_OFFSET


def test_one_file_is_one_document_and_one_line_of_json_too(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n\n{"text": "four"}\n')
    with gzip.open(tmp_path / "c.json.gz", "wt") as file:
        file.write('{"text": "five"}\n')
    source = Files(tuple(str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.json.gz")))
    assert ["".join(document) for document in source.documents()] == ["one\n\ntwo\n", "three", "four", "five"]


def test_a_long_file_is_read_in_pieces_and_stays_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("fwzoo.training.data.PIECE_CHARACTERS", 10)
    text = "".join(f"line {i}\n" for i in range(20))
    (tmp_path / "a.txt").write_text(text)
    (document,) = Files((str(tmp_path / "a.txt"),)).documents()
    pieces = list(document)
    assert len(pieces) > 5 and "".join(pieces) == text and all(piece.endswith("\n") for piece in pieces)
    (row,) = pack([pieces], lambda piece: encode(TOKENIZER, piece), END, 1000)
    assert row.starts == [0] and row.ids.tolist() == [*encode(TOKENIZER, text), END]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("bad.jsonl", b'{"body": "a"}\n', r"line 1 has no text under 'text', it has \['body'\]"),
        ("bad.jsonl", b'["text"]\n', "line 1 has no text under 'text', it has list"),
        ("bad.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("bad.txt.gz", b"plain", "is not UTF-8 text"),
    ],
)
def test_unreadable_text_is_named(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=complaint):
        [list(document) for document in Files((str(tmp_path / name),)).documents()]


def test_share_splits_without_overlap():
    kept, held_out = (Share(Texts(TEXTS), 10, held_out=held_out) for held_out in (False, True))
    assert [document for (document,) in held_out.documents()] == [TEXTS[9], TEXTS[19]]
    assert len(list(kept.documents())) == 22


# --- Packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 7, 16, 1000])
def test_rows_hold_every_token_in_order(length):
    texts = ["abc", "", "de", "f" * 20, "g"]
    rows = packed(texts, length)
    assert np.concatenate([row.ids for row in rows]).tolist() == [
        token for text in texts if text for token in [*encode(TOKENIZER, text), END]
    ]
    assert all(len(row.ids) == length for row in rows[:-1]) and 0 < len(rows[-1].ids) <= length
    for row in rows:
        after_end = [i + 1 for i in np.flatnonzero(row.ids == END) if i + 1 < len(row.ids)]
        assert row.starts == [0, *after_end]


def test_collate_joins_rows_and_ignores_first_tokens():
    batch = collate([Row(np.array([5, 6, 7]), [0, 2]), Row(np.array([8, 9]), [0])])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 3, 5]
    assert batch["labels"].tolist() == [[IGNORED_LABEL, 6, IGNORED_LABEL, IGNORED_LABEL, 9]]


def test_packed_documents_do_not_see_each_other():
    """Logits of a packed row equal those of each document alone, and the loss is the mean over all their targets."""
    model = tiny_model().double().eval()
    batch = collate(packed(TEXTS[:5], 150))
    borders = batch["cu_seq_lens_q"].tolist()
    assert len(borders) > 5
    with torch.no_grad():
        together = model(**batch, use_cache=False)
        nats, targets = 0.0, 0
        for begin, end in itertools.pairwise(borders):
            ids = batch["input_ids"][:, begin:end]
            alone = model(input_ids=ids, labels=ids, use_cache=False)
            torch.testing.assert_close(together.logits[:, begin:end], alone.logits, rtol=1e-9, atol=1e-9)
            if end - begin > 1:
                nats += alone.loss.item() * (end - begin - 1)
                targets += end - begin - 1
    assert together.loss.item() == pytest.approx(nats / targets, rel=1e-6)


def test_packing_without_borders_is_noticed():
    """The negative control of the test above: the same row as one document gives other logits."""
    model = tiny_model().eval()
    batch = collate(packed(TEXTS[:5], 150))
    with torch.no_grad():
        apart = model(input_ids=batch["input_ids"], cu_seq_lens_q=batch["cu_seq_lens_q"], use_cache=False).logits
        mixed = model(input_ids=batch["input_ids"], use_cache=False).logits
    assert (apart - mixed).abs().max() > 1e-4


def test_row_order_depends_on_the_seed_alone():
    def first(seed, count=30):
        rows = iter(PackedRows(Texts(TEXTS), TOKENIZER, 32, seed=seed))
        return [next(rows).ids.tolist() for _ in range(count)]

    assert first(0) == first(0) and first(0) != first(1)


def test_every_pass_holds_every_row():
    rows = PackedRows(Texts(TEXTS), TOKENIZER, 32, seed=0)
    count, stream = rows.count_rows(), iter(rows)
    tokens = [sorted(np.concatenate([next(stream).ids for _ in range(count)]).tolist()) for _ in range(2)]
    assert tokens[0] == tokens[1] == sorted(token for text in TEXTS for token in [*encode(TOKENIZER, text), END])


# --- Going on where a run stopped ---


def bpe():
    """A small byte-level BPE tokenizer, trained on the spot."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def text_files(folder):
    """Two text files of several pieces, one of them compressed, and two files of JSON lines."""
    long = "".join(f"line {i} – of a long file\r\n" for i in range(60))
    (folder / "a.txt").write_bytes(long.encode())
    with gzip.open(folder / "b.txt.gz", "wt") as file:
        file.write(long.upper())
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "c.jsonl").write_text("\n".join(lines[:12]) + "\n\n")
    with gzip.open(folder / "d.json.gz", "wt") as file:
        file.write("\n".join(lines[12:]))
    return Files(tuple(str(path) for path in sorted(folder.iterdir())))


def sources(folder):
    folder.mkdir()
    streamed = datasets.Dataset.from_dict({"text": TEXTS})
    return {
        "texts": Texts(TEXTS),
        "files": text_files(folder),
        "share": Share(text_files(folder), 3, held_out=False),
        "records": Records(streamed.to_iterable_dataset(num_shards=3)),
        "share-of-records": Share(Records(streamed), 4, held_out=True),
    }


@pytest.mark.parametrize("kind", ["texts", "files", "share", "records", "share-of-records"])
@pytest.mark.parametrize("tokenizer", [TOKENIZER, bpe()], ids=["bytes", "bpe"])
@pytest.mark.parametrize("buffer", [5, 1024])
def test_rows_go_on_from_every_place(tmp_path, monkeypatch, kind, tokenizer, buffer):
    """After each number of rows, across the borders of pieces, documents, files and passes: the same rows follow."""
    monkeypatch.setattr("fwzoo.training.data.PIECE_CHARACTERS", 100)
    monkeypatch.setattr(PackedRows, "SHUFFLE_ROWS", buffer)
    source = sources(tmp_path / "text")[kind]
    rows = PackedRows(source, tokenizer, 31, seed=0)
    rows.remember_every = 1
    count = int(2.5 * rows.count_rows()) + 1
    stream, whole, places = iter(rows), [], [Place()]
    for _ in range(count):
        whole.append(next(stream))
        places.append(rows.place_after(len(whole)))
    for done in [*range(0, count, 7), count - 1]:
        places[done].save(tmp_path / "place")
        again = PackedRows(source, tokenizer, 31, seed=0)
        again.start = Place.load(tmp_path / "place")
        for expected, row in zip(whole[done : done + 12], again, strict=False):
            assert row.starts == expected.starts and np.array_equal(row.ids, expected.ids)


def test_going_on_reads_nothing_again(tmp_path, monkeypatch):
    monkeypatch.setattr("fwzoo.training.data.PIECE_CHARACTERS", 100)
    monkeypatch.setattr(PackedRows, "SHUFFLE_ROWS", 4)
    (tmp_path / "a.txt").write_text("a line of text\n" * 1000)
    rows = PackedRows(Files((str(tmp_path / "a.txt"),)), TOKENIZER, 32, seed=0)
    rows.remember_every, stream = 100, iter(rows)
    expected = [next(stream) for _ in range(410)][400:]
    rows.place_after(400).save(tmp_path / "place")
    read = []
    monkeypatch.setattr(
        "fwzoo.training.data.encode", lambda tokenizer, text: read.append(text) or encode(tokenizer, text)
    )
    rows.start = Place.load(tmp_path / "place")
    assert all(np.array_equal(row.ids, again.ids) for row, again in zip(expected, rows, strict=False))
    assert 0 < sum(map(len, read)) < 500


def test_workers_share_the_rows():
    rows = PackedRows(Texts(TEXTS), TOKENIZER, 32)
    loader = DataLoader(rows, batch_size=None, num_workers=2)
    assert sorted(row.ids.tolist() for row in loader) == sorted(row.ids.tolist() for row in rows)


def test_training_on_no_text_is_an_error():
    with pytest.raises(SourceError, match="no text"):
        next(iter(PackedRows(Texts(["", ""]), TOKENIZER, 32, seed=0)))


# --- Baselines -------------------------------------------------------------------------------------------------------


def test_baselines_on_topics_are_where_they_should_be():
    text = pydoc_topics()
    assert not set(text.train) & set(text.held_out)
    share = sum(map(len, text.held_out)) / sum(map(len, text.train + text.held_out))
    assert 0.05 < share < 0.15
    assert ByteModel(text.train, 1).bits_per_byte(text.held_out) == pytest.approx(4.68, abs=0.1)
    assert ByteModel(text.train, 2).bits_per_byte(text.held_out) == pytest.approx(3.30, abs=0.2)


def test_baselines_on_a_plain_cut():
    topics = pydoc_topics(held_out_share=0.0).train
    text = "\n".join(topics).encode()
    cut = int(0.9 * len(text))
    train_text, test_text = [text[:cut].decode(errors="ignore")], [text[cut:].decode(errors="ignore")]
    assert ByteModel(train_text, 1).bits_per_byte(test_text) == pytest.approx(4.68, abs=0.05)
    assert ByteModel(train_text, 2).bits_per_byte(test_text) == pytest.approx(3.34, abs=0.05)


def test_baselines_are_distributions():
    model = ByteModel(["abab"], 2, k=1e-6)
    every_byte = [chr(i) for i in range(128)]
    assert sum(2 ** -model.bits_per_byte([char]) for char in every_byte) == pytest.approx(1, abs=1e-3)
    assert model.bits_per_byte(["ab" * 50]) < 0.2 < ByteModel(["abab"], 1).bits_per_byte(["ab" * 50])


@pytest.mark.parametrize(("order", "k", "name"), [(3, 0.1, "order"), (1, 0.0, "k"), (2, -1.0, "k")])
def test_baselines_refuse(order, k, name):
    with pytest.raises(ValueError, match=f"^{name} must"):
        ByteModel(["a"], order, k)


# --- Runs ------------------------------------------------------------------------------------------------------------

SCHEDULE = Schedule(steps=8, batch_size=2, lr=3e-3, warmup=2, eval_every=4, save_every=4, log_every=1)


def run(out: Path, resume=False, **changes):
    rows = PackedRows(Texts(TEXTS[:20]), TOKENIZER, 64, seed=0)
    held_out = packed(TEXTS[20:], 64)
    return train(tiny_model(), TOKENIZER, rows, out, replace(SCHEDULE, **changes), held_out, resume=resume)


def curve(out: Path):
    return json.loads((out / "loss.json").read_text())


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    outcome = run(out)
    return out, outcome


def weights(out: Path):
    return AutoModelForCausalLM.from_pretrained(out).state_dict()


def test_a_run_learns_and_leaves_everything(whole_run):
    out, outcome = whole_run
    losses = [loss for _, loss in curve(out)["train"]]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert outcome.step == 8 and not outcome.interrupted
    assert outcome.metrics["eval_bits_per_byte"] == curve(out)["eval"][-1][1]
    for name in ("model.safetensors", "config.json", "tokenizer_config.json", "loss.json", "loss.png"):
        assert (out / name).stat().st_size > 0


class Signal(TrainerCallback):
    """Sends an interrupt during step 3, as Ctrl-C does."""

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 2:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(whole_run, tmp_path, monkeypatch):
    init = PackedTrainer.__init__

    def init_with_signal(self, *args, callbacks, **options):
        init(self, *args, callbacks=[*callbacks, Signal()], **options)

    monkeypatch.setattr(PackedTrainer, "__init__", init_with_signal)
    stopped = run(tmp_path)
    assert stopped.interrupted and stopped.step == 3 and stopped.checkpoint == tmp_path / "checkpoint-3"
    monkeypatch.setattr(PackedTrainer, "__init__", init)

    outcome = run(tmp_path, resume=True)
    out, whole = whole_run
    assert outcome.step == whole.step and outcome.metrics == whole.metrics
    assert curve(tmp_path) == curve(out)
    for name, tensor in weights(out).items():
        assert torch.equal(tensor, weights(tmp_path)[name]), name


def test_resuming_with_another_place_in_the_data_is_noticed(whole_run, tmp_path, monkeypatch):
    """The negative control of the test above: the row after the next one first gives another curve."""
    run(tmp_path, steps=4, warmup=2)
    monkeypatch.setattr("fwzoo.training.trainer.Place.load", lambda path: replace(Place(), rows=8))
    run(tmp_path, resume=True)
    assert curve(tmp_path)["train"][4:] != curve(whole_run[0])["train"][4:]


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(RunError, match="has no checkpoint to resume from"):
        run(tmp_path, resume=True)


def test_a_finished_run_is_not_trained_further(whole_run):
    with pytest.raises(RunError, match="is trained for 8 steps already"):
        run(whole_run[0], resume=True)


def test_loss_does_not_depend_on_accumulation(tmp_path):
    """Rows with very different numbers of targets: two passes of one row equal one pass of two rows, step by step."""
    texts = ["a" * 40 + "b", *["c"] * 12, "the end of it all, at some length, to fill the row up to its very end"] * 6
    counts = {int((collate([row])["labels"] != IGNORED_LABEL).sum()) for row in packed(texts, 32)}
    assert max(counts) > 1.5 * min(counts)

    def losses(name, batch_size, accumulation):
        out = tmp_path / name
        rows = PackedRows(Texts(texts), TOKENIZER, 32, seed=0)
        schedule = Schedule(
            steps=4, batch_size=batch_size, gradient_accumulation=accumulation, lr=3e-3, warmup=0, log_every=1
        )
        train(tiny_model(), TOKENIZER, rows, out, schedule)
        return [loss for _, loss in curve(out)["train"]], weights(out)

    together, apart = losses("together", 4, 1), losses("apart", 1, 4)
    assert together[0] == pytest.approx(apart[0], rel=1e-5)
    for name, tensor in together[1].items():
        torch.testing.assert_close(tensor, apart[1][name], rtol=1e-3, atol=2e-5, msg=name)


def test_evaluation_weighs_every_token_equally(tmp_path):
    """Whatever the batch size, the held-out cost is the sum over all targets divided by their number."""
    model = tiny_model().eval()
    rows = packed(TEXTS[:7], 48)
    with torch.no_grad():
        nats = sum(model(**collate([row]), use_cache=False, num_items_in_batch=1).loss.item() for row in rows)
    labels = torch.cat([collate([row])["labels"] for row in rows], dim=1)
    expected = nats / np.log(2) / int((labels >= BYTE_OFFSET).sum())
    for batch_size in (1, 3):
        outcome = train(
            tiny_model(),
            TOKENIZER,
            PackedRows(Texts(TEXTS), TOKENIZER, 32, seed=0),
            tmp_path / str(batch_size),
            Schedule(steps=1, batch_size=batch_size, lr=1e-12, warmup=0),
            rows,
        )
        assert outcome.metrics["eval_bits_per_byte"] == pytest.approx(expected, rel=1e-5)


def test_a_time_limit_ends_a_run(tmp_path):
    outcome = run(tmp_path, steps=10_000, minutes=1e-4, eval_every=0, save_every=0)
    assert outcome.step < 50 and not outcome.interrupted
    assert outcome.metrics


@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_checkpointing": True}])
def test_options_of_the_run_train_too(tmp_path, whole_run, options):
    run(tmp_path, **options)
    got, expected = (np.array(curve(out)["train"])[:, 1] for out in (tmp_path, whole_run[0]))
    tolerance = 0.05 if "bf16" in options else 1e-4
    np.testing.assert_allclose(got, expected, rtol=tolerance)


# --- Every architecture, every report, transformers' own evaluation ---


@pytest.mark.parametrize("name", ["lact", "fwpkm", "fwmlp", "everything"])
def test_every_kind_of_module_goes_on_exactly(tmp_path, name):
    """Four steps, and two after the checkpoint of the first two: the same bits, buffers with fast weights included."""

    row = next(row for row in ROWS if row.name == name)

    def go(out, resume=False):
        rows = PackedRows(Texts(TEXTS), TOKENIZER, 48, seed=0)
        schedule = Schedule(steps=4, batch_size=2, lr=3e-3, warmup=0, save_every=2, log_every=1)
        train(row.model(), TOKENIZER, rows, out, schedule, resume=resume)
        return weights(out)

    whole = go(tmp_path / "whole")
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    again = go(tmp_path / "again", resume=True)
    assert whole.keys() == again.keys() and all(torch.equal(x, again[name]) for name, x in whole.items())
    assert curve(tmp_path / "again") == curve(tmp_path / "whole")


def test_a_checkpoint_without_its_place_in_the_data_will_do(whole_run, tmp_path):
    """It then reads what it skips."""
    shutil.copytree(whole_run[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / PLACE_FILE).unlink()
    run(tmp_path, resume=True)
    assert curve(tmp_path) == curve(whole_run[0])
    assert Place.load(tmp_path / "checkpoint-8" / PLACE_FILE).rows == 16


def test_tensorboard_gets_losses_and_health(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    run(tmp_path, report_to=("tensorboard",))
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert {"train/loss", "eval/bits_per_byte", "train/memory/gate/0", "train/memory/half_life/1"} <= set(
        events.Tags()["scalars"]
    )
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx([loss * np.log(2) for _, loss in curve(tmp_path)["train"]], rel=1e-5)


def test_trackio_gets_the_run_offline(tmp_path):
    """From the command line, into trackio's local database: the folder is read from the environment at import."""
    pytest.importorskip("trackio")
    (tmp_path / "text.txt").write_text("some text to read. " * 100)
    sizes = "--hidden-size 32 --layers 1 --heads 2 --sequence-length 64 --steps 2 --report-to trackio --out my-run"
    words = [sys.executable, "-m", "fwzoo", "train", "text.txt", *sizes.split()]
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert any("my-run" in path.name for path in (tmp_path / "trackio").iterdir())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"report_to": ("tensorbored",)}, "report_to is 'tensorbored'; allowed are 'tensorboard', 'trackio'"),
        ({"fsdp": True}, "fsdp shards a model over the GPUs of several processes, but there is 1 process"),
    ],
)
def test_what_a_run_cannot_do_is_said(tmp_path, changes, complaint):
    with pytest.raises(RunError, match=complaint):
        run(tmp_path, **changes)


def test_a_report_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"report_to is 'trackio', which is not installed: pip install 'fwzoo\[track\]'"):
        run(tmp_path, report_to=("trackio",))


def test_several_processes_and_a_time_limit_exclude_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match=r"minutes is 0.1, but clocks of 2 processes differ"):
        run(tmp_path, minutes=0.1)


@pytest.mark.parametrize("name", ["falcon3a", "fwpkm", "everything"])
def test_evaluation_with_metrics(tmp_path, name):
    """The plain Trainer gathers logits of packed batches of different lengths, and no caches."""
    model = next(row for row in ROWS if row.name == name).model()
    rows = [{"input_ids": encode(TOKENIZER, text).tolist()} for text in TEXTS[:6]]
    data = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def accuracy(prediction):
        logits, labels = prediction.predictions[..., :-1, :], prediction.label_ids[..., 1:]
        real = labels != IGNORED_LABEL
        return {"accuracy": float((logits.argmax(-1) == labels)[real].mean()), "targets": int(real.sum())}

    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model=model, args=arguments, eval_dataset=rows, data_collator=data, compute_metrics=accuracy)
    metrics = trainer.evaluate()
    assert metrics["eval_targets"] == sum(len(row["input_ids"]) - 1 for row in rows)
    with torch.no_grad():
        right = 0
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            right += int((model(ids, use_cache=False).logits[0, :-1].argmax(-1) == ids[0, 1:]).sum())
    assert metrics["eval_accuracy"] == pytest.approx(right / metrics["eval_targets"], abs=0.01)
