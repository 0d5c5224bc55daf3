"""Parts of quantised weights under `--dtype`, and codes whose scales are missing: neither passes in silence."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ema_ckpt
from ema_ckpt.ops.results.as_json import as_json
from tests.stories.commands import Commands

FIXTURES = Path(__file__).parents[2] / "fixtures"
UP = "model.layers.0.mlp.up_proj"
NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]


def fp8() -> tuple[Tensors, set[str]]:
    """Blocks of FP8 whose scales bf16 cannot hold; and the names that no cast may touch."""
    scale = torch.rand(2, 3, generator=torch.Generator().manual_seed(3)) + 0.1
    codes = torch.linspace(-400, 400, 256 * 384).reshape(256, 384).to(torch.float8_e4m3fn)
    return {f"{UP}.weight": codes, f"{UP}.weight_scale_inv": scale}, {f"{UP}.weight_scale_inv"}


def int8() -> tuple[Tensors, set[str]]:
    """Rows of int8 with zero points that are floats, and scales of what the layer takes."""
    codes = torch.arange(-32, 32, dtype=torch.int8).reshape(4, 16)
    tensors = {
        f"{UP}.weight": codes,
        f"{UP}.weight_scale": torch.tensor([[0.1], [0.2], [0.3], [0.7]]),
        f"{UP}.weight_zero_point": torch.tensor([[0.1], [0.0], [0.3], [0.7]]),
        f"{UP}.input_scale": torch.tensor([0.123456]),
    }
    return tensors, tensors.keys() - {f"{UP}.weight"}


def int4() -> tuple[Tensors, set[str]]:
    words = torch.arange(4 * 8, dtype=torch.int32).reshape(4, 8)
    tensors = {
        f"{UP}.weight_packed": words,
        f"{UP}.weight_scale": torch.rand(4, 2, generator=torch.Generator().manual_seed(5)) + 0.1,
        f"{UP}.weight_shape": torch.tensor([4, 64]),
    }
    return tensors, {f"{UP}.weight_scale"}


def nvfp4() -> tuple[Tensors, set[str]]:
    tensors = {
        f"{UP}.weight_packed": torch.arange(4 * 16, dtype=torch.uint8).reshape(4, 16),
        f"{UP}.weight_scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
        f"{UP}.weight_global_scale": torch.tensor([1234.567]),
    }
    return tensors, {f"{UP}.weight_global_scale"}


def not_understood() -> tuple[Tensors, set[str]]:
    """bitsandbytes' four bits, and ModelOpt's, which nobody here computes."""
    tensors = {
        f"{UP}.weight": torch.arange(64, dtype=torch.uint8),
        f"{UP}.weight.absmax": torch.rand(4) + 0.1,
        f"{UP}.weight.quant_map": torch.linspace(-1, 1, 16),
        "down.weight": torch.arange(64, dtype=torch.uint8),
        "down.weight_scale": torch.ones(8).to(torch.float8_e4m3fn),
        "down.weight_scale_2": torch.tensor(0.0012345),
    }
    return tensors, {f"{UP}.weight.absmax", f"{UP}.weight.quant_map", "down.weight_scale_2"}


def hqq() -> tuple[Tensors, set[str]]:
    """As `HQQLinear.state_dict()` has them; no `config.json` tells what they are."""
    exact = {f"{UP}.scale": torch.rand(64, 1) + 0.1, f"{UP}.zero": torch.rand(64, 1)}
    codes = {f"{UP}.W_q": torch.arange(32 * 64).reshape(32, 64).to(torch.uint8)}
    return {**codes, **exact, f"{UP}.nbits": torch.tensor(4)}, set(exact)


def quanto() -> tuple[Tensors, set[str]]:
    """optimum-quanto: eight bits, and four bits, whose codes lie a level below."""
    exact = {
        f"{UP}.weight._scale": torch.rand(64, 1) + 0.1,
        "down.weight._scale": torch.rand(64, 1) + 0.1,
        "down.weight._shift": torch.rand(64, 1),
        "down.input_scale": torch.tensor(0.123456),
    }
    codes = {
        f"{UP}.weight._data": torch.arange(64, dtype=torch.int8).reshape(8, 8),
        "down.weight._data._data": torch.arange(64, dtype=torch.uint8).reshape(8, 8),
    }
    return {**codes, **exact}, set(exact)


def mlx() -> tuple[Tensors, set[str]]:
    """As MLX has them: words of codes, and a scale and an offset for each group of a row."""
    exact = {f"{UP}.scales": torch.rand(8, 2).half() + 0.1, f"{UP}.biases": torch.rand(8, 2).half()}
    words = torch.arange(8 * 16).reshape(8, 16).to(torch.uint32)
    return {f"{UP}.weight": words, **exact}, set(exact)


SCHEMES = [fp8, int8, int4, nvfp4, not_understood, hqq, quanto, mlx]
Make = Callable[[], tuple[Tensors, set[str]]]


METHODS = {
    "hqq": {
        "W_q": torch.arange(32 * 64).reshape(32, 64).to(torch.uint8),
        "scale": torch.full((64, 1), 0.1),
        "zero": torch.full((64, 1), 0.3),
    },
    "aqlm": {
        "codes": torch.zeros(64, 8, 1, dtype=torch.int16),
        "codebooks": torch.full((1, 256, 1, 8), 0.1),
        "scales": torch.full((64, 1, 1, 1), 0.7),
    },
    "vptq": {
        "indices": torch.zeros(1, 8, 4, dtype=torch.int32),
        "centroids.weight": torch.full((1, 16), 0.1),
        "weight_bias": torch.full((64,), 0.3),
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_parts_of_a_method_that_is_not_understood(method: str, tmp_path: Path) -> None:
    """What `config.json` calls quantised keeps scales, tables and settings, whatever their names."""
    layer = METHODS[method]
    tensors = {f"{UP}.{leaf}": tensor for leaf, tensor in layer.items()}
    tensors |= {f"{UP}.bias": torch.ones(4), NORM: torch.ones(8)}
    source = saved(tensors, tmp_path / "source")
    settings = json.dumps({"quantization_config": {"quant_method": method}})
    (source / "config.json").write_text(settings)
    result = ema_ckpt.convert(source, tmp_path / "copy", to="safetensors", dtype="bf16")
    written = load_file(tmp_path / "copy" / "model.safetensors")
    cast = {name for name in written if written[name].dtype != tensors[name].dtype}
    assert cast == {f"{UP}.bias", NORM}
    assert [one.code for one in result.warnings] == ["scales-kept"]
    assert (tmp_path / "copy" / "config.json").read_text() == settings


def test_counters_beside_weights_are_no_codes(tmp_path: Path) -> None:
    """Integers of layers that a method left alone keep nobody from being cast."""
    tensors = {"norm.weight": torch.ones(4), "norm.num_batches_tracked": torch.tensor(7)}
    tensors["table.position_ids"] = torch.arange(4)[None]
    source = saved(tensors, tmp_path / "source")
    (source / "config.json").write_text('{"quantization_config": {"quant_method": "hqq"}}')
    result = ema_ckpt.convert(source, tmp_path / "copy.safetensors", dtype="bf16")
    assert load_file(tmp_path / "copy.safetensors")["norm.weight"].dtype == torch.bfloat16
    assert not result.warnings


def saved(tensors: Tensors, folder: Path) -> Path:
    """A checkpoint with a norm and a bias beside the quantised weights, as plain floats."""
    folder.mkdir()
    plain = {NORM: torch.linspace(0.1, 1, 8), f"{UP}.bias": torch.linspace(-1, 1, 4)}
    save_file({**tensors, **plain}, folder / "model.safetensors")
    return folder


def check_cast(written: Tensors, stored: Tensors, exact: set[str], result: object) -> None:
    """Plain floats are cast, all else is there bit for bit, and the warning names what was spared."""
    for name in (NORM, f"{UP}.bias"):
        assert written.pop(name).dtype == torch.bfloat16
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name
    document = json.loads(json.dumps(as_json(result)))
    told = [one["message"] for one in document["warnings"] if one["code"] == "scales-kept"]
    assert len(told) == 1
    assert all(repr(name) in told[0] for name in exact)
    assert NORM not in told[0]


@pytest.mark.parametrize("verb", ["convert", "consolidate", "reshard"])
@pytest.mark.parametrize("make", SCHEMES)
def test_scales_are_not_cast(make: Make, verb: str, tmp_path: Path) -> None:
    tensors, exact = make()
    tensors = {name: t.reshape(1) if not t.dim() else t for name, t in tensors.items()}
    source, out = saved(tensors, tmp_path / "source"), tmp_path / "out.safetensors"
    if verb == "reshard":
        result = ema_ckpt.reshard(source, tmp_path / "dcp", 2, dtype="bf16")
        ema_ckpt.consolidate(tmp_path / "dcp", out)
    else:
        result = getattr(ema_ckpt, verb)(source, out, dtype="bf16")
    check_cast(load_file(out), tensors, exact, result)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_weights_keep_their_values(dtype: str, tmp_path: Path) -> None:
    source = saved(fp8()[0], tmp_path / "source")
    ema_ckpt.convert(source, tmp_path / "out.safetensors", dtype=dtype)
    compared = ema_ckpt.diff(tmp_path / "out.safetensors", source)
    assert {one.name: one.changed for one in compared.tensors}[f"{UP}.weight"] == 0


def test_nothing_is_said_where_no_cast_was_held_back(tmp_path: Path) -> None:
    source = saved(fp8()[0], tmp_path / "source")
    same = ema_ckpt.convert(source, tmp_path / "same.pt", dtype="fp32")
    spared = ema_ckpt.convert(source, tmp_path / "a.pt", dtype="bf16", keep_dtype=["*_scale_inv"])
    without = ema_ckpt.convert(source, tmp_path / "b.pt", dtype="bf16", match=["*norm*"])
    values = ema_ckpt.convert(source, tmp_path / "c.pt", dtype="bf16", dequantize="fp32")
    assert [one.warnings for one in (same, spared, without, values)] == [()] * 4
    assert torch.load(tmp_path / "c.pt")[f"{UP}.weight"].dtype == torch.bfloat16


def test_names_of_rules_and_renames(tmp_path: Path) -> None:
    """A scale is one under any name it gets, and what else has such a name is none."""
    tensors, exact = fp8()
    source = saved(tensors | {"mixer.logit_scale": torch.rand(4)}, tmp_path / "source")
    rules = tmp_path / "rules.toml"
    rules.write_text(f'[[rule]]\nfrom = "{UP}.weight_scale_inv"\nto = "{UP}.w_s"\n')
    result = ema_ckpt.convert(
        source, tmp_path / "out.safetensors", dtype="bf16", rules=rules, rename={"model.": "net."}
    )
    written = load_file(tmp_path / "out.safetensors")
    name = f"{UP}.w_s".replace("model.", "net.")
    assert torch.equal(written[name], tensors[exact.pop()])
    assert written["mixer.logit_scale"].dtype == torch.bfloat16
    assert [one.code for one in result.warnings] == ["scales-kept"]
    assert name in result.warnings[0].message


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (int8, "--dequantize bf16 sums"),
        (int4, "--dequantize bf16 sums"),
        (not_understood, "--exclude leaves it out"),
    ],
)
def test_codes_and_scales_are_not_summed(make: Make, remedy: str, tmp_path: Path) -> None:
    source, out = saved(make()[0], tmp_path / "source"), tmp_path / "out"
    with pytest.raises(ema_ckpt.EmaCkptError, match=remedy) as caught:
        ema_ckpt.synthesize([source, source], out, weights=[0.5, 0.5])
    assert (caught.value.code, out.exists()) == ("unsupported", False)
    ema_ckpt.synthesize([source, source], out, weights=[0.5, 0.5], match=[NORM, "*.bias"])


def test_the_state_dict_of_python(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors, exact = int8()
    with ema_ckpt.open(saved(tensors, tmp_path / "source")) as checkpoint:
        with caplog.at_level(logging.WARNING, "ema_ckpt"):
            read = checkpoint.state_dict(dtype="bf16")
        assert all(torch.equal(read[name], tensors[name]) for name in exact)
        assert read[NORM].dtype == torch.bfloat16
        assert all(repr(name) in caplog.text for name in exact)


# Codes without scales.


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (fp8, "weight_scale_inv"),
        (int8, "weight_scale"),
        (int4, "weight_scale"),
        (int4, "weight_shape"),
        (nvfp4, "weight_scale"),
    ],
)
def test_every_verb_that_looks_names_what_is_missing(make: Make, lost: str, tmp_path: Path) -> None:
    tensors, _ = make()
    whole = saved(tensors, tmp_path / "whole")
    del tensors[f"{UP}.{lost}"]
    source = saved(tensors, tmp_path / "source")
    codes = next(iter(tensors))
    for look in (
        ema_ckpt.inspect,
        ema_ckpt.verify,
        ema_ckpt.check,
        lambda path: ema_ckpt.diff(path, path),
    ):
        told = [one.message for one in look(source).warnings if one.code == "bare-codes"]
        assert len(told) == 1
        assert repr(codes) in told[0]
        assert f"{UP}.{lost}" in told[0]
        assert "bare-codes" not in [one.code for one in look(whole).warnings]


def test_codes_of_bitsandbytes_do_not_lack_their_scales(tmp_path: Path) -> None:
    tensors = {
        f"{UP}.weight": torch.ones(4, 4, dtype=torch.int8),
        f"{UP}.SCB": torch.ones(4),
        f"{UP}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    source = saved(tensors, tmp_path / "source")
    assert "bare-codes" not in [one.code for one in ema_ckpt.inspect(source).warnings]


@pytest.mark.parametrize(
    ("make", "lost"), [(fp8, "weight_scale_inv"), (int8, "weight_scale"), (int4, "weight_shape")]
)
def test_writers_name_what_the_selection_leaves_out(make: Make, lost: str, tmp_path: Path) -> None:
    tensors, _ = make()
    source = saved(tensors, tmp_path / "source")
    codes = next(iter(tensors))

    def told(out: str, verb: Callable[..., Any], **options: object) -> list[str]:
        result = verb(source, tmp_path / out, **options)
        return [one.message for one in result.warnings if one.code == "bare-codes"]

    for out, verb, options in (
        ("a.safetensors", ema_ckpt.consolidate, {}),
        ("b.pt", ema_ckpt.convert, {}),
        ("c", ema_ckpt.reshard, {"world_size": 2}),
    ):
        (message,) = told(out, verb, exclude=[f"*{lost}"], **options)
        assert repr(codes) in message
        assert f"leaves out '{UP}.{lost}'" in message
        assert not told(f"whole-{out}", verb, **options)
    assert told("d.safetensors", ema_ckpt.consolidate, match=[codes])
    assert not told("e.safetensors", ema_ckpt.consolidate, match=["*norm*"])
    assert not told("f.safetensors", ema_ckpt.consolidate, exclude=["*norm*"])
    values = {"match": [f"{UP}.weight"], "dequantize": "bf16"}
    assert not told("g.safetensors", ema_ckpt.consolidate, **values)


def test_codes_that_lack_their_scales_already_are_copied(tmp_path: Path) -> None:
    lacking = FIXTURES / "quantized/missing-scale"
    result = ema_ckpt.consolidate(lacking, tmp_path / "a.safetensors", exclude=["*norm*"])
    assert "bare-codes" not in [one.code for one in result.warnings]


def test_exit_codes_and_json(tmp_path: Path) -> None:
    """Each is a warning, which changes no exit code; of two checkpoints it names the one."""
    whole = FIXTURES / "quantized/fp8-blocks"
    lacking = FIXTURES / "quantized/missing-scale"
    commands = Commands(tmp_path / "marker")
    for arguments, code in (
        (("inspect", lacking), 0),
        (("verify", lacking), 3),
        (("verify", lacking, "--quick"), 0),
        (("diff", whole, lacking), 0),
    ):
        done = commands.run(*arguments, "--json")
        assert done.code == code, arguments
        told = [one for one in done.document["warnings"] if one["code"] == "bare-codes"]
        assert len(told) == 1
        assert f"{UP}.weight_scale_inv" in told[0]["message"]
    commands.close()
    assert str(lacking) in told[0]["message"]


def test_scales_in_another_shard_are_there(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "quantized/fp8-blocks", source)
    assert "bare-codes" not in [one.code for one in ema_ckpt.verify(source).warnings]
    damaged = source / "model-00002-of-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:40])
    result = ema_ckpt.verify(source)
    assert result.status == "damaged"
    assert "bare-codes" not in [one.code for one in result.warnings]


def test_diff_names_what_is_not_understood(tmp_path: Path) -> None:
    gptq = FIXTURES / "quantized/gptq"
    told = [one.message for one in ema_ckpt.diff(gptq, gptq).warnings if one.code == "bare-codes"]
    assert len(told) == 1
    assert "GPTQ" in told[0]


def test_moments_of_eight_bits_are_no_codes(tmp_path: Path) -> None:
    moments = {"exp_avg": torch.ones(4, 4).to(torch.float8_e4m3fn), "step": torch.tensor(1.0)}
    state = {"model": {"a.weight": torch.ones(4, 4)}, "optim": {"state": {"a.weight": moments}}}
    torch.save(state, tmp_path / "run.pt")
    codes = [one.code for one in ema_ckpt.inspect(tmp_path / "run.pt").warnings]
    assert "bare-codes" not in codes
