"""Quantised checkpoints, as the packages write them, under every verb: the values are the packages' own."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ema_ckpt
from ema_ckpt.discovery.opening import opened
from ema_ckpt.ops.dequantize import dequantize
from ema_ckpt.ops.results.as_json import as_json
from ema_ckpt.writing.options import WriteOptions
from tests.stories.commands import Commands

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRUTH = json.loads((FIXTURES / "quantized.json").read_text())
UNDERSTOOD = sorted(name for name, weights in TRUTH.items() if weights)
NORM = "model.norm.weight"


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def check(tensors: dict[str, torch.Tensor], fixture: str, dtype: str) -> None:
    """Every weight has the values of the package that wrote it; nothing else is there."""
    assert tensors.keys() == {NORM, *TRUTH[fixture]}
    for name, fact in TRUTH[fixture].items():
        tensor = tensors[name]
        assert list(tensor.shape) == fact["shape"]
        assert str(tensor.dtype) == f"torch.{dtype}"
        assert digest(tensor) == fact[dtype], name
    assert torch.equal(tensors[NORM], torch.linspace(0.5, 1.5, 8).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fixture", UNDERSTOOD)
def test_the_values_are_those_of_the_package_that_wrote_them(
    fixture: str, dtype: str, tmp_path: Path
) -> None:
    asked = {"bfloat16": "bf16", "float32": "fp32"}[dtype]
    result = ema_ckpt.consolidate(FIXTURES / fixture, tmp_path / "out.pt", dequantize=asked)
    check(torch.load(tmp_path / "out.pt", weights_only=True), fixture, dtype)
    assert {one.name: one.scheme for one in result.dequantized or ()} == {
        name: fact["scheme"] for name, fact in TRUTH[fixture].items()
    }
    proven = ema_ckpt.verify(tmp_path / "out.pt", against=FIXTURES / fixture)
    assert proven.status == "sound", proven.problems


@pytest.mark.parametrize("fixture", UNDERSTOOD)
def test_inspect_shows_one_weight_and_what_holds_it(fixture: str) -> None:
    result = ema_ckpt.inspect(FIXTURES / fixture)
    stored = {tensor.name for tensor in result.tensors}
    for one in result.quantized or ():
        assert list(one.shape) == TRUTH[fixture][one.name]["shape"]
        # The tensors inside a subclass of a torch file are listed under no name.
        assert fixture.endswith(".pt") or set(one.parts.values()) <= stored
    assert {one.name for one in result.quantized or ()} == set(TRUTH[fixture])
    assert "quantized" not in as_json(ema_ckpt.inspect(FIXTURES / "safetensors/plain.safetensors"))


@pytest.mark.parametrize("form", ["dcp", "hf", "safetensors", "pt", "reshard", "synthesize"])
def test_every_writer_and_form(form: str, tmp_path: Path) -> None:
    fixture = "quantized/int4-groups"
    source, out = FIXTURES / fixture, tmp_path / "out"
    if form == "reshard":
        ema_ckpt.reshard(source, out, 3, dequantize="bf16")
    elif form == "synthesize":
        ema_ckpt.synthesize([source, source], out, weights=[0.5, 0.5], dequantize="bf16")
    elif form in ("dcp", "hf"):
        to = {"dcp": "dcp", "hf": "safetensors"}[form]
        ema_ckpt.convert(source, out, to, dequantize="bf16")
    else:
        out = out.with_suffix(f".{form}")
        ema_ckpt.convert(source, out, dequantize="bf16")
    ema_ckpt.consolidate(out, tmp_path / "back.safetensors")
    check(load_file(tmp_path / "back.safetensors"), fixture, "bfloat16")
    assert ema_ckpt.verify(out, against=source).status == "sound"


def test_without_the_option_everything_is_copied_as_it_is(tmp_path: Path) -> None:
    source = FIXTURES / "quantized/int4-groups"
    ema_ckpt.convert(source, tmp_path / "out", "safetensors")
    stored = load_file(source / "model.safetensors")
    copied = load_file(tmp_path / "out/model.safetensors")
    assert copied.keys() == stored.keys()
    assert all(torch.equal(copied[name], stored[name]) for name in stored)
    assert (tmp_path / "out/config.json").read_bytes() == (source / "config.json").read_bytes()


def test_the_configuration_no_longer_says_that_it_is_quantised(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "quantized/fp8-blocks", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({"model_type": "é", **config, "last": 1}))
    result = ema_ckpt.convert(source, tmp_path / "out", "safetensors", dequantize="bf16")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert list(written.items()) == [("model_type", "é"), ("last", 1)]
    sizes = {entry.path: entry.nbytes for entry in result.files}
    assert sizes["config.json"] == (tmp_path / "out/config.json").stat().st_size
    assert [warning.code for warning in result.warnings] == ["quantization-config"]
    alone = ema_ckpt.consolidate(source, tmp_path / "alone.pt", dequantize="bf16")
    assert "leave quantization_config out" in alone.warnings[0].message


def test_scales_of_activations_go_with_the_weights(tmp_path: Path) -> None:
    source = FIXTURES / "quantized/float-channels"
    result = ema_ckpt.consolidate(source, tmp_path / "out.pt", dequantize="bf16")
    assert [item.name for item in result.skipped] == ["model.layers.0.mlp.up_proj.input_scale"]
    with pytest.raises(ema_ckpt.EmaCkptError, match="input_scale"):
        ema_ckpt.consolidate(source, tmp_path / "no.pt", dequantize="bf16", strict=True)
    assert ema_ckpt.verify(tmp_path / "out.pt", against=source).status == "sound"


def refused(source: Path, out: Path, **options: object) -> ema_ckpt.EmaCkptError:
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.consolidate(source, out, dequantize="bf16", **options)
    assert not out.exists()
    return caught.value


def test_a_missing_scale_is_refused_by_name(tmp_path: Path) -> None:
    source = FIXTURES / "quantized/missing-scale"
    error = refused(source, tmp_path / "out.pt")
    assert error.code == "incomplete"
    assert "'model.layers.0.mlp.up_proj.weight_scale_inv'" in str(error)
    ema_ckpt.consolidate(
        source, tmp_path / "rest.pt", dequantize="bf16", exclude=["*up_proj.weight"]
    )
    assert list(torch.load(tmp_path / "rest.pt", weights_only=True)) == [NORM]


def test_scales_whose_weight_is_missing_are_refused(tmp_path: Path) -> None:
    tensors = load_file(FIXTURES / "quantized/fp8-blocks/model-00002-of-00002.safetensors")
    save_file(tensors, tmp_path / "lone.safetensors")
    error = refused(tmp_path / "lone.safetensors", tmp_path / "out.pt")
    assert error.code == "incomplete"
    assert "'model.layers.0.mlp.up_proj.weight'" in str(error)


def test_other_schemes_are_refused_by_name(tmp_path: Path) -> None:
    error = refused(FIXTURES / "quantized/gptq", tmp_path / "out.pt")
    assert (error.code, error.tensor) == ("unsupported", "model.layers.0.mlp.up_proj.qweight")
    assert "GPTQ" in str(error)
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "quantized/fp8-blocks", source)
    (source / "config.json").write_text('{"quantization_config": {"quant_method": "quanto"}}')
    error = refused(source, tmp_path / "out.pt")
    assert error.code == "unsupported"
    assert "'quanto'" in str(error)


@pytest.mark.parametrize(
    ("codes", "dtype", "scales", "package"),
    [
        ("fc.weight", torch.int8, "fc.SCB", "bitsandbytes (int8)"),
        ("fc.weight._data", torch.int8, "fc.weight._scale", "optimum-quanto"),
        ("fc.weight._data", torch.float8_e4m3fn, "fc.weight._scale", "optimum-quanto"),
    ],
)
def test_other_schemes_are_named_where_the_codes_come_first(
    codes: str, dtype: torch.dtype, scales: str, package: str, tmp_path: Path
) -> None:
    torch.save({codes: torch.zeros(4, 8).to(dtype), scales: torch.ones(4, 1)}, tmp_path / "c.pt")
    error = refused(tmp_path / "c.pt", tmp_path / "out.pt")
    assert (error.code, error.tensor) == ("unsupported", codes)
    assert f"quantised by {package}" in str(error)


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    source = FIXTURES / "quantized/int4-groups"
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_g_idx"] = torch.arange(96, dtype=torch.int32) // 32
    save_file(tensors, tmp_path / "ordered.safetensors")
    error = refused(tmp_path / "ordered.safetensors", tmp_path / "out.pt")
    assert error.code == "unsupported"
    assert "weight_g_idx" in str(error)


def test_what_does_not_follow_from_shapes_is_not_guessed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "w.weight": torch.randn(64, 96).to(torch.float8_e4m3fn),
        "w.weight_scale_inv": torch.rand(4, 2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    error = refused(tmp_path / "model.safetensors", tmp_path / "out.pt")
    assert error.code == "unsupported"
    assert "blocks of 48 or 64" in str(error)
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 64]}}'
    )
    ema_ckpt.consolidate(tmp_path / "model.safetensors", tmp_path / "out.pt", dequantize="fp32")
    wide = tensors["w.weight_scale_inv"].repeat_interleave(16, 0).repeat_interleave(64, 1)[:, :96]
    values = torch.load(tmp_path / "out.pt", weights_only=True)["w.weight"]
    assert torch.equal(values, tensors["w.weight"].float() * wide)


def test_configured_groups_of_a_row_count_where_equal_ones_would_fit(tmp_path: Path) -> None:
    """Six values a row with two scales are 3 + 3 by the shapes, and 4 + 2 by config.json."""
    codes = torch.arange(1.0, 19.0).reshape(3, 6).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 7.0).reshape(3, 2)
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": codes, "w_scale_inv": scales}, source / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [1, 4]}
    (source / "config.json").write_text(json.dumps({"quantization_config": settings}))
    out = tmp_path / "out.safetensors"
    ema_ckpt.consolidate(source, out, dequantize="fp32")
    columns = torch.tensor([0, 0, 0, 0, 1, 1])
    assert torch.equal(load_file(out)["w"], codes.float() * scales[:, columns])


def test_nothing_quantised_is_refused(tmp_path: Path) -> None:
    error = refused(FIXTURES / "safetensors/plain.safetensors", tmp_path / "out.pt")
    assert error.code == "empty-selection"
    with pytest.raises(ema_ckpt.EmaCkptError, match="expected bf16 or fp32"):
        ema_ckpt.consolidate(FIXTURES / "tiny-lm", tmp_path / "out.pt", dequantize="int8")


def test_diff_compares_values(tmp_path: Path) -> None:
    source = FIXTURES / "quantized/mxfp4-experts"
    ema_ckpt.consolidate(source, tmp_path / "values.pt", dequantize="fp32")
    same = ema_ckpt.diff(source, tmp_path / "values.pt")
    assert (same.compared, same.identical, same.only_in_a, same.only_in_b) == (2, 2, (), ())
    assert [one.scheme for one in same.dequantized_a or ()] == ["mxfp4"]
    assert same.dequantized_b is None
    values = torch.load(tmp_path / "values.pt", weights_only=True)
    name = next(name for name in values if name != NORM)
    values[name][1, 2, 3] += 1
    torch.save(values, tmp_path / "other.pt")
    differing = ema_ckpt.diff(source, tmp_path / "other.pt")
    assert {one.name: one.changed for one in differing.tensors} == {name: 1, NORM: 0}


def test_a_damaged_scale_is_noticed(tmp_path: Path) -> None:
    """The parts are compared with the checksums that the checkpoint records."""
    source = FIXTURES / "quantized/fp8-blocks"
    ema_ckpt.reshard(source, tmp_path / "dcp", 1)
    ema_ckpt.consolidate(tmp_path / "dcp", tmp_path / "sound.pt", dequantize="fp32")
    check(torch.load(tmp_path / "sound.pt", weights_only=True), "quantized/fp8-blocks", "float32")
    stored = load_file(source / "model-00002-of-00002.safetensors")
    scale = next(iter(stored.values())).numpy().tobytes()
    file = tmp_path / "dcp/__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(scale) + 5] ^= 1
    file.write_bytes(data)
    error = refused(tmp_path / "dcp", tmp_path / "out.pt")
    assert (error.code, error.tensor) == ("checksum", "model.layers.0.mlp.up_proj.weight_scale_inv")
    with pytest.raises(ema_ckpt.EmaCkptError, match="weight_scale_inv"):
        ema_ckpt.diff(tmp_path / "dcp", tmp_path / "sound.pt")
    ema_ckpt.consolidate(tmp_path / "dcp", tmp_path / "out.pt", dequantize="bf16", no_verify=True)


def test_a_missing_file_of_scales_is_named_before_anything_is_written(tmp_path: Path) -> None:
    source = FIXTURES / "quantized/fp8-blocks"
    ema_ckpt.reshard(source, tmp_path / "dcp", 2)
    (tmp_path / "dcp/__1_0.distcp").unlink()
    error = refused(tmp_path / "dcp", tmp_path / "out.pt", dry_run=True)
    assert error.code == "missing-file"
    assert "__1_0.distcp" in str(error)


def test_moments_are_left_alone(tmp_path: Path) -> None:
    codes = torch.arange(32, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scaled = {"weight": codes.reshape(4, 8), "weight_scale": torch.ones(4, 1)}
    moments = {"state": {"w": {"exp_avg": codes.clone(), "exp_avg_scale": torch.ones(1)}}}
    torch.save({"model": scaled, "optimizer": moments}, tmp_path / "run.pt")
    ema_ckpt.convert(tmp_path / "run.pt", tmp_path / "out.pt", dequantize="fp32")
    written = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(written["model"]["weight"], codes.reshape(4, 8).float())
    assert written["optimizer"]["state"]["w"]["exp_avg"].dtype == torch.float8_e4m3fn


def test_the_terminal_says_what_is_quantised(tmp_path: Path) -> None:
    commands = Commands(tmp_path / "marker")
    source = FIXTURES / "quantized/int4-groups"
    shown = commands.run("inspect", source).stdout
    assert "mlp.up_proj.weight int32 (pack-quantized) 24 × 96" in shown
    assert "weight_scale" not in shown
    assert "1 quantised weight (pack-quantized), written as stored, or as values with" in shown
    inside = commands.run("inspect", FIXTURES / "quantized/torchao.pt").stdout
    assert "int4.weight bfloat16 (torchao-IntxUnpackedToInt8Tensor) 24 × 96" in inside
    out = tmp_path / "out.pt"
    written = commands.run("consolidate", source, out, "--dequantize", "bf16").stdout
    assert "dequantized model.layers.0.mlp.up_proj.weight (pack-quantized)\n" in written
    compared = commands.run("diff", source, out).stdout
    assert "1 quantised weight (pack-quantized) as values\n" in compared
    commands.close()


def test_subclasses_in_parts_of_a_checkpoint(tmp_path: Path) -> None:
    """A weights file of a step directory, beside its optimizer."""
    step = tmp_path / "step_5"
    step.mkdir()
    shutil.copy(FIXTURES / "quantized/torchao.pt", step / "model.pt")
    torch.save({"state": {}, "param_groups": [{"lr": 0.1}]}, step / "optimizer.pt")
    ema_ckpt.consolidate(step, tmp_path / "out.pt", dequantize="bf16")
    values = torch.load(tmp_path / "out.pt", weights_only=True)
    check(values, "quantized/torchao.pt", "bfloat16")


def test_rules_see_the_values(tmp_path: Path) -> None:
    """A rule transposes a dequantised weight, and a constant lies beside it; checksums still count."""
    (tmp_path / "rules.toml").write_text(
        '[[rule]]\nfrom = "model.layers.{layer}.mlp.up_proj.weight"\n'
        'to = "up.{layer}"\nsteps = [{transpose = [0, 1]}]\n'
        '[[rule]]\nto = "one"\nconstant = 1.0\nshape = [2]\ndtype = "float32"\n'
    )
    source, rules = FIXTURES / "quantized/fp8-blocks", tmp_path / "rules.toml"
    ema_ckpt.consolidate(source, tmp_path / "plain.pt", dequantize="fp32")
    values = torch.load(tmp_path / "plain.pt", weights_only=True)
    out = tmp_path / "ruled.pt"
    result = ema_ckpt.consolidate(source, out, dequantize="fp32", rules=rules)
    ruled = torch.load(out, weights_only=True)
    assert torch.equal(ruled["up.0"], values["model.layers.0.mlp.up_proj.weight"].t())
    assert len(result.dequantized or ()) == 1
    assert ema_ckpt.verify(out, against=source, rules=rules).status == "sound"


def test_an_interrupted_run_is_not_continued_with_other_values(tmp_path: Path) -> None:
    """bf16 values in fp32 and fp32 values have one plan of bytes, and are not the same run."""
    with opened(FIXTURES / UNDERSTOOD[0]) as catalog:
        made = {
            asked: dequantize(catalog, WriteOptions.parse({"dequantize": asked})).catalog.made_by
            for asked in ("bf16", "fp32")
        }
    assert made["bf16"] != made["fp32"] and all(made.values())


def test_weights_that_share_their_parts_stay_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    codes, scales = torch.randn(24, 16).to(torch.float8_e4m3fn), torch.rand(24, 1)
    other = {"o.weight": codes, "o.weight_scale": scales.clone()}  # shares its codes alone
    first = {"a.weight": codes, "a.weight_scale": scales}
    second = {"b.weight": codes, "b.weight_scale": scales}
    torch.save({**first, **second, **other}, tmp_path / "run.pt")
    result = ema_ckpt.consolidate(tmp_path / "run.pt", tmp_path / "out.pt", dequantize="fp32")
    values = torch.load(tmp_path / "out.pt", weights_only=True)
    assert values.keys() == {"a.weight", "b.weight", "o.weight"}
    expected = codes.float() * scales
    assert all(torch.equal(value, expected) for value in values.values())
    places = [value.untyped_storage().data_ptr() for value in values.values()]
    assert places[0] == places[1] != places[2]
    assert result.nbytes == 2 * expected.nbytes
    file = tmp_path / "out.safetensors"
    result = ema_ckpt.convert(tmp_path / "run.pt", file, dequantize="fp32")
    assert result.ties == {"b.weight": "a.weight"}
    assert load_file(file).keys() == {"a.weight", "o.weight"}
    assert ema_ckpt.verify(file, against=tmp_path / "run.pt").status == "sound"
    apart = tmp_path / "apart.safetensors"
    ema_ckpt.convert(tmp_path / "run.pt", apart, dequantize="fp32", expand_ties=True)
    assert all(torch.equal(value, expected) for value in load_file(apart).values())
    assert len(load_file(apart)) == 3


@pytest.mark.parametrize("fixture", ["fp8-blocks", "int4-groups"])
def test_ties_of_parts_that_a_file_records_become_ties_of_weights(
    fixture: str, tmp_path: Path
) -> None:
    """As `save_model` of safetensors records them: the dropped name, and the one that was kept."""
    tensors = {}
    for file in sorted((FIXTURES / "quantized" / fixture).glob("*.safetensors")):
        tensors |= load_file(file)
    layer = "model.layers.0.mlp.up_proj."
    ties = {f"head.{n.removeprefix(layer)}": n for n in tensors if n.startswith(layer)}
    assert len(ties) > 1
    source, out = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    save_file(tensors, source, metadata=ties)
    shutil.copy(FIXTURES / "quantized" / fixture / "config.json", tmp_path)
    result = ema_ckpt.consolidate(source, out, dequantize="bf16")
    assert result.ties == {"head.weight": f"{layer}weight"}
    with safe_open(out, "pt") as file:
        assert set(file.keys()) == {f"{layer}weight", NORM}
        recorded = {key: kept for key, kept in file.metadata().items() if key.startswith("head.")}
    assert recorded == {"head.weight": f"{layer}weight"}
    apart = tmp_path / "apart.safetensors"
    ema_ckpt.consolidate(source, apart, dequantize="bf16", expand_ties=True)
    written = load_file(apart)
    assert torch.equal(written["head.weight"], written[f"{layer}weight"])
    assert written.keys() == {"head.weight", f"{layer}weight", NORM}


@pytest.mark.parametrize("verb", ["reshard", "convert", "consolidate"])
def test_settings_of_codes_that_are_copied_go_with_them(verb: str, tmp_path: Path) -> None:
    """Block sizes that do not follow from shapes: without config.json nothing could be computed."""
    torch.manual_seed(0)
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    codes = torch.randn(64, 96).to(torch.float8_e4m3fn)
    save_file(
        {"w.weight": codes, "w.weight_scale_inv": torch.rand(4, 2)}, source / "model.safetensors"
    )
    settings = b'{"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 64]}}'
    (source / "config.json").write_bytes(settings)
    ema_ckpt.consolidate(source, tmp_path / "expected.pt", dequantize="fp32")
    if verb == "reshard":
        result = ema_ckpt.reshard(source, copy, 2)
    elif verb == "convert":  # also from a file that is named itself
        result = ema_ckpt.convert(source / "model.safetensors", copy, "dcp")
    else:
        ema_ckpt.reshard(source, tmp_path / "dcp", 2)
        result = ema_ckpt.consolidate(tmp_path / "dcp", copy)
    assert (copy / "config.json").read_bytes() == settings
    assert ("config.json", len(settings)) in [(file.path, file.nbytes) for file in result.files]
    assert "config.json" not in [item.name for item in result.skipped]
    ema_ckpt.consolidate(copy, tmp_path / "values.pt", dequantize="fp32")
    values, expected = (
        torch.load(tmp_path / name, weights_only=True) for name in ("values.pt", "expected.pt")
    )
    assert torch.equal(values["w.weight"], expected["w.weight"])
    assert ema_ckpt.verify(copy, against=source).status == "sound"


def test_settings_do_not_go_with_other_weights(tmp_path: Path) -> None:
    settings = '{"quantization_config": {"quant_method": "fp8"}}'
    (tmp_path / "config.json").write_text(settings)
    torch.save({"w": torch.ones(3)}, tmp_path / "plain.pt")
    ema_ckpt.convert(tmp_path / "plain.pt", tmp_path / "plain", "dcp")
    assert not (tmp_path / "plain/config.json").exists()
    source = FIXTURES / "quantized/fp8-blocks"  # written as values, it is not quantised any more
    values = ema_ckpt.reshard(source, tmp_path / "values", 2, dequantize="bf16")
    assert not (tmp_path / "values/config.json").exists()
    assert "leave quantization_config out" in values.warnings[0].message
    single = ema_ckpt.convert(source, tmp_path / "single.pt")
    assert "config.json" in [item.name for item in single.skipped]
    (left,) = ema_ckpt.consolidate(source, tmp_path / "one.pt").skipped
    assert (left.name, "beside" in left.reason) == ("config.json", True)


def test_the_scale_byte_255_is_nan(tmp_path: Path) -> None:
    """OCP Microscaling Formats 1.0, section 5.4.1, as torch's float8_e8m0fnu has it too."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 3, 16), dtype=torch.uint8)
    scales = torch.tensor([[127, 255, 0], [254, 128, 255]], dtype=torch.uint8)
    save_file({"w.blocks": blocks, "w.scales": scales}, tmp_path / "m.safetensors")
    ema_ckpt.consolidate(tmp_path / "m.safetensors", tmp_path / "out.pt", dequantize="fp32")
    groups = torch.load(tmp_path / "out.pt", weights_only=True)["w"].reshape(2, 3, 32)
    factors = scales.view(torch.float8_e8m0fnu).float()
    assert torch.equal(groups.isnan().all(2), factors.isnan())
    assert torch.equal(groups.isnan().any(2), scales == 255)
    small = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([small, -small])
    values = table[torch.stack([blocks & 15, blocks >> 4], dim=-1).long()].reshape(2, 3, 32)
    expected = values * factors[..., None]
    assert torch.equal(groups.nan_to_num(7.0), expected.nan_to_num(7.0))
