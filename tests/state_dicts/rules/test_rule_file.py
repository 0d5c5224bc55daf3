"""What is no rule is refused in one line that names file, rule and key."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ema_ckpt import UsageError, load_rules
from ema_ckpt.state_dicts.rules.rule_file import parse_rules, parse_values, shipped_names

WRONG = {
    "[[rule]]\nfrm = 'a'\nto = 'b'": "rule 1: expected one of from, drop and constant",
    "[[rule]]\nfrom = 'a'\ntoo = 'b'": "rule 1: unknown key 'too'; did you mean 'to'?",
    "[[rules]]\nfrom = 'a'": "unknown key 'rules'; did you mean 'rule'?",
    "about = 'x'": "it has no rule",
    "[[rule]]\nfrom = 'a'": "rule 1: to: expected a pattern of names, found None",
    "[[rule]]\nfrom = ['a', 'b']\nto = 'c'": "make 2 of each group, and `to` names 1",
    "[[rule]]\nfrom = 'a.{x}'\nto = 'b'": "{x} of `from` is not in it",
    "[[rule]]\nfrom = 'a'\nto = 'b.{x}'": "nothing in `from` tells what {x} stands for",
    "[[rule]]\nfrom = 'a.{x'\nto = 'b'": "has a brace that is no placeholder",
    "[[rule]]\nfrom = 'a.{x:(b+)+}'\nto = '{x}'": "parentheses are not allowed",
    "[[rule]]\nfrom = 'a.{x:[}'\nto = '{x}'": "{x:[}: ",
    "[[rule]]\nfrom = '{a:.*}{b:.*}{c:.*}{d:.+}'\nto = '{a}.{b}.{c}.{d}'": "has 4 repetitions that may end anywhere in a name; at most 3",
    "[[rule]]\nfrom = '{a:x*x*x*x*x*x*x*}'\nto = '{a}'": "has 7 repetitions",
    "[[rule]]\nfrom = '{a:x?x?x?x?y}.z'\nto = '{a}'": "has 4 repetitions",
    "[[rule]]\nfrom = '{a}{b}{c}{d}'\nto = '{a}.{b}.{c}.{d}'": "repetitions that may end",
    "[[rule]]\nfrom = ['a.{x}', 'b']\nto = ['{x}', 'c']": "have different placeholders",
    "[[rule]]\nfrom = 'a.{x}'\nto = 'b'\nsteps = [{ stak = 'x' }]": "step 1: expected one of stack",
    "[[rule]]\nfrom = 'a.{x}'\nto = 'b'\nsteps = [{ stack = 'y' }]": "no pattern has the placeholder {y}",
    "[[rule]]\nfrom = 'a.{x:[0-9]}'\nto = 'b'\nsteps = [{ stack = 'x' }]": "has no expression",
    "[[rule]]\nfrom = 'a'\nto = 'b'\nsteps = [{ concatenate = 'g' }]": "'g' is neither a number",
    "[[rule]]\nfrom = 'a'\nto = 'b'\nsteps = [{ transpose = [0] }]": "expected two axes",
    "[[rule]]\nfrom = 'a'\nto = 'b'\nsteps = [{ transpose = [0, 1], dim = 1 }]": "no key 'dim'",
    "[[rule]]\nfrom = ['a', 'b']\nto = ['c', 'd']\nsteps = [{ split = 0 }]": "split takes 1 tensor",
    "[[rule]]\nfrom = ['a', 'b']\nto = 'c'\nsteps = [{ concatenate = 0, sizes = [1] }]": "takes 1 tensor",
    "[[rule]]\nfrom = ['a', 'b']\nto = ['c', 'd']\nsteps = [{ order = [0, 0] }]": "each of 2 tensors once",
    "[[rule]]\nconstant = 1\nto = 'a'": "needs `shape` and `dtype`",
    "[[rule]]\nconstant = 1\nto = 'a'\nshape = [2]\ndtype = 'float33'": "float33",
    "[[rule]]\nfrom = 'a'\nto = 'b'\none_way = 1": "one_way: expected true or false",
    f"[values]\ng = {'9' * 5000}\n[[rule]]\nfrom = 'a'\nto = 'b'": "not TOML",
    f"[values]\ng = 0x{'f' * 5000}\n[[rule]]\nfrom = 'a'\nto = 'b'": "more than 64 bits",
    f"[[rule]]\nconstant = 1\nto = 'a'\nshape = [{2**63}]\ndtype = 'int8'": "more than 64 bits",
    **{
        f"[[rule]]\nconstant = {value}\nto = 'a'\nshape = [2]\ndtype = '{dtype}'": f"no value of {dtype}"
        for value, dtype in [
            ("nan", "int32"), ("inf", "int64"), ("-inf", "bool"), ("2", "bool"), ("-1", "bool"),
            ("3.4e38", "bfloat16"), ("-3.4028235e38", "bfloat16"), ("65520", "float16"), ("0.5", "int8"),
        ]
    },
    "[values]\ng = 1.5\n[[rule]]\nfrom = 'a'\nto = 'b'": "[values] g: expected a number",
    "[values]\ng = 'how many'\n[[rule]]\nfrom = 'a'\nto = 'b'": "give --rule-values g=N, with N the how many",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_rule_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as found:
        load_rules(file)
    assert found.value.code == "usage"
    assert str(found.value).startswith(f"{file}: ")
    assert WRONG[text] in str(found.value)
    assert "\n" not in str(found.value)


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    """With the mark and the line ends that its editors write."""
    file = tmp_path / "r.toml"
    file.write_bytes(b"\xef\xbb\xbf[[rule]]\r\nfrom = 'a'\r\nto = 'b'\r\n")
    assert len(load_rules(file).rules) == 1


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no such file of rules; by name there are diffusers-flux"
    ):
        load_rules(tmp_path / "nothing.toml")
    file = tmp_path / "r.toml"
    for data in (b"[[rule", b"\xff", b"a = 1\n" * 300_000):
        file.write_bytes(data)
        with pytest.raises(UsageError, match=r"r\.toml: "):
            load_rules(file)
    with pytest.raises(UsageError, match=r"cannot be read"):
        load_rules(tmp_path)


@pytest.mark.parametrize("text", ["g", "g=x", "g=-1", "h=1"])
def test_values_are_checked(text: str, tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text("[values]\ng = 2\n[[rule]]\nfrom = 'a'\nto = 'b'")
    with pytest.raises(UsageError, match=r"expected NAME=NUMBER|no value 'h' to set; it has 'g'"):
        load_rules(file, [text])


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("drop = 'a'", "what is dropped is lost"),
        ("from = 'a.{x}'\nto = 'b'\none_way = true", "the file says so"),
        ("from = 'a'\nto = 'b'\nsteps = [{ flatten = [0, 1] }]", "flatten without sizes"),
    ],
)
def test_one_way_rules_have_no_inverse(rule: str, reason: str) -> None:
    rules = parse_rules(tomllib.loads(f"[[rule]]\nfrom = 'c'\nto = 'd'\n[[rule]]\n{rule}"), "r", {})
    with pytest.raises(UsageError, match=f"r: rule 2 .* is one-way: {reason}; it has no inverse"):
        _ = rules.inverse


def test_the_inverse_of_the_inverse_is_the_rule() -> None:
    values = {"groups": 2, "heads_per_group": 4}
    for name in shipped_names():
        rules = load_rules(name, values if name.startswith("megatron") else {})
        assert rules.inverse.inverse == rules
        assert rules.inverse != rules


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 19, "٣", "-1", "1_0", ""])
def test_a_value_that_is_no_number_of_64_bits_is_refused(number: str) -> None:
    with pytest.raises(UsageError, match="expected NAME=NUMBER"):
        parse_values([f"g={number}"])
