"""Names: wrapper prefixes, roles, globs, renames."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.names import (
    WRAPPERS,
    canonical,
    glob_matcher,
    live_partners,
    parse_rename,
    part_role,
    rename_path,
    role_of,
)

components = st.sampled_from(
    [*sorted(WRAPPERS), "layers", "0", "weight", "submodule", "", "modules"]
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module.a.weight", "a.weight"),
        ("_orig_mod.module.a.weight", "a.weight"),
        ("module._orig_mod.a.weight", "a.weight"),
        ("a._fsdp_wrapped_module.b._checkpoint_wrapped_module.w", "a.b.w"),
        ("a.module.w", "a.w"),
        ("submodule.w", "submodule.w"),
        ("modules.w", "modules.w"),
        ("a.module", "a.module"),
        ("module", "module"),
        ("", ""),
    ],
)
def test_wrapper_prefixes_are_stripped_at_any_depth(name: str, expected: str) -> None:
    assert canonical(name) == expected


@given(st.lists(components, min_size=1).map(".".join))
def test_stripping_is_idempotent_and_keeps_all_other_components(name: str) -> None:
    once = canonical(name)
    assert canonical(once) == once
    *heads, last = name.split(".")
    assert once.split(".") == [head for head in heads if head not in WRAPPERS] + [last]


@pytest.mark.parametrize(
    ("role", "names"),
    [
        (
            "ema",
            "ema unet_ema ema_0.999 shadow shadow_params state_dict_ema model_ema generator_ema net_ema",
        ),
        (
            "live",
            "model generator net state_dict module app.model current_model_state online_model",
        ),
        (
            "optimizer",
            "optimizer optimizers optim opt optimizer_state optimizer_states optimizer_state_dict d_optimizer",
        ),
        (
            "other",
            "lr_scheduler lr_schedulers scheduler train_state trainer_state dataloader rng rng_state extra",
        ),
        ("other", "extra_state args hyper_parameters callbacks loops scaler grad_scaler"),
    ],
)
def test_recognised_tree_names(role: str, names: str) -> None:
    assert {name: role_of(name) for name in names.split()} == dict.fromkeys(names.split(), role)


@pytest.mark.parametrize(
    "name", ["", "Model", "EMA", "emanate", "schema", "cinema", "models", "foo", "layers", "ema."]
)
def test_other_names_have_no_role(name: str) -> None:
    assert role_of(name) is None


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model", "live"),
        ("pytorch_model", "live"),
        ("pytorch_model_fsdp_0", "live"),
        ("pytorch_model_fsdp_12", "live"),
        ("actor", "live"),
        ("model_and_optim", "live"),
        ("ema", "ema"),
        ("pytorch_ema_model_fsdp_0", "ema"),
        ("ema_model", "ema"),
        ("unet_ema", "ema"),
        ("optim", "optimizer"),
        ("optimizer", "optimizer"),
        ("optimizer_1", "optimizer"),
        ("extra_state", "other"),
        ("dataloader_state", "other"),
        ("rng", "other"),
        ("rng_0", "other"),
        ("pytorch_model_fsdp_", None),
        ("optimizer_x", None),
        ("critic", None),
        ("logs", None),
    ],
)
def test_recognised_part_names(name: str, role: str | None) -> None:
    assert part_role(name) == role


@pytest.mark.parametrize(
    ("ema", "live"),
    [
        ("ema", "model"),
        ("generator_ema", "generator"),
        ("model_ema", "model"),
        ("net_ema", "net"),
        ("ema_model", "model"),
        ("state_dict_ema", "state_dict"),
        ("app.ema", "app.model"),
        ("ema.fast", "model"),
        ("app.ema.fast", "app.model"),
        ("pytorch_ema_model_fsdp_0", "pytorch_model_fsdp_0"),
        ("shadow_params", "model"),
    ],
)
def test_the_partner_of_an_ema_is_told_by_its_name(ema: str, live: str) -> None:
    assert live in live_partners(ema)


def test_the_own_name_comes_before_the_default() -> None:
    assert live_partners("generator_ema") == ("generator", "model")


@given(
    st.text(alphabet="ab.*?[]!\n", max_size=8),
    st.lists(st.text(alphabet="ab.\n[]!", max_size=6), max_size=8),
)
def test_globs_are_those_of_fnmatchcase(glob: str, names: list[str]) -> None:
    test = glob_matcher(glob)
    assert [bool(test(name)) for name in names] == [
        fnmatch.fnmatchcase(name, glob) for name in names
    ]


def test_globs_are_case_sensitive_and_cross_dots() -> None:
    test = glob_matcher("model.*.weight")
    assert test("model.layers.0.weight")
    assert not test("Model.layers.0.weight")
    assert not test("model.layers.0.weight2")


def test_a_rename_is_split_at_the_first_equals_sign() -> None:
    assert parse_rename("a=b=c") == ("a", "b=c")
    assert parse_rename("=model.") == ("", "model.")
    assert parse_rename("model.=") == ("model.", "")
    with pytest.raises(UsageError, match="OLD=NEW") as caught:
        parse_rename("model.")
    assert caught.value.code == "usage"


@pytest.mark.parametrize(
    ("path", "old", "new", "expected"),
    [
        (("x.w",), "x.", "y.", ("y.w",)),
        (("x.w",), "", "model.", ("model", "x.w")),
        (("x.w",), "", "p", ("px.w",)),
        (("ema", "x.w"), "ema.", "avg.", ("avg", "x.w")),
        (("ema", "x.w"), "ema", "avg", ("avg", "x.w")),
        (("ema", "x.w"), "ema.", "ema.weights.", ("ema", "weights", "x.w")),
        (("net_ema", "x.w"), "net_ema.", "ema.weights.", ("ema", "weights", "x.w")),
        (("ema", "weights", "x.w"), "ema.weights.", "", ("x.w",)),
        (("model", "embed.weight"), "model.embed", "model.tok", ("model", "tok.weight")),
        (("model", "embed.weight"), "model.embed", "net.tok", ("net", "tok.weight")),
        (("optim", "groups", 0, "lr"), "optim.", "opt.", ("opt", "groups", 0, "lr")),
        (("ema", "x.w"), "ema.", "avg", ("avgx", "w")),
        (("w",), "w", "", ("",)),
    ],
)
def test_a_rename_moves_the_path_with_the_name(
    path: tuple, old: str, new: str, expected: tuple
) -> None:
    assert rename_path(path, old, new) == expected


parts = st.text(alphabet="ab.", min_size=1, max_size=4).filter(
    lambda s: not s.startswith(".") and not s.endswith(".")
)


@given(
    st.lists(st.one_of(parts, st.integers(0, 3)), min_size=1, max_size=4).filter(
        lambda p: isinstance(p[0], str)
    ),
    st.integers(0, 12),
    st.one_of(st.just(""), parts, parts.map(lambda s: f"{s}.")),
)
def test_a_renamed_path_joins_to_the_renamed_name(path: list, cut: int, new: str) -> None:
    name = ".".join(map(str, path))
    old = name[: min(cut, len(name))]
    assert ".".join(map(str, rename_path(tuple(path), old, new))) == new + name[len(old) :]
