"""The cache that carries fast weights: named tensors a layer, and the number of tokens seen. It knows no architecture."""

from __future__ import annotations

import dataclasses
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import create_repo, upload_folder
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .memory_files import read_memory, write_memory

CACHE_KEY = "cache" if "cache" in {f.name for f in dataclasses.fields(CausalLMOutputWithPast)} else "past_key_values"
"""transformers' name for the cache: `cache` from 5.24, `past_key_values` before."""

HISTORY = 64  # calls that a recording layer can rewind

Replay = Callable[["FastWeightLayer", int], None]


SHARED = "shared_rows"  # a tensor of this name belongs to all sequences and has no batch axis
WHERE = "where"  # and this one says which of its rows a sequence holds; -1 for none


class LayerMemory:
    """The part of a layer's cache that belongs to one module: a dict of batch-first tensors.

    A tensor called `shared_rows` has no batch axis: sequences point into it with `where`, and reordering or repeating
    sequences leaves it as it is. Selecting sequences drops the rows that none of them points to any more.
    """

    def __init__(self, layer: FastWeightLayer, owner: str) -> None:
        self._layer, self._prefix = layer, f"{owner}."

    def read(self) -> dict[str, Tensor]:
        """What the module wrote last, or an empty dict."""
        size = len(self._prefix)
        return {name[size:]: x for name, x in self._layer.tensors.items() if name.startswith(self._prefix)}

    def write(self, **tensors: Tensor) -> None:
        """Replace what the module holds."""
        own = {f"{self._prefix}{name}": x for name, x in tensors.items()}
        self._layer.tensors = {**self._layer.tensors, **own}


@dataclasses.dataclass
class _Call:
    """One recorded call: how many tokens there were before it, the tensors then, and how to run its first n tokens."""

    seen: int
    tensors: dict[str, Tensor]
    replay: Replay


class FastWeightLayer(CacheLayerMixin):
    """One layer of a `FastWeightCache`.

    Attributes:
        tensors: batch-first tensors by name (but for those called `shared_rows`, see `LayerMemory`).
        seen: number of tokens, padding included, as transformers counts them.
        record_past: whether calls are recorded so that `crop` can rewind them.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self.seen = 0
        self.record_past = False
        self._calls: list[_Call] = []

    def memory(self, owner: str) -> LayerMemory:
        """The tensors that belong to the module `owner`."""
        return LayerMemory(self, owner)

    def begin(self, replay: Replay) -> None:
        """Called by a block before its modules write. `replay(layer, n)` runs the first n tokens of the call on `layer`."""
        if self.record_past:
            self._calls = [*self._calls[1 - HISTORY :], _Call(self.seen, dict(self.tensors), replay)]

    def end(self, tokens: int) -> None:
        """Called once a call, after the modules wrote."""
        self.seen += tokens
        self.is_initialized = True

    def activate_past_recording(self) -> None:
        """Record calls from now on, so that `crop` works (assisted and prompt-lookup decoding)."""
        self.record_past = True

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can rewind: only while calls are recorded."""
        return self.record_past

    def crop(self, tokens_to_remove: int) -> None:
        """Rewind by `-tokens_to_remove` tokens (transformers passes a negative number; 0 does nothing)."""
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; it must be 0 or negative: -n removes n tokens")
        if tokens_to_remove == 0:
            return
        if not self.record_past:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}, but fast weights can be rewound only while calls are recorded; "
                "call cache.activate_past_recording() before the calls that may have to be undone"
            )
        target = self.seen + tokens_to_remove
        calls = list(self._calls)
        while calls and calls[-1].seen > target:
            calls.pop()
        if not calls:
            recorded = self.seen - self._calls[0].seen if self._calls else 0
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; only the last {recorded} tokens are recorded")
        call = calls[-1]
        rewound = FastWeightLayer()
        rewound.tensors, rewound.seen = dict(call.tensors), call.seen
        if target > call.seen:
            with torch.no_grad():
                call.replay(rewound, target - call.seen)
        self.tensors, self.seen = rewound.tensors, target
        self._calls = calls if target > call.seen else calls[:-1]

    # --- sequences of the batch ---

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `function` of it; recorded calls are forgotten."""
        self.tensors = {name: function(x) for name, x in self.tensors.items()}
        self._calls = []

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every batch-first tensor by `function` of it. Raises ValueError when sequences share a memory."""
        rows = self._batch_first()
        if len({x.shape[0] for x in rows.values()}) > 1:
            raise ValueError(
                "the sequences of this cache share one memory (scope 'batch'), so they cannot be reordered, repeated or "
                "selected; a cache made in evaluation has a memory for each"
            )
        self.tensors = {**self.tensors, **{name: function(x) for name, x in rows.items()}}
        self._calls = []

    def _batch_first(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.tensors.items() if name.rpartition(".")[2] != SHARED}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes row `beam_idx[i]`."""
        self.map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (int64 positions or a bool mask)."""
        self.map_rows(lambda x: x[indices.to(x.device)])
        for name in [name for name in self.tensors if name.rpartition(".")[2] == SHARED]:
            where = f"{name[: -len(SHARED)]}{WHERE}"
            held, place = torch.unique(self.tensors[where], return_inverse=True)
            none = int(bool(held.numel()) and bool(held[0] < 0))  # unused places stay -1
            self.tensors[name] = self.tensors[name][held[none:]]
            self.tensors[where] = place - none

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        """Forget everything: as new."""
        self.tensors, self.seen, self._calls, self.is_initialized = {}, 0, [], False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())

    @property
    def batch_size(self) -> int:
        """Number of sequences. Raises AttributeError before the first call."""
        if not self.tensors:
            raise AttributeError("batch_size is not known before the first call")
        return max(x.shape[0] for x in self._batch_first().values())

    # --- what transformers asks of a layer ---

    def get_seq_length(self) -> int:
        """Number of tokens seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask that covers the tokens seen and `query_length` new ones."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: tensors appear with the first call."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Not how fast weights are stored. Raises TypeError."""
        raise TypeError(
            "update takes keys and values; a fwzoo layer holds named tensors, written through memory(owner)"
        )

    def offload(self) -> None:
        """Move the tensors to the CPU."""
        devices = {x.device for x in self.tensors.values()}
        if devices and devices != {torch.device("cpu")}:
            self._home = devices.pop()
            self.map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Bring offloaded tensors back."""
        if (home := getattr(self, "_home", None)) is not None:
            self.map(lambda x: x.to(home, non_blocking=True))


class FastWeightCache(Cache):
    """The memory of a batch of sequences: one `FastWeightLayer` a layer of the model.

    Pass it to a model as `past_key_values` (or `cache`, from transformers 5.24) to continue where it stopped. Its size
    does not grow with the number of tokens, unless a layer is softmax attention or a memory that holds the rows it wrote.

    Args:
        config: configuration of the model the cache is for.

    Example:
        >>> cache = FastWeightCache(model.config)
        >>> model(first_tokens, past_key_values=cache, use_cache=True)
        >>> cache.save_pretrained("what-it-read")
        >>> memory = FastWeightCache.from_pretrained("what-it-read", model)
        >>> model.generate(prompt, past_key_values=memory)

    Attributes:
        made_by: fingerprint of the model that made a loaded memory, until a model has taken it over.
        begins_text: whether `generate` is to read its prompt as a new text after this memory: true of a loaded one. A
            cache that is not new to `generate` otherwise stands for the beginning of the prompt, as in transformers.
    """

    layers: list[FastWeightLayer]
    made_by: str | None = None
    begins_text: bool = False
    _model: weakref.ref[Any] | None = None

    def __init__(self, config: Any) -> None:
        count = getattr(config, "num_hidden_layers", None)
        if not isinstance(count, int):
            raise TypeError(f"config is a {type(config).__name__}; it must be the configuration of a fwzoo model")
        super().__init__(layers=[FastWeightLayer() for _ in range(count)])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_model"}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def state_dict(self) -> dict[str, Tensor]:
        """Flat dict of tensors that safetensors can save: `layers.{i}.{name}`, and `layers.{i}.seen`."""
        state: dict[str, Tensor] = {}
        for i, layer in enumerate(self.layers):
            state[f"layers.{i}.seen"] = torch.tensor(layer.seen)
            state.update({f"layers.{i}.{name}": x.detach().contiguous().clone() for name, x in layer.tensors.items()})
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace the contents by what `state_dict()` returned.

        Raises:
            ValueError: the dict is for another number of layers, or holds a key that is not one of a cache.
        """
        layers: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            head, _, rest = key.partition(".")
            index, _, name = rest.partition(".")
            if head != "layers" or not index.isdigit() or not name:
                raise ValueError(f"state holds the key {key!r}; every key must be layers.<index>.<name>")
            layers.setdefault(int(index), {})[name] = value
        if set(layers) != set(range(len(self.layers))) or any("seen" not in tensors for tensors in layers.values()):
            raise ValueError(f"state holds layers {sorted(layers)}; this cache has layers 0 to {len(self.layers) - 1}")
        for i, layer in enumerate(self.layers):
            layer.reset()
            layer.seen = int(layers[i].pop("seen"))
            layer.tensors = {name: value.clone() for name, value in layers[i].items()}
            layer.is_initialized = bool(layer.tensors)

    # --- memories as files ---

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        model: Any = None,
        source: str = "",
        base_model: str | None = None,
        name: str | None = None,
    ) -> None:
        """Write the memory to a folder: safetensors, a record in JSON, and a card.

        Args:
            save_directory: the folder; made when it does not exist.
            model: the model that made it; None means the one that used this cache last.
            source: a sentence on what was read. base_model: Hub name of the model. name: where the memory will be found,
                for the card; None means the folder.

        Raises:
            ValueError: the cache is empty, or the model is not known.
        """
        model = model if model is not None or self._model is None else self._model()
        if model is None:
            raise ValueError("model is None and no model has used this cache; give the model that made the memory")
        if not self.nbytes:
            raise ValueError("the cache is empty; a memory must have read at least one token")
        record = {
            "fingerprint": model.fingerprint(),
            "model_type": model.config.model_type,
            "layers": len(self.layers),
            "tokens_seen": self.get_seq_length(),
            "source": source,
        }
        write_memory(save_directory, self.state_dict(), record, name or str(save_directory), base_model)

    @classmethod
    def from_pretrained(
        cls, name: str | Path, model: Any = None, *, force: bool = False, **hub: Any
    ) -> FastWeightCache:
        """A memory that `save_pretrained` or `push_to_hub` wrote.

        Args:
            name: folder or Hub name. model: the model that goes on from it; None means the first one that is given it.
            force: take it over into a model with another fingerprint, if it has the same shapes.
            hub: `revision`, `token`, `cache_dir`, as for a model's `from_pretrained`.

        Raises:
            ValueError: the memory is of another model, or damaged. OSError: there is none of that name.
        """
        tensors, record = read_memory(name, **hub)
        memory = cls.__new__(cls)
        Cache.__init__(memory, layers=[FastWeightLayer() for _ in range(record["layers"])])
        memory.load_state_dict(tensors)
        memory.begins_text = True
        memory.made_by = None if force else record["fingerprint"]
        if model is not None:
            model.get_decoder().take_over(memory, name)
        return memory

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        commit_message: str = "Upload a memory",
        **options: Any,
    ) -> Any:
        """Upload what `save_pretrained` writes (see there for `options`); the repository is created when it is new."""
        repo_id = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, name=repo_id, **options)
            return upload_folder(repo_id=repo_id, folder_path=folder, token=token, commit_message=commit_message)

    def used_by(self, model: Any) -> None:
        """Remember whose memory this is, for `save_pretrained`."""
        self._model = weakref.ref(model)

    def begin_text(self) -> None:
        """Count tokens from 0 again: what follows is a text of its own, read with what is remembered."""
        for layer in self.layers:
            layer.seen = 0
        self.begins_text = False

    def to(self, *args: Any, **kwargs: Any) -> FastWeightCache:
        """Move every tensor, as `torch.Tensor.to` with a device; returns self."""
        return self._map(lambda x: x.to(*args, **kwargs))

    def detach_(self) -> FastWeightCache:
        """Cut the graph behind every tensor, so that a later backward does not reach earlier calls; returns self."""
        return self._map(Tensor.detach)

    def detach(self) -> FastWeightCache:
        """A new cache with the same tensors, cut from the graph."""
        new = FastWeightCache.__new__(FastWeightCache)
        Cache.__init__(new, layers=[FastWeightLayer() for _ in self.layers])
        new.load_state_dict(self.state_dict())
        return new

    def _map(self, function: Callable[[Tensor], Tensor]) -> FastWeightCache:
        for layer in self.layers:
            layer.map(function)
        return self


def holds_fast_weights(cache: Any) -> bool:
    """Whether `cache` is a `FastWeightCache`, be it of another copy of this module, as a bundle from the Hub has one."""
    return isinstance(cache, Cache) and bool(cache.layers) and all(hasattr(x, "memory") for x in cache.layers)
