"""The configuration every architecture shares: sizes, and what sits in each layer."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig
from transformers.utils import logging

from .. import registry
from .layout import format_layout, parse_layout

logger = logging.get_logger("fwzoo")

# fields that transformers and the bundle of code keep in a configuration
NOT_OURS = frozenset(
    [
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "fwzoo_code",
        "model_type",
        "name_or_path",
        "output_attentions",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
    ]
)


class FwzooConfig(PretrainedConfig):
    """Sizes common to all architectures, and the mixer and feed-forward module of every layer.

    Args:
        vocab_size: number of tokens. hidden_size: width D of the model.
        intermediate_size: width of the SwiGLU feed-forward; None means 8/3 D rounded up to a multiple of 64.
        num_hidden_layers: number of blocks. num_attention_heads: heads H of every mixer.
        head_dim: key size K a head; None means D / H. value_head_dim: value size V a head; None means K.
        mixers: name of the token mixer of every layer; None means the architecture's own everywhere.
        feed_forwards: name of the module in the feed-forward slot of every layer; None means the
            architecture's own ("mlp" everywhere, but for the memories).
        norm_eps: epsilon of the RMSNorms. initializer_range: standard deviation of initial matrices.
        kernel_level: level of every operator: "auto", "reference", "chunk" or "triton".
        use_cache: return the cache when not training. tie_word_embeddings: share input and output embeddings.

    Options of mixers and memories are fields of their family's configuration; a hybrid takes those of every one it names.

    Raises:
        ValueError, TypeError: a field has a value that is not allowed; the message names field and value.
    """

    model_type = "fwzoo"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    default_mixer: ClassVar[str] = ""

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    head_dim: int | None = None
    value_head_dim: int | None = None
    mixers: list[str] | None = None
    feed_forwards: list[str] | None = None
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    kernel_level: str = "auto"
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if "layer_types" in kwargs:
            raise ValueError(f"layer_types is {kwargs['layer_types']!r}; it is derived from mixers and cannot be set")
        if "layout" in kwargs:
            raise ValueError(f"layout is {kwargs['layout']!r}; give it to {type(self).__name__}.from_layout")
        if registry.writes_code():  # what a saved model says of its own code is written anew when it is saved
            for name in ("auto_map", "fwzoo_code"):
                kwargs.pop(name, None)
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        optional = ("intermediate_size", "head_dim", "value_head_dim")
        for name in sizes + tuple(name for name in optional if getattr(self, name) is not None):
            self._check_int(name, 1)
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; it must divide hidden_size = {self.hidden_size} "
                "unless head_dim is given"
            )
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // (3 * 64)) * 64
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.value_head_dim is None:
            self.value_head_dim = self.head_dim
        count = self.num_hidden_layers
        self.mixers = self._layers("mixers", [self.default_mixer] * count, registry.mixer_options())
        names = registry.feed_forward_names()
        self.feed_forwards = self._layers("feed_forwards", self.default_feed_forwards(count), names)
        known = {**registry.mixer_options(), **registry.feed_forward_options()}
        for family in dict.fromkeys(known[name] for name in (*self.mixers, *self.feed_forwards) if name in known):
            for name, value in family.options().items():
                if not hasattr(self, name):
                    setattr(self, name, kwargs.pop(name, value))
            family.check_options(self)
        self._check_choice("kernel_level", ("auto", "reference", "chunk", "triton"))
        if unknown := sorted(set(kwargs) - NOT_OURS):
            logger.warning(
                f"{type(self).__name__} keeps {', '.join(unknown)} without effect: a field that this version of fwzoo does "
                "not know, because it is misspelt or was written by a newer version"
            )
        super().__post_init__(**kwargs)

    # --- what a family adds ---

    @classmethod
    def default_feed_forwards(cls, layers: int) -> list[str]:
        """What sits in the feed-forward slots of a model of `layers` layers when `feed_forwards` is not given."""
        return ["mlp"] * layers

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Names and defaults of the options that this family adds to the common fields."""
        common = FwzooConfig.__dataclass_fields__
        own = cls.__dataclass_fields__
        return {name: field.default for name, field in own.items() if name not in common}

    @staticmethod
    def check_options(config: FwzooConfig) -> None:
        """Validate (and complete) this family's options on `config`, which may be of another family."""

    @classmethod
    def tiny(cls, **overrides: Any) -> FwzooConfig:
        """A model for tests and first steps: byte vocabulary, two layers, built on a CPU in well under a second."""
        sizes: dict[str, Any] = {
            "vocab_size": 384,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }
        return cls(**{**sizes, **overrides})

    # --- layouts ---

    @classmethod
    def from_layout(cls, layout: str, **fields: Any) -> FwzooConfig:
        """The configuration of a layout (see `fwzoo.configuration.layout`), with further fields by keyword.

        Called on `FwzooConfig` itself, the architecture is the first one in the layout: that of a mixer, else that of a
        feed-forward module, else the first one registered, whose own mixer then is in no layer.

        Example:
            >>> FwzooConfig.from_layout("falcon3a*3,swa", num_hidden_layers=12, hidden_size=256, num_attention_heads=4)

        Raises:
            ValueError, TypeError: the layout or a field is not allowed; for the layout, the message shows the position.
        """
        for name in ("mixers", "feed_forwards"):
            if name in fields:
                raise ValueError(
                    f"{name} is {fields[name]!r}, but the layout says what is in every layer; give only one"
                )
        layers = fields.get("num_hidden_layers", cls.__dataclass_fields__["num_hidden_layers"].default)
        if isinstance(layers, int) and layers >= 1:  # or else the constructor says what is wrong
            fields["mixers"], fields["feed_forwards"] = parse_layout(layout, layers)
        if cls is FwzooConfig:
            known = registry.architectures()
            named = [name for name in (*fields.get("mixers", ()), *fields.get("feed_forwards", ())) if name in known]
            cls = known[next(iter([*named, *known]))]
        return cls(**fields)

    @property
    def layout(self) -> str:
        """Mixers and feed-forward modules in canonical layout notation."""
        return format_layout(self.mixers or [], self.feed_forwards or [])

    # --- what transformers asks for ---

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """transformers' own; the folder also gets the code that loads the model without fwzoo, and a card where it has none."""
        super().save_pretrained(save_directory, push_to_hub, **kwargs)
        registry.saved(self, save_directory)

    @property
    def layer_types(self) -> list[str]:
        """The layers in transformers' own vocabulary, derived from `mixers`."""
        known = ("full_attention", "sliding_attention")
        return [name if name in known else "linear_attention" for name in self.mixers or []]

    # --- checks ---

    def _layers(self, name: str, default: list[str], known: Any) -> list[str]:
        layers = getattr(self, name)
        if layers is None:
            layers = default
        if not isinstance(layers, (list, tuple)) or len(layers) != self.num_hidden_layers:
            raise ValueError(
                f"{name} is {layers!r}; it must be a list of num_hidden_layers = {self.num_hidden_layers} names"
            )
        for i, layer in enumerate(layers):
            if layer not in known:
                raise ValueError(registry.unknown(f"{name}[{i}]", layer, known))
        return list(layers)

    def _check_int(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; it must be an int of at least {least}")
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")

    def _check_choice(self, name: str, allowed: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
