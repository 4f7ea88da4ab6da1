"""Real English text that every CPython ships: the topics of its language reference, about half a megabyte.

It lets a first training run need no download. It is technical prose with markup, not a benchmark.
"""

from typing import NamedTuple


class Split(NamedTuple):
    """Documents for fitting and documents held out; no document is in both."""

    train: list[str]
    held_out: list[str]


def pydoc_topics(held_out_share: float = 0.1) -> Split:
    """Split CPython's help topics into training and held-out documents.

    Topics are sorted by name, one of several topics with equal text is kept, and the last ones in that order that
    begin within the final `held_out_share` of all characters are held out. Deterministic for a Python version.
    """
    from pydoc_data.topics import topics

    texts = list(dict.fromkeys(topics[name] for name in sorted(topics)))
    border = (1 - held_out_share) * sum(map(len, texts))
    split = Split([], [])
    start = 0
    for text in texts:
        (split.held_out if start >= border else split.train).append(text)
        start += len(text)
    return split
