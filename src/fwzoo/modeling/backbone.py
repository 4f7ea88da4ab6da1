"""The backbone, written once: block, base class, Model and ForCausalLM. Architectures are thin subclasses of these."""

from __future__ import annotations

import copy
import hashlib
import json
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import TransformersKwargs, logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .. import registry
from ..configuration.base import FwzooConfig
from ..kernels import explain
from ..kernels.contract import whole_number
from .cache import CACHE_KEY, FastWeightCache, FastWeightLayer, LayerMemory, holds_fast_weights
from .code import check_code
from .decoding import graphed_decoding, graphed_step
from .loss import head_loss
from .memories.base import FastMemory, StagedBuffers, generating

logger = logging.get_logger("fwzoo")

# keywords that transformers' tools pass to every model and that mean nothing for ours
IGNORED = frozenset(TransformersKwargs.__annotations__) | {
    "assistant_tokenizer",
    "cache_position",
    "is_first_iteration",
    "token_type_ids",
    "tokenizer",
}

TEMPLATE_CARD = "This model card has been automatically generated."  # in the card that `push_to_hub` makes up


class FwzooBlock(GradientCheckpointingLayer):
    """Pre-norm residual block: a token mixer, the module in the feed-forward slot, and perhaps a memory after it."""

    def __init__(self, config: FwzooConfig, layer_index: int) -> None:
        super().__init__()
        assert config.mixers is not None and config.feed_forwards is not None
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mixer = registry.mixer(config.mixers[layer_index])(config, layer_index)
        name, module = config.feed_forwards[layer_index], None
        if name != "none":
            module = registry.feed_forward(name)
        self.feed_forward, self.memory = None, None
        if getattr(module, "is_memory", False) and config.memory_placement == "extra":
            self.memory_norm, self.memory = _sublayer(module, config, layer_index)
            module = registry.feed_forward("mlp")
        if module is not None:
            self.feed_forward_norm, self.feed_forward = _sublayer(module, config, layer_index)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        layer_past: FastWeightLayer | None = None,
    ) -> Tensor:
        """hidden `[B, T, D]`; mask bool `[B, T]`; cu_seqlens int64 `[S + 1]`; layer_past: this layer's cache."""
        inputs, mixing, feeding, remembering = hidden, None, None, None
        if layer_past is not None:

            def replay(layer: FastWeightLayer, tokens: int) -> None:
                self.forward(inputs[:, :tokens], None if mask is None else mask[:, :tokens], cu_seqlens, layer)

            layer_past.begin(replay)
            mixing, feeding = layer_past.memory("mixer"), layer_past.memory("feed_forward")
            remembering = layer_past.memory("memory")
        hidden = inputs + self.mixer(self.mixer_norm(inputs), mixing, mask, cu_seqlens)
        if self.feed_forward is not None:
            hidden = hidden + self.feed_forward(self.feed_forward_norm(hidden), feeding, mask, cu_seqlens)
        if self.memory is not None:
            hidden = hidden + self.memory(self.memory_norm(hidden), remembering, mask, cu_seqlens)
        if layer_past is not None:
            layer_past.end(inputs.shape[1])
        return hidden


def _sublayer(module: Any, config: FwzooConfig, layer_index: int) -> tuple[nn.Module, nn.Module]:
    """The norm in front of a module (none where it has its own), and the module."""
    has_own_norm = getattr(module, "has_own_norm", False)
    norm = nn.Identity() if has_own_norm else nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return norm, module(config, layer_index)


class FwzooPreTrainedModel(PreTrainedModel):
    """Initial values, loading and saving, shared by every model of the zoo."""

    config_class = FwzooConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["FwzooBlock"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values", "cache", "layer_past"]
    _is_stateful = False
    _own_card: str | None = None  # the README.md of the folder that is being saved to
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": FwzooBlock}

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, verify: bool = False, **kwargs: Any
    ) -> Any:
        """transformers' own, and with `verify=True` a check that the code beside the weights was not edited.

        Raises:
            ValueError: `verify` is True and a code file is not as it was generated. OSError: a weight file is damaged.
        """
        if verify:
            hub = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
            check_code(pretrained_model_name_or_path, **{name: kwargs[name] for name in hub if name in kwargs})
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            name = str(pretrained_model_name_or_path)
            raise OSError(f"the weights of {name!r} are damaged or incomplete ({error}); get them again") from error

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """transformers' own; what the configuration writes beside itself comes with it. A README.md that is there stays."""
        readme = Path(save_directory) / "README.md"
        self._own_card = readme.read_text(encoding="utf-8") if readme.is_file() else None
        super().save_pretrained(save_directory, *args, **kwargs)

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """transformers' own, which by now put its template where the repository had no card: ours, or the folder's, instead."""
        readme = Path(working_dir) / "README.md"
        if self._own_card is not None:
            readme.write_text(self._own_card, encoding="utf-8")
        elif registry.writes_code() and readme.is_file() and TEMPLATE_CARD in readme.read_text(encoding="utf-8"):
            tags = ModelCard.load(readme).data.tags or []
            readme.unlink()
            registry.saved(self.config, working_dir, name=repo_id, tags=tags)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
            if getattr(module, "padding_idx", None) is not None and not getattr(
                module.weight, "_is_hf_initialized", False
            ):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif hasattr(module, "initialize_parameters"):
            module.initialize_parameters(self.config)

    def kernel_report(
        self, tokens: int = 4096, device: torch.device | str | None = None
    ) -> list[tuple[int, str, str, str]]:
        """Which kernel level every layer runs for a call of `tokens` tokens: (layer, mixer, level, reason).

        Gradients count as wanted where they are enabled and a weight needs one. device: None means the model's own.
        """
        rows, config = [], self.config
        one = next(self.parameters()).new_empty(1, device=device)
        one.requires_grad_(any(weight.requires_grad for weight in self.parameters()))
        q, v = (one.expand(1, tokens, 1, size) for size in (config.head_dim, config.value_head_dim))
        for index, block in enumerate(self.get_decoder().layers):
            if block.mixer.operator is None:
                rows.append((index, self.config.mixers[index], "sdpa", "softmax attention is torch's own kernel"))
                continue
            choice = explain(block.mixer.operator, q, q, v, **getattr(block.mixer, "kernel_options", {}))
            level, reason = choice.level, choice.reason
            if config.kernel_level != "auto":
                level, reason = config.kernel_level, "set by config.kernel_level"
            rows.append((index, self.config.mixers[index], level, reason))
        return rows

    @torch.no_grad()
    def fingerprint(self) -> str:
        """32 hexadecimal digits of the backbone's weights and options: what a memory file is bound to.

        The weights count in bfloat16, so that a model has one fingerprint whether it is loaded in float32 or bfloat16.
        """
        config, hashed = self.config, hashlib.sha256()
        families = [part for part in registry.parts(config) if issubclass(part, FwzooConfig)]
        options = {name: getattr(config, name) for family in families for name in family.options()}
        hashed.update(json.dumps([config.mixers, config.feed_forwards, options], sort_keys=True).encode())
        for name, x in sorted(self.get_decoder().state_dict().items()):
            x = x.to(torch.bfloat16) if x.is_floating_point() else x
            hashed.update(f"{name} {list(x.shape)}".encode())
            hashed.update(x.reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return hashed.hexdigest()[:32]

    @torch.no_grad()
    def memorize(
        self,
        input_ids: Tensor,
        passes: int = 1,
        cache: FastWeightCache | None = None,
        *,
        piece_size: int | None = None,
        on_piece: Callable[[int, int, Tensor], None] | None = None,
    ) -> FastWeightCache:
        """Read a context `passes` times and write all of it into the memories of a cache.

        Args:
            input_ids: int64 `[B, T]`. passes: how often to read it.
            cache: the cache to go on with (it is updated in place); None begins a new one.
            piece_size: tokens a call, None for all at once. A long text in pieces takes less memory; the result is the same.
            on_piece: called after every piece with the number of the pass, from 1, the position of the first token of the
                piece, and its final hidden states `[B, piece, D]`.

        Returns:
            The cache. The memories have written their last chunk too, though it may not be full.
        """
        if isinstance(passes, bool) or not isinstance(passes, int):
            raise TypeError(f"passes is {passes!r}; it must be an int of at least 1")
        if passes < 1:
            raise ValueError(f"passes is {passes}; it must be at least 1")
        if piece_size is not None:
            whole_number("piece_size", piece_size, 1)
        decoder = self.get_decoder()
        cache = FastWeightCache(self.config) if cache is None else cache
        with generating():
            for number in range(1, passes + 1):
                start = 0
                for piece in input_ids.split(piece_size, 1) if piece_size else [input_ids]:
                    outputs = decoder(piece, use_cache=True, **{CACHE_KEY: cache})
                    if on_piece is not None:
                        on_piece(number, start, outputs.last_hidden_state)
                    start += piece.shape[1]
            for memory, held in decoder.fast_memories(cache):
                held.write(**memory.flush(memory.state(held.read()))._asdict())
        return cache

    @torch.no_grad()
    def fast_weights_to_checkpoint(self, cache: FastWeightCache) -> None:
        """Make the memories of one sequence the fast weights that every new sequence starts from.

        Tokens that are still pending in the cache are not written (`memorize` leaves none). The cache itself belongs to
        the fast weights of before, and is of no use afterwards.

        Args:
            cache: a cache of one sequence, of this model.
        """
        decoder = self.get_decoder()
        if not isinstance(cache, FastWeightCache):
            raise TypeError(f"cache is a {type(cache).__name__}; it must be a fwzoo.FastWeightCache")
        if not cache.layers[0].tensors or cache.batch_size != 1:
            held = cache.batch_size if cache.layers[0].tensors else 0
            raise ValueError(f"cache holds {held} sequences; the memory of exactly 1 can become the checkpoint's")
        for memory, held in decoder.fast_memories(cache):
            memory.place(**memory.carried(memory.state(held.read())))

    @torch.no_grad()
    def state_bytes(self) -> list[int]:
        """Bytes of cache that one sequence needs, for every layer (after one token)."""
        cache = FastWeightCache(self.config)
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.get_decoder()(token, use_cache=True, **{CACHE_KEY: cache})
        return [layer.nbytes for layer in cache.layers]


class FwzooModel(FwzooPreTrainedModel):
    """Embeddings, blocks and the final norm: token ids to hidden states."""

    def __init__(self, config: FwzooConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([FwzooBlock(config, i) for i in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: FastWeightCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: FastWeightCache | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the last layer.

        Args:
            input_ids: int64 `[B, T]`, or inputs_embeds `[B, T, D]`.
            attention_mask: `[B, T]`, or `[B, tokens in the cache + T]`; 0 for padding, which may stand anywhere.
            position_ids: `[B, T]`; with batch size 1, no mask and no cache, a restart at 0 begins a new document.
            past_key_values, cache: two names of one `FastWeightCache` to continue from; it is updated in place.
            use_cache: return the cache; default: `config.use_cache` outside of training.
            cu_seq_lens_q: int `[S + 1]`, boundaries of documents packed into a batch of one.
            seq_idx: `[1, T]`, document number of every token; the same as cu_seq_lens_q.
            kwargs: keywords of transformers' tools; `output_hidden_states` (True, or layer numbers) also returns the input
                of every block and the final states.

        Raises:
            ValueError, TypeError: an argument has a wrong type, shape or value; the message names it.
        """
        self._check_keywords(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            both = "both" if input_ids is not None else "neither"
            raise ValueError(f"{both} of input_ids and inputs_embeds were given; give exactly one of them")
        if inputs_embeds is None:
            assert input_ids is not None
            self._check_ids(input_ids)
            inputs_embeds = self.embed_tokens(input_ids)
        past = self._resolve_cache(past_key_values, cache)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and self.training and self.gradient_checkpointing and torch.is_grad_enabled():
            logger.warning_once("use_cache=True does not go with gradient checkpointing; the cache is not returned")
            use_cache, past = False, None
        if use_cache and past is None:
            past = FastWeightCache(self.config)
        if past is not None and not torch.compiler.is_compiling():
            past.used_by(self)
        mask = self._token_mask(attention_mask, inputs_embeds, past)
        cu_seqlens = self._document_bounds(inputs_embeds, attention_mask, position_ids, past, cu_seq_lens_q, seq_idx)
        sequences = inputs_embeds.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if past is not None and past.batch_size not in (-1, sequences):
            raise ValueError(f"{CACHE_KEY} holds {past.batch_size} sequences; this call has {sequences}")

        self.commit()
        hidden = inputs_embeds
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, mask, cu_seqlens, layer_past=None if past is None else past.layers[index])
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            **{CACHE_KEY: past if use_cache else None},
        )

    def steps_alike(self) -> bool:
        """Whether decoding one token does the same work on tensors of the same shapes every time, in every layer."""
        parts = (part for layer in self.layers for part in (layer.mixer, layer.feed_forward, layer.memory))
        return all(part is None or getattr(part, "steps_alike", False) for part in parts)

    def steps_left(self, cache: FastWeightCache) -> int | None:
        """How many tokens can be decoded one by one until a layer does other work than before; None: any number."""
        parts = ((layer.mixer, past) for layer, past in zip(self.layers, cache.layers, strict=True))
        left = [part.steps_left(past.memory("mixer")) for part, past in parts if hasattr(part, "steps_left")]
        return min(left, default=None)

    def memories(self) -> dict[int, StagedBuffers]:
        """The memory of every layer that has one, by layer number."""
        slots = ((i, slot) for i, layer in enumerate(self.layers) for slot in (layer.feed_forward, layer.memory))
        return {i: slot for i, slot in slots if isinstance(slot, StagedBuffers)}

    def fast_memories(self, cache: FastWeightCache) -> Iterator[tuple[FastMemory, LayerMemory]]:
        """Every memory that is written while it is read, with what a cache holds of it."""
        for layer, past in zip(self.layers, cache.layers, strict=True):
            for owner in ("feed_forward", "memory"):
                if isinstance(memory := getattr(layer, owner), FastMemory):
                    yield memory, past.memory(owner)

    def commit(self) -> None:
        """Put in place what the last training step changed in the memories' buffers."""
        for memory in self.memories().values():
            memory.commit()

    def _check_ids(self, input_ids: Tensor) -> None:
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}; it must be [B, T]")
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"input_ids has dtype {input_ids.dtype}; it must be torch.int64")
        if input_ids.device.type == "cpu" and input_ids.numel() and not torch.compiler.is_compiling():
            low, high = (int(x) for x in input_ids.aminmax())
            last = self.embed_tokens.num_embeddings - 1
            if low < 0 or high > last:
                raise ValueError(
                    f"input_ids ranges from {low} to {high}; it must lie within the vocabulary, 0 to {last}"
                )

    def _check_keywords(self, kwargs: dict[str, Any]) -> None:
        if unknown := set(kwargs) - IGNORED:
            raise TypeError(f"{sorted(unknown)[0]} is not an argument of {type(self).__name__}.forward")
        if kwargs.get("output_attentions"):
            raise ValueError(
                "output_attentions is True; fast-weight layers have no attention maps, so it must be False"
            )

    def _resolve_cache(self, past_key_values: Any, cache: Any) -> FastWeightCache | None:
        if past_key_values is not None and cache is not None and past_key_values is not cache:
            raise ValueError("past_key_values and cache are two names of one argument; give only one of them")
        past = cache if past_key_values is None else past_key_values
        if past is not None and not holds_fast_weights(past):
            raise TypeError(f"{CACHE_KEY} is a {type(past).__name__}; a fwzoo model takes a fwzoo.FastWeightCache")
        if past is not None and len(past.layers) != len(self.layers):
            raise ValueError(f"{CACHE_KEY} has {len(past.layers)} layers; this model has {len(self.layers)}")
        if past is not None and past.made_by is not None:
            self.take_over(past, CACHE_KEY)
        return past

    @torch.no_grad()
    def take_over(self, memory: FastWeightCache, name: Any) -> None:
        """Check that a loaded memory is this model's, and bring it to the devices of the layers.

        Raises:
            ValueError: it was made by another model, or (when loaded with `force=True`) has other shapes.
        """
        own = self.fingerprint()
        if memory.made_by not in (None, own):
            raise ValueError(
                f"{str(name)!r} is the memory of a model with fingerprint {memory.made_by}; this model has {own}"
            )
        if len(memory.layers) != len(self.layers):
            raise ValueError(f"{str(name)!r} has {len(memory.layers)} layers; this model has {len(self.layers)}")
        for layer, block in zip(memory.layers, self.layers, strict=True):
            layer.map(operator.methodcaller("to", next(block.parameters()).device))
        if memory.made_by is None:
            trial, token = copy.deepcopy(memory), torch.zeros(memory.batch_size, 1, dtype=torch.long)
            try:
                self(token.to(self.device), use_cache=True, **{CACHE_KEY: trial})
            except (ValueError, TypeError, RuntimeError) as error:
                raise ValueError(f"{str(name)!r} does not fit this model: {error}") from error
        memory.made_by = None

    def _token_mask(self, attention_mask: Tensor | None, embeds: Tensor, past: FastWeightCache | None) -> Tensor | None:
        """bool `[B, T]` for the new tokens, or None when all are real."""
        if attention_mask is None:
            return None
        batch, tokens = embeds.shape[:2]
        total = tokens + (past.get_seq_length() if past is not None else 0)
        if (
            attention_mask.ndim != 2
            or attention_mask.shape[0] != batch
            or attention_mask.shape[1] not in (tokens, total)
        ):
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}; it must be [B, T] = {[batch, tokens]}, "
                f"or {[batch, total]} with the tokens in the cache"
            )
        mask = attention_mask[:, attention_mask.shape[1] - tokens :] != 0
        if not torch.compiler.is_compiling() and mask.device.type == "cpu" and bool(mask.all()):
            return None
        return mask

    def _document_bounds(
        self,
        embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past: FastWeightCache | None,
        cu_seq_lens_q: Tensor | None,
        seq_idx: Tensor | None,
    ) -> Tensor | None:
        """int64 `[S + 1]`, or None when the batch is not packed."""
        if cu_seq_lens_q is not None:
            return cu_seq_lens_q.to(torch.int64)
        numbers = seq_idx
        fresh = past is None or past.get_seq_length() == 0
        if numbers is None and position_ids is not None and attention_mask is None and fresh and embeds.shape[0] == 1:
            numbers = (position_ids == 0).cumsum(-1)
        if numbers is None:
            return None
        if numbers.shape != embeds.shape[:2] or embeds.shape[0] != 1:
            raise ValueError(f"seq_idx has shape {list(numbers.shape)}; packed input must have shape [1, T]")
        borders = torch.nonzero(numbers[0, 1:] != numbers[0, :-1]).flatten() + 1
        if seq_idx is None and borders.numel() == 0:
            return None
        ends = borders.new_tensor([embeds.shape[1]])
        return torch.cat([borders.new_zeros(1), borders, ends])


class FwzooForCausalLM(FwzooPreTrainedModel, GenerationMixin):
    """A language model over any backbone of the zoo: hidden states to logits, loss and generation."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: FwzooConfig) -> None:
        super().__init__(config)
        self.model = base_model_class(type(self))(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: FastWeightCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cache: FastWeightCache | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Next-token logits, and the loss where labels are given.

        Args:
            labels: int64 `[B, T]`, the input ids themselves (they are shifted here); -100 is ignored.
            logits_to_keep: compute logits of the last n positions only (0: all), or of an index tensor.
            skip_logits: return the loss alone (`logits` is None): the logits of all tokens then never exist at once, which
                is what a large vocabulary needs in training.
            kwargs: `num_items_in_batch`, the number of labels to divide the summed loss by; `shift_labels`, labels `[B, T]`
                that are shifted already and take the place of `labels` in the loss; and other keywords that transformers'
                tools pass.
            (the others): see `FwzooModel.forward`.
        """
        # not in the signature: the Trainer takes every parameter called so for a column that each batch must have
        shift_labels = kwargs.pop("shift_labels", None)
        past = cache if past_key_values is None else past_key_values
        others = (inputs_embeds, labels, shift_labels, cu_seq_lens_q, seq_idx, *kwargs.values())
        if (
            (graphed := graphed_step()) is not None
            and not any(x is not None and x is not False for x in others)
            and graphed.allows(self, input_ids, past)
        ):
            assert input_ids is not None and past is not None
            mask = self.model._token_mask(attention_mask, input_ids, past)
            if (logits := graphed(self._step, input_ids, mask, past)) is not None:
                return CausalLMOutputWithPast(logits=logits, **{CACHE_KEY: past})
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            cu_seq_lens_q=cu_seq_lens_q,
            seq_idx=seq_idx,
            return_dict=True,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        labelled = labels is not None or shift_labels is not None
        if labels is not None and labels.shape != hidden.shape[:2]:
            raise ValueError(f"labels has shape {list(labels.shape)}; it must be [B, T] = {list(hidden.shape[:2])}")
        target = {
            "labels": labels,
            "shift_labels": shift_labels,
            "vocab_size": self.config.vocab_size,
            "num_items_in_batch": kwargs.get("num_items_in_batch"),
        }
        logits, loss = None, None
        if skip_logits:
            if not labelled:
                raise ValueError(
                    "skip_logits is True; it needs labels or shift_labels, because it returns the loss alone"
                )
            loss = head_loss(self.lm_head, hidden, **target)
        else:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, keep, :])
            loss = self.loss_function(logits=logits, **target) if labelled else None
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{CACHE_KEY: getattr(outputs, CACHE_KEY)},
        )

    def _step(self, input_ids: Tensor, mask: Tensor | None, cache: FastWeightCache) -> Tensor:
        """Logits of one decoding step, which advances the cache."""
        outputs = self.model(input_ids, attention_mask=mask, use_cache=True, **{CACHE_KEY: cache})
        return self.lm_head(outputs.last_hidden_state)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`; every sequence has its own memory, in training mode too.

        On a GPU, decoding steps run as a CUDA graph where every layer's state has a fixed size; `disable_compile=True`
        (an option of transformers' generation configuration) turns that off.
        """
        config = kwargs.get("generation_config") or self.generation_config
        with generating(), graphed_decoding(not kwargs.get("disable_compile", config.disable_compile)):
            return super().generate(*args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Give `generate` our cache, unless the user gave one or wants none."""
        given = model_kwargs.get(CACHE_KEY)
        if given is not None:
            self.model._resolve_cache(given, None)
            given._is_user_defined = True
            if given.begins_text:
                given.begin_text()
        elif generation_config.use_cache is not False:
            model_kwargs[CACHE_KEY] = FastWeightCache(self.config)
            if getattr(generation_config, "is_assistant", False):
                model_kwargs[CACHE_KEY].activate_past_recording()


_CLASSES: dict[str, tuple[type[FwzooModel], type[FwzooForCausalLM]]] = {}


def architecture_classes(
    config_class: type[FwzooConfig], module: str = "fwzoo"
) -> tuple[type[FwzooModel], type[FwzooForCausalLM]]:
    """The Model and ForCausalLM of a configuration class: thin subclasses, named after it, that the Auto classes need.

    `module` is where they are found under their names.
    """
    if config_class.model_type not in _CLASSES:
        _CLASSES[config_class.model_type] = _make_classes(config_class, module)
    return _CLASSES[config_class.model_type]


def _make_classes(config_class: type[FwzooConfig], module: str) -> tuple[type[FwzooModel], type[FwzooForCausalLM]]:
    name = config_class.__name__.removesuffix("Config")
    about = (config_class.__doc__ or "").split("\n")[0]
    made = []
    for base, suffix in ((FwzooModel, "Model"), (FwzooForCausalLM, "ForCausalLM")):
        body = {"config_class": config_class, "__doc__": about, "__module__": module}
        made.append(type(f"{name}{suffix}", (base,), body))
    return made[0], made[1]


def base_model_class(causal_class: type[FwzooForCausalLM]) -> type[FwzooModel]:
    """The Model class that belongs to a ForCausalLM class."""
    if causal_class.config_class is FwzooConfig:
        return FwzooModel
    return architecture_classes(causal_class.config_class)[0]
