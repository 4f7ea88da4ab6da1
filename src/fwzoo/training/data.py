"""Documents to packed rows: read, tokenize, concatenate, cut, shuffle; nothing larger than a piece is held in memory.

A *document* is an iterable of text pieces that belong together. A *row* is `sequence_length` consecutive tokens of
the concatenated documents with the places where a document begins, so that a model keeps documents apart.
"""

import gzip
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from ..modeling.loss import IGNORED_LABEL

BYTE_OFFSET = 3
"""ByT5's id of byte 0: its ids 0, 1 and 2 are padding, end of document and unknown."""

PIECE_CHARACTERS = 1 << 20
JSON_SUFFIXES = (".jsonl", ".json")

Document = Iterable[str]


# --- Tokenizers ------------------------------------------------------------------------------------------------------


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the byte-level tokenizer for `"bytes"`, else what AutoTokenizer loads; it must know an end of text.

    Raises:
        ValueError: nothing loads under that name, or the tokenizer has no end-of-text token.
    """
    if name == "bytes":
        return ByT5Tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"tokenizer {name!r} does not load ({reason}); allowed are 'bytes', a folder and a Hub name."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer {name!r} has no end-of-text token (eos_token), which separates documents.")
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    """The token ids of plain text, int64 `[n]`, without special tokens at the ends.

    Bytes are converted directly: fast, and a text that contains `</s>` is nothing but bytes.
    """
    if isinstance(tokenizer, ByT5Tokenizer):
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.int64) + BYTE_OFFSET
    return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)


# --- Sources of documents --------------------------------------------------------------------------------------------


class SourceError(ValueError):
    """Text that cannot be read: a sentence with the source, what it is, and what is allowed."""


class Source(Protocol):
    """Where documents come from: any number of passes, each in the same order unless `rng` is given."""

    def documents(self, rng: np.random.Generator | None = None) -> Iterator[Document]: ...


@dataclass(frozen=True)
class Texts:
    """Documents that are in memory already."""

    texts: list[str]

    def documents(self, rng: np.random.Generator | None = None) -> Iterator[Document]:
        order = range(len(self.texts)) if rng is None else rng.permutation(len(self.texts))
        return ((self.texts[i],) for i in order)


@dataclass(frozen=True)
class Files:
    """Text files, one document each, and JSON-lines files (`.jsonl`, `.json`), one document a line; all may be
    compressed (`.gz`). With `rng` the files are taken in random order; within a file the order stays.

    Raises:
        SourceError: a path is not a file, or (while reading) a JSON line has no text under `column`.
    """

    paths: tuple[str, ...]
    column: str = "text"

    def __post_init__(self) -> None:
        for path in self.paths:
            if not Path(path).is_file():
                what = "is a folder" if Path(path).is_dir() else "does not exist"
                raise SourceError(f"text source {path!r} {what}; allowed are text files and JSON-lines files.")

    def documents(self, rng: np.random.Generator | None = None) -> Iterator[Document]:
        order = range(len(self.paths)) if rng is None else rng.permutation(len(self.paths))
        for i in order:
            path = self.paths[i]
            if _is_json(path):
                yield from _json_lines(path, self.column)
            else:
                yield _text_pieces(path)


def _is_json(path: str) -> bool:
    return path.removesuffix(".gz").endswith(JSON_SUFFIXES)


def _open(path: str) -> Any:
    opener = gzip.open if path.endswith(".gz") else open
    return opener(path, "rt", encoding="utf-8")


def _text_pieces(path: str) -> Iterator[str]:
    """The text of a file in pieces of about a million characters that end with a line, so that words stay whole."""
    try:
        with _open(path) as file:
            while piece := file.read(PIECE_CHARACTERS):
                yield piece + file.readline(PIECE_CHARACTERS)
    except (UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise SourceError(f"text source {path!r} is not UTF-8 text ({error}).") from error


def _json_lines(path: str, column: str) -> Iterator[Document]:
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                record = json.loads(line)
                text = record.get(column) if isinstance(record, dict) else None
                if not isinstance(text, str):
                    found = sorted(record) if isinstance(record, dict) else type(record).__name__
                    raise SourceError(
                        f"text source {path!r} line {number} has no text under {column!r}, it has {found}."
                    )
                yield (text,)
    except json.JSONDecodeError as error:
        raise SourceError(
            f"text source {path!r} line {number} is not JSON ({error.msg}); allowed is one JSON object a line."
        ) from error
    except (UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise SourceError(f"text source {path!r} is not UTF-8 text ({error}).") from error


@dataclass(frozen=True)
class HubDataset:
    """A split of a dataset that the `datasets` library loads by name, streamed; one document a record.

    Raises:
        SourceError: the dataset does not load, or (while reading) a record has no text under `column`.
    """

    name: str
    split: str = "train"
    column: str = "text"
    _stream: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            import datasets
        except ImportError as error:
            raise SourceError("dataset sources need the datasets library: pip install 'fwzoo[train]'.") from error
        try:
            stream = datasets.load_dataset(self.name, split=self.split, streaming=True)
        except Exception as error:  # the library raises many unrelated classes for a name it cannot load
            raise SourceError(f"dataset {self.name!r} with split {self.split!r} does not load ({error}).") from error
        object.__setattr__(self, "_stream", stream)

    def documents(self, rng: np.random.Generator | None = None) -> Iterator[Document]:
        for record in self._stream:
            text = record.get(self.column)
            if not isinstance(text, str):
                raise SourceError(f"dataset {self.name!r} has no text under {self.column!r}, it has {sorted(record)}.")
            yield (text,)


@dataclass(frozen=True)
class Share:
    """Every `nth` document of another source, or all the others: a held-out split that needs no list of documents.

    It is decided in the order without `rng`, so both parts must be read in that order; rows are shuffled later.
    """

    source: Source
    nth: int
    held_out: bool

    def documents(self, rng: np.random.Generator | None = None) -> Iterator[Document]:
        for i, document in enumerate(self.source.documents()):
            if (i % self.nth == self.nth - 1) == self.held_out:
                yield document


# --- Rows ------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """`ids` int64 `[T]` and `starts`, the increasing places where a document begins or goes on; 0 comes first."""

    ids: np.ndarray
    starts: list[int]


def pack(
    documents: Iterable[Document], encode_text: Callable[[str], np.ndarray], end_id: int, length: int
) -> Iterator[Row]:
    """Concatenate documents, each followed by `end_id`, and cut them into rows of `length`; the last may be short.

    A document that goes on in the next row starts there anew, as a document does. Documents without text are left out.
    """
    parts: list[np.ndarray] = []
    starts: list[int] = []
    filled = 0
    for document in documents:
        new = True
        tokens = (encode_text(piece) for piece in document)
        tokens = (ids for ids in tokens if len(ids))
        for ids in _followed_by(tokens, np.array([end_id])):
            while len(ids):
                if new or filled == 0:
                    starts.append(filled)
                    new = False
                parts.append(ids[: length - filled])
                filled += len(parts[-1])
                ids = ids[len(parts[-1]) :]
                if filled == length:
                    yield Row(np.concatenate(parts), starts)
                    parts, starts, filled = [], [], 0
    if filled:
        yield Row(np.concatenate(parts), starts)


def _followed_by(arrays: Iterable[np.ndarray], last: np.ndarray) -> Iterator[np.ndarray]:
    """`arrays` and then `last`, or nothing when there are no arrays."""
    some = False
    for array in arrays:
        some = True
        yield array
    if some:
        yield last


class PackedRows(IterableDataset):
    """Packed rows of a source: one pass in order, or, with a seed, passes without end in random order.

    The order is a function of the source and the seed alone, so a run that skips the rows it has seen goes on
    exactly where it stopped. Rows are shuffled in a buffer of `SHUFFLE_ROWS`; a source with fewer is shuffled whole.
    """

    SHUFFLE_ROWS = 1024

    def __init__(
        self, source: Source, tokenizer: PreTrainedTokenizerBase, sequence_length: int, seed: int | None = None
    ):
        if sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, got {sequence_length}.")
        self.source = source
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.seed = seed

    def __iter__(self) -> Iterator[Row]:
        if self.seed is None:
            yield from self._one_pass(None)
            return
        for epoch in itertools.count():
            rng = np.random.default_rng([self.seed, epoch])
            empty = True
            for row in _shuffled(self._one_pass(rng), rng, self.SHUFFLE_ROWS):
                empty = False
                yield row
            if empty:
                raise SourceError("the text sources hold no text to train on.")

    def _one_pass(self, rng: np.random.Generator | None) -> Iterator[Row]:
        return pack(
            self.source.documents(rng),
            lambda text: encode(self.tokenizer, text),
            self.tokenizer.eos_token_id,
            self.sequence_length,
        )

    def count_rows(self) -> int:
        """The rows of one pass; reads the whole source once. (Short of one last row, the order does not matter.)"""
        return sum(1 for _ in self._one_pass(None))


def _shuffled(rows: Iterable[Row], rng: np.random.Generator, size: int) -> Iterator[Row]:
    buffer: list[Row] = []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
            continue
        i = rng.integers(size)
        buffer[i], row = row, buffer[i]
        yield row
    for i in rng.permutation(len(buffer)):
        yield buffer[i]


def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Join rows into one batch of size 1, told apart by their boundaries.

    Returns:
        `input_ids` and `labels` int64 `[1, T]` with T the sum of the rows' lengths, and `cu_seq_lens_q` int64
        `[S + 1]`. Labels are not shifted (the model does that); a document's first token is no one's target.
    """
    ids = np.concatenate([row.ids for row in rows])
    offsets = np.cumsum([0] + [len(row.ids) for row in rows])
    starts = np.concatenate([offset + np.array(row.starts) for offset, row in zip(offsets, rows, strict=False)])
    labels = ids.copy()
    labels[starts] = IGNORED_LABEL
    return {
        "input_ids": torch.from_numpy(ids)[None],
        "labels": torch.from_numpy(labels)[None],
        "cu_seq_lens_q": torch.from_numpy(np.append(starts, len(ids))),
    }
