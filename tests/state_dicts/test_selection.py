"""Selection: globs, casts, renames, wrapper prefixes, in one tree and in all."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ema_ckpt.core.errors import EmaCkptError, UsageError
from ema_ckpt.core.names import WRAPPERS
from ema_ckpt.state_dicts.selection import (
    Selection,
    missing_weights,
    options,
    select_all,
    select_tree,
)
from ema_ckpt.state_dicts.tree import default_tree, find_tree, list_trees
from tests.catalogs import INT, SCALAR, T, catalog_of

W = T((2, 3))
B = T((3,))

TREE = {
    "model": {"layers.0.w": W, "layers.1.w": W, "norm.b": B, "n": INT, "mask": T((3,), "bool")},
    "ema": {
        "weights": {"layers.0.w": W, "layers.1.w": W, "norm.b": B},
        "num_updates": INT,
        "decay": SCALAR,
        "config": "{}",
    },
    "optim": {"state": {"layers.0.w": {"exp_avg": W}}, "param_groups": [{"lr": 0.1}]},
    "step": 7,
}


def one(tree: dict, name: str | None = None, **chosen: object) -> Selection:
    known = list_trees(catalog_of(tree))
    return select_tree(
        default_tree(known) if name is None else find_tree(known, name), options(**chosen)
    )  # type: ignore[arg-type]


def everything(
    tree: dict,
    only: tuple[str, ...] = (),
    *,
    strip: bool = True,
    nested: bool = True,
    **chosen: object,
) -> Selection:
    catalog = catalog_of(tree, nested=nested)
    return select_all(catalog, list_trees(catalog), options(**chosen), only, strip=strip)  # type: ignore[arg-type]


def names(selection: Selection) -> list[str]:
    return [entry.name for entry in selection.entries]


def refused(code: str, call: object, *args: object, **kwargs: object) -> str:
    with pytest.raises(EmaCkptError) as caught:
        call(*args, **kwargs)  # type: ignore[operator]
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


# One tree.


def test_one_tree_is_written_under_names_without_its_prefix() -> None:
    chosen = one(TREE)
    assert names(chosen) == ["layers.0.w", "layers.1.w", "norm.b"]
    assert [entry.path for entry in chosen.entries] == [
        ("layers.0.w",),
        ("layers.1.w",),
        ("norm.b",),
    ]
    assert chosen.entries[0].source.name == "ema.weights.layers.0.w"
    assert chosen.renamed == {}


def test_match_then_exclude() -> None:
    assert names(one(TREE, match=["layers.*"])) == ["layers.0.w", "layers.1.w"]
    assert names(one(TREE, match=["layers.*", "norm.b"], exclude=["*.1.*"])) == [
        "layers.0.w",
        "norm.b",
    ]
    assert names(one(TREE, exclude=["norm.b"])) == ["layers.0.w", "layers.1.w"]
    assert names(one(TREE, match="norm.b")) == ["norm.b"]


def test_the_cast_touches_floating_tensors_only() -> None:
    chosen = one(TREE, "model", dtype="bf16")
    assert {entry.name: entry.dtype.name for entry in chosen.entries} == {
        "layers.0.w": "bfloat16",
        "layers.1.w": "bfloat16",
        "norm.b": "bfloat16",
        "n": "int64",
        "mask": "bool",
    }


def test_kept_dtypes_are_told_by_names_before_the_rename() -> None:
    chosen = one(TREE, dtype="fp16", keep_dtype=["norm.*"], rename=["norm=final"])
    assert {entry.name: entry.dtype.name for entry in chosen.entries} == {
        "layers.0.w": "float16",
        "layers.1.w": "float16",
        "final.b": "float32",
    }


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "complex64", "int8", "uint16"])
def test_scaled_complex_and_integer_tensors_are_never_cast(dtype: str) -> None:
    chosen = one({"model": {"w": T((2,), dtype), "x": T((2,), "float64")}}, dtype="fp32")
    assert [entry.dtype.name for entry in chosen.entries] == [dtype, "float32"]


def test_optimizer_state_is_not_cast() -> None:
    assert {e.dtype.name for e in one(TREE, "optim", dtype="bf16").entries} == {"float32"}


def test_renames_are_plain_prefixes_and_the_first_that_fits_counts_once() -> None:
    chosen = one(TREE, rename=["layers.0=layers.9", "layers=blocks"])
    assert names(chosen) == ["layers.9.w", "blocks.1.w", "norm.b"]
    assert chosen.renamed == {"layers.0.w": "layers.9.w", "layers.1.w": "blocks.1.w"}
    assert names(one(TREE, rename=["=model."])) == [
        "model.layers.0.w",
        "model.layers.1.w",
        "model.norm.b",
    ]
    assert names(one(TREE, match=["layers.*"], rename=["layers.="])) == ["0.w", "1.w"]
    assert names(one(TREE, rename={"norm": "final"})) == ["layers.0.w", "layers.1.w", "final.b"]


def test_wrapper_prefixes_are_stripped_and_listed() -> None:
    tree = {"model": {"module._orig_mod.a.w": W, "b.w": W}}
    chosen = one(tree, match=["a.w", "b.w"])
    assert names(chosen) == ["a.w", "b.w"]
    assert chosen.renamed == {"module._orig_mod.a.w": "a.w"}
    kept = one(tree, keep_prefixes=True, match=["module.*"])
    assert (names(kept), kept.renamed) == (["module._orig_mod.a.w"], {})


@pytest.mark.parametrize(
    ("flag", "chosen"),
    [
        ("--match 'x.*'", {"match": ["norm.*", "x.*"]}),
        ("--match 'Norm.b'", {"match": ["Norm.b"]}),
        ("--exclude 'x'", {"exclude": ["x"]}),
        ("--keep-dtype 'x*'", {"keep_dtype": ["x*"]}),
        ("--rename 'x=y'", {"rename": ["x=y"]}),
        ("--rename 'norm=y'", {"match": ["layers.*"], "rename": ["norm=y"]}),
        ("leave none of 3", {"exclude": ["*"]}),
        ("leave none of 3", {"match": ["norm.b"], "exclude": ["norm.*"]}),
    ],
)
def test_what_fits_nothing_is_refused(flag: str, chosen: dict) -> None:
    assert flag in refused("empty-selection", one, TREE, **chosen)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    assert "like 'norm.b'" in refused("empty-selection", one, TREE, match=["nrom.b"])


def test_collisions_are_refused() -> None:
    stripped = refused("name-collision", one, {"model": {"module.a": W, "a": W}})
    assert "'module.a'" in stripped
    assert "--keep-prefixes" in stripped
    assert names(one({"model": {"module.a": W, "a": W}}, keep_prefixes=True)) == ["module.a", "a"]
    assert "--rename" in refused("name-collision", one, TREE, rename=["layers.0=layers.1"])
    assert "without a name" in refused("usage", one, {"model": {"w": W, "b": B}}, rename=["w="])


@pytest.mark.parametrize(
    "bad", [{"dtype": "int8"}, {"dtype": "fp8"}, {"dtype": ""}, {"rename": ["a"]}]
)
def test_options_that_mean_nothing_are_refused(bad: dict) -> None:
    refused("usage", options, **bad)


def test_an_empty_checkpoint_is_no_empty_selection() -> None:
    assert one({}) == Selection()
    assert everything({}) == Selection()
    refused("empty-selection", one, {}, match=["*"])
    refused("empty-selection", everything, {}, exclude=["*"])
    refused("empty-selection", one, {"model": {"w": W}, "args": {"lr": 0.1}}, "args")


def test_missing_weights_are_filled_from_the_live_tree() -> None:
    tree = {"model": {"module.a": W, "module.c": B, "module.b": W}, "ema": {"b": W, "a": W}}
    live, ema = list_trees(catalog_of(tree))
    missing = missing_weights(ema, live)
    assert list(missing) == ["module.c"]
    chosen = select_tree(ema, options(dtype="bf16"), missing)
    assert names(chosen) == ["b", "a", "c"]
    assert chosen.filled == ("c",)
    assert select_tree(ema, options(match=["a"]), missing).filled == ()


def test_names_given_by_position_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ema_ckpt")
    assert names(one({"model": {"w": W, "b": B}, "ema": {"shadow_params": [W, B]}})) == ["w", "b"]
    assert caplog.messages == [
        "tree 'ema': 2 averages named after the parameters of 'model' in order"
    ]


# All trees.


def test_all_trees_keep_full_names_and_nesting() -> None:
    chosen = everything(TREE)
    catalog = catalog_of(TREE)
    assert [(e.name, e.path) for e in chosen.entries] == [(t.name, t.path) for t in catalog.tensors]
    assert [(o.name, o.path) for o in chosen.objects] == [(o.name, o.path) for o in catalog.objects]
    assert chosen.renamed == {}


def test_all_tree_globs_see_full_names_and_objects() -> None:
    chosen = everything(TREE, match=["ema.weights.*", "step"])
    assert names(chosen) == [
        "ema.weights.layers.0.w",
        "ema.weights.layers.1.w",
        "ema.weights.norm.b",
        "ema.num_updates",
        "ema.decay",
    ]
    assert [item.name for item in chosen.objects] == ["ema.config", "step"]
    assert "step" not in [item.name for item in everything(TREE, exclude=["step"]).objects]


def test_an_ema_brings_its_settings_whatever_the_filter() -> None:
    for only in (("ema",), ("ema.weights",), ("ema.weights.layers",)):
        chosen = everything(TREE, only)
        assert {"ema.num_updates", "ema.decay"} <= set(names(chosen))
        assert [item.name for item in chosen.objects] == ["ema.config"]
    assert [item.name for item in everything(TREE, ("ema",), exclude=["ema.config"]).objects] == []
    assert "ema.num_updates" not in names(everything(TREE, ("model",)))


def test_the_settings_of_a_bare_list_lie_beside_it() -> None:
    tree = {"model": {"w": W}, "shadow_params": [W], "num_updates": 4, "epoch": 3}
    chosen = everything(tree, ("shadow_params",))
    assert names(chosen) == ["shadow_params.0"]
    assert [item.name for item in chosen.objects] == ["num_updates"]


def test_trees_filter_in_stored_order() -> None:
    chosen = everything(TREE, ("optim", "model"))
    assert names(chosen)[0] == "model.layers.0.w"
    assert names(chosen)[-1] == "optim.state.layers.0.w.exp_avg"
    assert [item.name for item in chosen.objects] == ["optim.param_groups"]
    refused("unknown-tree", everything, TREE, ("nope",))


def test_casts_spare_settings_optimizer_and_other_trees() -> None:
    tree = {**TREE, "extra": {"noise": W}}
    cast = {
        entry.name
        for entry in everything(tree, dtype="bf16").entries
        if entry.dtype.name == "bfloat16"
    }
    live = {"model.layers.0.w", "model.layers.1.w", "model.norm.b"}
    assert cast == live | {"ema.weights.layers.0.w", "ema.weights.layers.1.w", "ema.weights.norm.b"}


def test_stripping_keeps_the_trees_own_name_and_optimizer_state() -> None:
    tree = {
        "module": {"module.a.w": W},
        "ema": {"module": {"_orig_mod.a.w": W}, "n_averaged": INT},
        "optim": {"state": {"module.a.w": {"exp_avg": W}}},
    }
    chosen = everything(tree)
    assert [(e.name, e.path) for e in chosen.entries] == [
        ("module.a.w", ("module", "a.w")),
        ("ema.a.w", ("ema", "a.w")),
        ("ema.n_averaged", ("ema", "n_averaged")),
        ("optim.state.module.a.w.exp_avg", ("optim", "state", "module.a.w", "exp_avg")),
    ]
    assert chosen.renamed == {
        "module.module.a.w": "module.a.w",
        "ema.module._orig_mod.a.w": "ema.a.w",
    }
    whole = everything(tree, strip=False)
    assert whole.renamed == {}
    assert names(everything(tree, keep_prefixes=True)) == names(whole)


def test_stripping_a_flat_checkpoint() -> None:
    chosen = everything({"module.a.w": W, "module.b": W}, nested=False)
    assert [(e.name, e.path) for e in chosen.entries] == [("a.w", ("a.w",)), ("b", ("b",))]


def test_a_rename_across_trees_moves_the_nesting() -> None:
    tree = {"net": {"a.w": W}, "net_ema": {"a.w": W}}
    chosen = everything(tree, rename=["net_ema.=ema.weights.", "net.=model."])
    assert [e.path for e in chosen.entries] == [("model", "a.w"), ("ema", "weights", "a.w")]
    refused("name-collision", everything, tree, rename=["net_ema=net"])
    broken = refused("name-collision", everything, {"model": {"a": W}, "b": W}, rename=["b=model"])
    assert "both a tensor and a dictionary" in broken


def test_objects_collide_too() -> None:
    refused("name-collision", everything, {"model": {"a": W}, "step": 3}, rename=["step=model.a"])


# Properties.

names_of_trees = st.sampled_from(["model", "ema", "module", "optim", "foo", "w", "weights"])
leaf = st.one_of(st.just(W), st.just(INT), st.just(3))
nested_dicts = st.dictionaries(
    names_of_trees,
    st.recursive(
        leaf,
        lambda inner: st.dictionaries(names_of_trees, inner, min_size=1, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)
dotted = st.lists(st.sampled_from(["a", "b", "w", *sorted(WRAPPERS)]), min_size=1, max_size=4).map(
    ".".join
)


@given(st.lists(dotted, min_size=1, max_size=8, unique=True))
def test_a_selection_never_loses_or_doubles_a_tensor(stored: list[str]) -> None:
    catalog = catalog_of(dict.fromkeys(stored, W), nested=False)
    known = list_trees(catalog)
    try:
        chosen = select_all(catalog, known, options())
    except UsageError as error:
        assert error.code == "name-collision"
        return
    assert [entry.source.name for entry in chosen.entries] == stored
    assert len({entry.name for entry in chosen.entries}) == len(stored)
    assert all(".".join(map(str, entry.path)) == entry.name for entry in chosen.entries)
    again = catalog_of({entry.name: W for entry in chosen.entries}, nested=False)
    assert select_all(again, list_trees(again), options()).renamed == {}


prefixes = st.sampled_from(["", "model.", "model", "ema.", "w", "ema.weights.", "module.", "x.y."])


@given(nested_dicts, st.lists(st.tuples(prefixes, prefixes), max_size=3), st.booleans())
def test_paths_always_join_to_names(tree: dict, rules: list[tuple[str, str]], strip: bool) -> None:
    catalog = catalog_of(tree)
    known = list_trees(catalog)
    try:
        chosen = select_all(
            catalog, known, options(rename=[f"{old}={new}" for old, new in rules]), strip=strip
        )
    except UsageError as error:
        assert error.code in ("empty-selection", "name-collision", "usage")
        return
    written = [*chosen.entries, *chosen.objects]
    assert len(written) == len(catalog.tensors) + len(catalog.objects)
    assert all(".".join(map(str, kept.path)) == kept.name for kept in written)
    assert {
        kept.source.name: kept.name for kept in written if kept.source.name != kept.name
    } == chosen.renamed


@pytest.mark.thorough
def test_twenty_thousand_tensors_take_no_time() -> None:
    tree = {
        "model": {f"layers.{n}.w": W for n in range(5000)},
        "ema": {"weights": {f"layers.{n}.w": W for n in range(5000)}, "num_updates": INT},
        "optim": {"state": {f"layers.{n}.w": {"exp_avg": W, "exp_avg_sq": W} for n in range(5000)}},
    }
    catalog = catalog_of(tree)
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        known = list_trees(catalog)
        select_tree(
            default_tree(known),
            options(match=["*.w"], exclude=["layers.1.*"], dtype="bf16", rename=["layers=blocks"]),
        )
        select_all(catalog, known, options(exclude=["model.*.7?.w"]))
        best = min(best, time.process_time() - start)
    assert best < 1.0  # about 0.12 s on two idle cores
