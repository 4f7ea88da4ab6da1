"""The layout notation: what it means, its canonical form, and errors that point at the position."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fwzoo
from fwzoo.configuration.layout import ALIASES, format_layout, parse_layout

MIXERS = sorted(fwzoo.registry.mixer_options())
FEED_FORWARDS = sorted(fwzoo.registry.feed_forward_names())
GDN, FA, SWA, LA = "gated_delta", "full_attention", "sliding_attention", "linear_attention"

MEANINGS = [
    ("gdn", 3, [GDN] * 3, {}),
    ("GDN+none@1", 3, [GDN] * 3, {1: "none"}),
    ("falcon3a*3,swa", 8, (["falcon3a"] * 3 + [SWA]) * 2, {}),
    ("falcon3a*3,swa", 6, ["falcon3a"] * 3 + [SWA] + ["falcon3a"] * 2, {}),
    ("gdn,fa", 5, [GDN, FA, GDN, FA, GDN], {}),
    ("la+swa@0,2", 4, [SWA, LA, SWA, LA], {}),
    ("gdn*2,swa+fa@5+none@0,3", 6, [GDN, GDN, SWA, GDN, GDN, FA], {0: "none", 3: "none"}),
    (" Falcon1 , FA*2 + None @ 1 , 2 ", 3, ["falcon1", FA, FA], {1: "none", 2: "none"}),
    ("gated_delta+mlp@0", 2, [GDN] * 2, {}),
]


@pytest.mark.parametrize(("layout", "layers", "mixers", "others"), MEANINGS, ids=[m[0] for m in MEANINGS])
def test_what_a_layout_means(layout: str, layers: int, mixers: list[str], others: dict[int, str]) -> None:
    assert parse_layout(layout, layers) == (mixers, [others.get(i, "mlp") for i in range(layers)])


@pytest.mark.parametrize(
    ("layout", "layers", "canonical"),
    [
        ("GDN", 12, "gated_delta"),
        ("falcon3a,falcon3a,falcon3a,swa", 12, "falcon3a*3,sliding_attention"),
        ("falcon3a*3,swa,falcon3a*3,swa", 8, "falcon3a*3,sliding_attention"),
        ("gdn+swa@3,7", 8, "gated_delta*3,sliding_attention"),
        ("gdn+none@6+swa@5", 12, "gated_delta+sliding_attention@5+none@6"),
        ("gdn+none@4,1", 6, "gated_delta+none@1,4"),
        ("fa*2,gdn*4", 6, "full_attention*2,gated_delta*4"),
    ],
)
def test_canonical_form(layout: str, layers: int, canonical: str) -> None:
    assert format_layout(*parse_layout(layout, layers)) == canonical


@st.composite
def layers_of_a_model(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Lists that repeat, lists with a few exceptions, and lists of anything."""
    count = draw(st.integers(1, 24))
    cycle = draw(st.lists(st.sampled_from(MIXERS), min_size=1, max_size=count))
    mixers = [cycle[i % len(cycle)] for i in range(count)]
    for i in draw(st.lists(st.integers(0, count - 1), max_size=3)):
        mixers[i] = draw(st.sampled_from(MIXERS))
    feed_forwards = draw(st.lists(st.sampled_from(FEED_FORWARDS), min_size=count, max_size=count))
    return mixers, feed_forwards


@settings(max_examples=500)
@given(layers_of_a_model())
def test_parsing_what_was_printed_gives_it_back(layers: tuple[list[str], list[str]]) -> None:
    layout = format_layout(*layers)
    assert parse_layout(layout, len(layers[0])) == layers
    assert format_layout(*parse_layout(layout, len(layers[0]))) == layout


@settings(max_examples=300)
@given(st.text(alphabet="gdnfaswl1230+*@,- ", max_size=16), st.integers(1, 12))
def test_any_text_is_a_layout_or_one_clear_sentence(text: str, layers: int) -> None:
    try:
        mixers, feed_forwards = parse_layout(text, layers)
    except ValueError as error:
        message = str(error)
        assert message.startswith(f"layout {text!r}, position ") and "\n" not in message
        position = int(message[len(f"layout {text!r}, position ") :].split(":")[0])
        assert 0 <= position <= len(text)
    else:
        assert len(mixers) == len(feed_forwards) == layers
        assert set(mixers) <= set(MIXERS) and set(feed_forwards) <= set(FEED_FORWARDS)


@pytest.mark.parametrize(
    ("layout", "position", "words"),
    [
        ("", 0, "name is ''"),
        ("gdn,,fa", 4, "name is ''"),
        ("gdn*2,swaa", 6, "did you mean 'swa'"),
        ("falcon-3a", 0, "did you mean 'falcon3a'"),
        ("gdn+noen@1", 4, "did you mean 'none'"),
        ("none", 0, "name is 'none'"),
        ("gdn*0", 4, "'0' must be a count from 1 to 4"),
        ("gdn*two", 4, "'two' must be a count from 1 to 4"),
        ("gdn*1*2", 0, "must be a mixer, or a mixer and a count"),
        ("gdn*3,fa*2", 0, "names 5 layers; there are num_hidden_layers = 4"),
        ("gdn+none@1, 4", 12, "'4' must be a layer from 0 to 3"),
        ("gdn+none@-1", 9, "'-1' must be a layer from 0 to 3"),
        ("gdn+none@", 9, "'' must be a layer from 0 to 3"),
        ("gdn+none@99999999999999999999", 9, "must be a layer from 0 to 3"),
        ("gdn+none@²", 9, "'²' must be a layer from 0 to 3"),
        ("gdn+none", 4, "must be a name, @ and its layers, such as none@0"),
        ("gdn+none@1@2", 4, "must be a name, @ and its layers"),
        ("gdn+none@2+mlp@2", 15, "puts mlp into layer 2, which has none there already"),
        ("gdn+fa@1,1", 9, "puts full_attention into layer 1, which has full_attention there already"),
    ],
)
def test_an_error_points_at_its_position(layout: str, position: int, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_layout(layout, 4)
    assert str(caught.value).startswith(f"layout {layout!r}, position {position}: ") and words in str(caught.value)


def test_a_configuration_from_a_layout() -> None:
    config = fwzoo.FwzooConfig.from_layout("swa,Falcon3+none@1", num_hidden_layers=4, attention_window=9, window=2)
    assert type(config) is fwzoo.Falcon3Config and (config.attention_window, config.window) == (9, 2)
    assert config.mixers == [SWA, "falcon3"] * 2 and config.feed_forwards == ["mlp", "none", "mlp", "mlp"]
    assert config.layout == "sliding_attention,falcon3+none@1"
    assert config.layer_types == ["sliding_attention", "linear_attention"] * 2
    again = type(config).from_dict(config.to_dict())
    assert again.layout == config.layout and again.to_dict() == config.to_dict()
    assert "layout" not in config.to_dict()
    own = fwzoo.Falcon2Config.from_layout("gdn", num_hidden_layers=2)
    assert type(own) is fwzoo.Falcon2Config and own.layout == GDN
    assert fwzoo.FwzooConfig.from_layout("fa").mixers == [FA] * 12
    assert fwzoo.Falcon1Config.tiny().layout == "falcon1"


def test_aliases_are_names() -> None:
    assert set(ALIASES.values()) <= set(MIXERS) and not set(ALIASES) & {*MIXERS, *FEED_FORWARDS}
