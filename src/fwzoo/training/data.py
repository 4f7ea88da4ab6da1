"""Documents to packed rows: read, tokenize, concatenate, cut, shuffle; nothing larger than a piece is held in memory.

A *document* is an iterable of text pieces that belong together. A *row* is `sequence_length` consecutive tokens of
the concatenated documents with the places where a document begins, so that a model keeps documents apart.
"""

import copy
import gzip
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch.utils.data import IterableDataset, get_worker_info
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


Bookmark = dict[str, Any]
"""Where a pass over a source stands, in JSON values that the source itself understands; empty at the beginning."""


class Source(Protocol):
    """Where documents come from: any number of passes, each in the same order unless `rng` is given.

    A pass that is handed a bookmark begins there and moves it as its text is taken. The first document of a pass that
    goes on is the rest of the one in which the bookmark was left, and may be empty.
    """

    def documents(
        self, rng: np.random.Generator | None = None, bookmark: Bookmark | None = None
    ) -> Iterator[Document]: ...


@dataclass(frozen=True)
class Texts:
    """Documents that are in memory already."""

    texts: list[str]

    def documents(self, rng: np.random.Generator | None = None, bookmark: Bookmark | None = None) -> Iterator[Document]:
        bookmark = {} if bookmark is None else bookmark
        order = range(len(self.texts)) if rng is None else rng.permutation(len(self.texts))
        if first := bookmark.get("documents", 0):
            yield ()
        for done, i in enumerate(order[first:], start=first + 1):
            bookmark["documents"] = done
            yield (self.texts[i],)


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

    def documents(self, rng: np.random.Generator | None = None, bookmark: Bookmark | None = None) -> Iterator[Document]:
        bookmark = {} if bookmark is None else bookmark
        order = range(len(self.paths)) if rng is None else rng.permutation(len(self.paths))
        first = bookmark.get("file", 0)
        for number, i in enumerate(order[first:], start=first):
            if number > first or not bookmark:
                bookmark.update(file=number, offset=0, line=0)
            path = self.paths[i]
            if _is_json(path):
                yield from _json_lines(path, self.column, bookmark)
            else:
                yield _text_pieces(path, bookmark)


def _is_json(path: str) -> bool:
    return path.removesuffix(".gz").endswith(JSON_SUFFIXES)


def _open(path: str, mode: str, **options: Any) -> Any:
    opener = gzip.open if path.endswith(".gz") else open
    return opener(path, mode, **options)


def _text_pieces(path: str, bookmark: Bookmark) -> Iterator[str]:
    """The text of a file in pieces of about a million characters that end with a line, so that words stay whole."""
    try:
        with _open(path, "rt", encoding="utf-8") as file:
            file.seek(bookmark["offset"])
            while piece := file.read(PIECE_CHARACTERS):
                piece += file.readline(PIECE_CHARACTERS)
                bookmark["offset"] = file.tell()
                yield piece
    except (UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise SourceError(f"text source {path!r} is not UTF-8 text ({error}).") from error


def _json_lines(path: str, column: str, bookmark: Bookmark) -> Iterator[Document]:
    if bookmark["offset"]:
        yield ()
    try:
        with _open(path, "rb") as file:
            file.seek(bookmark["offset"])
            while line := file.readline():
                bookmark.update(offset=file.tell(), line=bookmark["line"] + 1)
                if not line.strip():
                    continue
                record = json.loads(line)
                text = record.get(column) if isinstance(record, dict) else None
                if not isinstance(text, str):
                    found = sorted(record) if isinstance(record, dict) else type(record).__name__
                    raise SourceError(
                        f"text source {path!r} line {bookmark['line']} has no text under {column!r}, it has {found}."
                    )
                yield (text,)
    except json.JSONDecodeError as error:
        raise SourceError(
            f"text source {path!r} line {bookmark['line']} is not JSON ({error.msg}); allowed is one JSON object a line."
        ) from error
    except (UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise SourceError(f"text source {path!r} is not UTF-8 text ({error}).") from error


@dataclass(frozen=True)
class Records:
    """The records of a dataset of the `datasets` library, one document each; a streamed one is never held in memory.

    Raises:
        SourceError: (while reading) a record has no text under `column`.
    """

    dataset: Any
    column: str = "text"
    name: str = "dataset"

    def documents(self, rng: np.random.Generator | None = None, bookmark: Bookmark | None = None) -> Iterator[Document]:
        stream = self.dataset if hasattr(self.dataset, "state_dict") else self.dataset.to_iterable_dataset()
        stream = copy.deepcopy(stream)  # loading a state changes it for good
        if bookmark:
            stream.load_state_dict(bookmark["state"])
            yield ()
        for record in stream:
            text = record.get(self.column)
            if not isinstance(text, str):
                raise SourceError(f"dataset {self.name!r} has no text under {self.column!r}, it has {sorted(record)}.")
            if bookmark is not None:
                bookmark["state"] = stream.state_dict()
            yield (text,)


@dataclass(frozen=True)
class HubDataset:
    """A split of a dataset that the `datasets` library loads by name, streamed; one document a record.

    Raises:
        SourceError: the dataset does not load, or (while reading) a record has no text under `column`.
    """

    name: str
    split: str = "train"
    column: str = "text"
    _records: Records = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            import datasets
        except ImportError as error:
            raise SourceError("dataset sources need the datasets library: pip install 'fwzoo[train]'.") from error
        try:
            stream = datasets.load_dataset(self.name, split=self.split, streaming=True)
        except Exception as error:  # the library raises many unrelated classes for a name it cannot load
            raise SourceError(f"dataset {self.name!r} with split {self.split!r} does not load ({error}).") from error
        object.__setattr__(self, "_records", Records(stream, self.column, self.name))

    def documents(self, rng: np.random.Generator | None = None, bookmark: Bookmark | None = None) -> Iterator[Document]:
        return self._records.documents(rng, bookmark)


@dataclass(frozen=True)
class Share:
    """Every `nth` document of another source, or all the others: a held-out split that needs no list of documents.

    It is decided in the order without `rng`, so both parts must be read in that order; rows are shuffled later.
    """

    source: Source
    nth: int
    held_out: bool

    def documents(self, rng: np.random.Generator | None = None, bookmark: Bookmark | None = None) -> Iterator[Document]:
        bookmark = {} if bookmark is None else bookmark
        own = bookmark.setdefault("source", {})
        for i, document in enumerate(self.source.documents(bookmark=own), start=bookmark.get("document", 0)):
            bookmark["document"] = i
            if (i % self.nth == self.nth - 1) == self.held_out:
                yield document


# --- Rows ------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """`ids` int64 `[T]` and `starts`, the increasing places where a document begins or goes on; 0 comes first."""

    ids: np.ndarray
    starts: list[int]


@dataclass
class Carry:
    """Tokens that were read and are in no row yet.

    Attributes:
        parts: int64 arrays that the row being filled is made of. starts: where documents begin in it.
        rest: what is left of the piece of text being cut.
        begun: whether tokens of the document being read were placed.
    """

    parts: list[np.ndarray] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    rest: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    begun: bool = False

    @property
    def filled(self) -> int:
        return sum(map(len, self.parts))

    def row(self) -> Row:
        """The row being filled; another one begins."""
        row = Row(np.concatenate(self.parts), self.starts)
        self.parts, self.starts = [], []
        return row


def pack(
    documents: Iterable[Document],
    encode_text: Callable[[str], np.ndarray],
    end_id: int,
    length: int,
    carry: Carry | None = None,
) -> Iterator[Row]:
    """Concatenate documents, each followed by `end_id`, and cut them into rows of `length`; the last may be short.

    A document that goes on in the next row starts there anew, as a document does. Documents without text are left out.
    With a `carry` of an earlier call, it goes on where that stopped.
    """
    carry = Carry() if carry is None else carry
    for document in documents:
        yield from _placed(carry, length)
        for text in document:
            carry.rest = encode_text(text)
            yield from _placed(carry, length)
        if carry.begun:
            carry.rest = np.array([end_id])
            yield from _placed(carry, length, last=True)
    if carry.filled:
        yield carry.row()


def _placed(carry: Carry, length: int, last: bool = False) -> Iterator[Row]:
    """The rows that `carry.rest` completes; `last`: it ends its document."""
    while len(carry.rest):
        filled = carry.filled
        if filled == 0 or not carry.begun:
            carry.starts.append(filled)
        carry.begun = not last
        carry.parts.append(carry.rest[: length - filled])
        carry.rest = carry.rest[length - filled :]
        if carry.filled == length:
            yield carry.row()


@dataclass
class Place:
    """How far endless passes have come: all that the rows to come depend on, so that nothing has to be read again.

    Attributes:
        rows: rows handed out. epoch: number of the pass; began: `rows` at its beginning.
        bookmark, carry: where the source and the packing stand.
        buffer: rows that are being shuffled; with `drained`, the rest of the pass, last row first.
        rng: state of the generator that shuffles; None at the beginning of a pass.
    """

    rows: int = 0
    epoch: int = 0
    began: int = 0
    bookmark: Bookmark = field(default_factory=dict)
    carry: Carry = field(default_factory=Carry)
    buffer: list[Row] = field(default_factory=list)
    drained: bool = False
    rng: dict[str, Any] | None = None

    def copy(self) -> "Place":
        carry = replace(self.carry, parts=list(self.carry.parts), starts=list(self.carry.starts))
        return replace(self, bookmark=copy.deepcopy(self.bookmark), carry=carry, buffer=list(self.buffer))

    def save(self, path: Path) -> None:
        """Write a safetensors file: token ids, and everything else as JSON in its metadata."""
        carry = self.carry
        ids = [*(row.ids for row in self.buffer), *carry.parts, carry.rest]
        fields = {
            **{name: getattr(self, name) for name in ("rows", "epoch", "began", "bookmark", "drained", "rng")},
            "starts": [*(row.starts for row in self.buffer), carry.starts],
            "lengths": [len(x) for x in ids],
            "begun": carry.begun,
        }
        tensors = {"ids": np.concatenate(ids).astype(np.int32)}
        save_file(tensors, path, metadata={"place": json.dumps(fields, default=_integer)})

    @classmethod
    def load(cls, path: Path) -> "Place":
        """Read what `save` wrote."""
        with safe_open(path, "numpy") as file:
            fields = json.loads(file.metadata()["place"])
            ids = np.split(file.get_tensor("ids").astype(np.int64), np.cumsum(fields.pop("lengths"))[:-1])
        *starts, carried = fields.pop("starts")
        carry = Carry(ids[len(starts) : -1], carried, ids[-1], fields.pop("begun"))
        buffer = [Row(*row) for row in zip(ids[: len(starts)], starts, strict=True)]
        return cls(carry=carry, buffer=buffer, **fields)


def _integer(x: Any) -> int:
    """numpy's integers, for JSON."""
    return int(x)


class PackedRows(IterableDataset):
    """Packed rows of a source: one pass in order, or, with a seed, passes without end in random order.

    The order is a function of the source and the seed alone. Rows are shuffled in a buffer of `SHUFFLE_ROWS`; a source
    with fewer is shuffled whole. Worker processes of a DataLoader share the rows out among them.

    Attributes:
        start: the place where iteration begins; that of an earlier run makes this one go on exactly there.
        remember_every: remember the place after every so many rows, for `place_after`; 0 is never.
    """

    SHUFFLE_ROWS = 1024
    REMEMBERED = 4  # more than loaders read ahead

    def __init__(
        self, source: Source, tokenizer: PreTrainedTokenizerBase, sequence_length: int, seed: int | None = None
    ):
        if sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, got {sequence_length}.")
        self.source = source
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.seed = seed
        self.start = Place()
        self.remember_every = 0
        self._places: deque[Place] = deque(maxlen=self.REMEMBERED)

    def __iter__(self) -> Iterator[Row]:
        rows = self._pack(None) if self.seed is None else self._endless(self.seed)
        worker = get_worker_info()
        return rows if worker is None else itertools.islice(rows, worker.id, None, worker.num_workers)

    def place_after(self, rows: int) -> Place | None:
        """The place after so many rows, if it is remembered."""
        return next((place for place in self._places if place.rows == rows), None)

    def _endless(self, seed: int) -> Iterator[Row]:
        place = self.start.copy()
        while True:
            rng = np.random.default_rng([seed, place.epoch, 1])
            if place.rng is not None:
                rng.bit_generator.state = place.rng
            for row in self._shuffled(place, rng, seed):
                place.rows += 1
                if self.remember_every and (place.rows - self.start.rows) % self.remember_every == 0:
                    place.rng = dict(rng.bit_generator.state)
                    self._places.append(place.copy())
                yield row
            if place.rows == place.began:
                raise SourceError("the text sources hold no text to train on.")
            place = Place(rows=place.rows, epoch=place.epoch + 1, began=place.rows)

    def _shuffled(self, place: Place, rng: np.random.Generator, seed: int) -> Iterator[Row]:
        """The rest of a pass; `place` moves with it."""
        if not place.drained:
            order = np.random.default_rng([seed, place.epoch])
            for row in self._pack(order, place.bookmark, place.carry):
                if len(place.buffer) < self.SHUFFLE_ROWS:
                    place.buffer.append(row)
                    continue
                i = rng.integers(self.SHUFFLE_ROWS)
                place.buffer[i], row = row, place.buffer[i]
                yield row
            place.buffer = [place.buffer[i] for i in rng.permutation(len(place.buffer))]
            place.drained = True
        while place.buffer:
            yield place.buffer.pop()

    def _pack(
        self, rng: np.random.Generator | None, bookmark: Bookmark | None = None, carry: Carry | None = None
    ) -> Iterator[Row]:
        return pack(
            self.source.documents(rng, bookmark),
            lambda text: encode(self.tokenizer, text),
            self.tokenizer.eos_token_id,
            self.sequence_length,
            carry,
        )

    def count_rows(self) -> int:
        """The rows of one pass; reads the whole source once. (Short of one last row, the order does not matter.)"""
        return sum(1 for _ in self._pack(None))


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
