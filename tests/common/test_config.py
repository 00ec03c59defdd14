"""Defaults < file < environment < flags, and errors that name key, origin and the fix."""

import argparse
import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.common.config.loader import add_flags, given_flags, load_config, option
from outrider.common.errors import ConfigError


class Policy(enum.StrEnum):
    WAIT = "wait"
    FAIL = "fail"


@dataclass(frozen=True)
class LinkConfig:
    timeout_ms: float | None = option(None, "deadline of a round", minimum=1)
    policy: Policy = option(Policy.WAIT, "what to do after a timeout", flag="--on-timeout")
    transport: Literal["stream", "unary"] = option("stream", "how rounds travel")


@dataclass(frozen=True)
class EdgeConfig:
    num_speculative_tokens: int = option(4, "draft length", minimum=1, maximum=64)
    temperature: float = option(0.8, "0 is greedy; 100% random at most", minimum=0)
    stop: tuple[str, ...] = option((), "stop string", metavar="S")
    draft: Path = option(Path("models/draft"), "draft directory")
    is_color: bool = option(True, "colours", flag="--color")
    link: LinkConfig = field(default_factory=LinkConfig)


def load(tmp_path=None, text=None, env=None, argv=None):
    path = None
    if text is not None:
        path = tmp_path / "edge.yaml"
        path.write_text(text)
    flags = {}
    if argv is not None:
        parser = argparse.ArgumentParser()
        add_flags(parser, EdgeConfig)
        flags = given_flags(parser.parse_args(argv), EdgeConfig)
    return load_config(EdgeConfig, scope="edge", yaml_path=path, env=env or {}, flags=flags)


def test_without_any_source_every_value_is_the_default():
    loaded = load()
    assert loaded.value == EdgeConfig()
    assert set(loaded.origins.values()) == {"default"}


def test_later_sources_win_and_every_value_knows_its_origin(tmp_path):
    loaded = load(
        tmp_path,
        "temperature: 1\nnum_speculative_tokens: 5\nstop: [a, 'b,c']\n"
        "link: {timeout_ms: 1e3, policy: fail}\n",
        {"OUTRIDER_EDGE_NUM_SPECULATIVE_TOKENS": "6", "OUTRIDER_EDGE_LINK_POLICY": "wait", "HOME": "/"},
        ["--num-speculative-tokens", "7", "--no-color"],
    )
    assert loaded.value == EdgeConfig(
        num_speculative_tokens=7,
        temperature=1.0,
        stop=("a", "b,c"),
        is_color=False,
        link=LinkConfig(timeout_ms=1000.0, policy=Policy.WAIT),
    )
    file = f"file {tmp_path / 'edge.yaml'}"
    assert loaded.origins == {
        "num_speculative_tokens": "flag --num-speculative-tokens",
        "temperature": file,
        "stop": file,
        "draft": "default",
        "is_color": "flag --color",
        "link.timeout_ms": file,
        "link.policy": "environment OUTRIDER_EDGE_LINK_POLICY",
        "link.transport": "default",
    }


def test_show_prints_values_and_on_request_their_origins():
    loaded = load(argv=["--temperature", "0", "--stop", "x", "--stop", "y"])
    assert "temperature: 0.0" in loaded.lines()
    assert "stop: ['x', 'y']" in loaded.lines()
    assert [line.split("  # ")[1] for line in loaded.lines(with_origins=True)][1] == "flag --temperature"


def test_lists_come_from_the_environment_by_commas_or_as_yaml():
    assert load(env={"OUTRIDER_EDGE_STOP": "a,b"}).value.stop == ("a", "b")
    assert load(env={"OUTRIDER_EDGE_STOP": '["a,b", "\\n"]'}).value.stop == ("a,b", "\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temprature: 1", "unknown key temprature (file PATH); did you mean temperature?"),
        ("link: {timeout: 1}", "unknown key link.timeout (file PATH); did you mean link.timeout_ms?"),
        ("link: 3", "link (file PATH): expected a section of keys and values, not 3"),
        ("[1]", "file PATH: expected a section of keys and values, not [1]"),
        ("temperature: hot", "temperature (file PATH): is 'hot'; expected a number, at least 0"),
        ("temperature: true", "temperature (file PATH): is true; expected a number, at least 0"),
        ("temperature: .nan", "temperature (file PATH): is nan; expected a number, at least 0"),
        (
            "num_speculative_tokens: 4.5",
            "num_speculative_tokens (file PATH): is 4.5; expected an integer, at least 1 and at most 64",
        ),
        (
            "num_speculative_tokens: 65",
            "num_speculative_tokens (file PATH): is 65; expected an integer, at least 1 and at most 64",
        ),
        ("stop: 3", "stop (file PATH): is 3; expected a list, each item text"),
        ("draft: ''", "draft (file PATH): is ''; expected a path"),
        ("draft: '~nobody-here/x'", "draft (file PATH): is '~nobody-here/x'; expected a path"),
        ("is_color: 2", "is_color (file PATH): is 2; expected true or false"),
        ("link: {policy: hope}", "link.policy (file PATH): is 'hope'; expected one of wait, fail"),
        ("link: {transport: 1}", "link.transport (file PATH): is 1; expected one of stream, unary"),
        ("temperature: {a: 1}", "temperature (file PATH): is {'a': 1}; expected a number, at least 0"),
    ],
)
def test_errors_in_a_file_name_key_origin_and_what_was_expected(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert str(caught.value) == message.replace("PATH", str(tmp_path / "edge.yaml"))


def test_errors_in_environment_and_flags_name_them_too():
    with pytest.raises(ConfigError, match=r"unknown key OUTRIDER_EDGE_TEMP .*mean OUTRIDER_EDGE_TEMPERATURE"):
        load(env={"OUTRIDER_EDGE_TEMP": "1"})
    with pytest.raises(
        ConfigError, match=r"^link\.timeout_ms \(environment OUTRIDER_EDGE_LINK_TIMEOUT_MS\): is"
    ):
        load(env={"OUTRIDER_EDGE_LINK_TIMEOUT_MS": "soon"})
    with pytest.raises(ConfigError, match=r"^link\.policy \(flag --on-timeout\): is 'x'; expected one of"):
        load(argv=["--on-timeout", "x"])
    with pytest.raises(ConfigError, match="did you mean temperature"):
        load_config(EdgeConfig, env={}, flags={"temperatur": 1})


def test_another_scopes_environment_is_left_alone():
    assert load(env={"OUTRIDER_CLOUD_LISTEN": "x"}).value == EdgeConfig()


@pytest.mark.parametrize("text", ["a: [", "\t- x:", "a: b: c"])
def test_a_file_that_is_not_yaml_is_one_clear_line(tmp_path, text):
    with pytest.raises(ConfigError, match="is not YAML") as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"cannot read /nowhere/x\.yaml: No such file"):
        load_config(EdgeConfig, yaml_path=Path("/nowhere/x.yaml"), env={})


def test_an_empty_file_or_section_changes_nothing(tmp_path):
    assert load(tmp_path, "").value == EdgeConfig()
    assert load(tmp_path, "link:\n").value == EdgeConfig()


def test_help_names_defaults_and_choices(capsys):
    parser = argparse.ArgumentParser()
    add_flags(parser, EdgeConfig)
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--on-timeout wait|fail what to do after a timeout (default: 'wait')" in shown
    assert "100% random at most (default: 0.8)" in shown


yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from([*EdgeConfig.__dataclass_fields__, "unknown"]), yaml_values)
def test_any_value_for_any_key_loads_or_is_a_config_error_naming_the_key(key, value):
    import tempfile

    import yaml

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.yaml"
        path.write_text(yaml.safe_dump({key: value}), encoding="utf-8")
        try:
            loaded = load_config(EdgeConfig, yaml_path=path, env={})
        except ConfigError as error:
            assert key in str(error)
        else:
            assert isinstance(loaded.value, EdgeConfig)


@given(st.sampled_from([*EdgeConfig.__dataclass_fields__]), st.text(max_size=8))
def test_any_text_in_the_environment_loads_or_is_a_config_error(key, text):
    name = f"OUTRIDER_EDGE_{key.upper()}"
    try:
        load(env={name: text})
    except ConfigError as error:
        assert name in str(error)


def test_content_read_before_takes_the_place_of_a_file_and_any_value_passes_as_it_is():
    @dataclass(frozen=True)
    class Loose:
        size: int = option(1, "")
        anything: Any = option(None, "")

    content = {"size": 3, "anything": {"a": [1]}}
    loaded = load_config(Loose, content=(content, "file x.yaml"), env={}, flags={"size": 4})
    assert (loaded.value.size, loaded.value.anything) == (4, {"a": [1]})
    with pytest.raises(ConfigError, match=r"unknown key sise \(file x.yaml\); did you mean size"):
        load_config(Loose, content=({"sise": 3}, "file x.yaml"), env={})


@dataclass(frozen=True)
class Keyed:
    key: str = option("", "what opens the door", is_flag=False, is_secret=True)
    number: int = option(1, "a secret number", is_secret=True)


def test_a_secret_is_shown_nowhere():
    loaded = load_config(Keyed, scope="edge", env={"OUTRIDER_EDGE_KEY": "hunter2"})
    assert loaded.value.key == "hunter2"
    shown = loaded.lines(with_origins=True)[0].split()
    assert shown == "key: <secret> # environment OUTRIDER_EDGE_KEY".split()
    assert "hunter2" not in repr(loaded.value) and "hunter2" not in repr(loaded)
    with pytest.raises(ConfigError, match=r"number .*<secret>") as raised:
        load_config(Keyed, scope="edge", env={"OUTRIDER_EDGE_NUMBER": "hunter3"})
    assert "hunter3" not in str(raised.value)
