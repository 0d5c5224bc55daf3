"""Rules that come with the package, each tested against the package that reads what they make."""

from __future__ import annotations

import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import ema_ckpt
from tests.distributed import launcher
from tests.integration.training import as_launched, keep, kept

pytestmark = pytest.mark.integration

State = dict[str, torch.Tensor]


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# transformers: fused experts


def mixture(kind: str, seed: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 32, "num_experts_per_tok": 2,
    }  # fmt: skip
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=4)
        return transformers.MixtralForCausalLM(config)
    config = transformers.Qwen3MoeConfig(
        **sizes, num_experts=4, moe_intermediate_size=8, head_dim=8
    )
    return transformers.Qwen3MoeForCausalLM(config)


def weights(model: Any) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "rules"),
    [("mixtral", "transformers-v5-mixtral"), ("qwen3", "transformers-v5-qwen-moe")],
)
def test_transformers_experts(kind: str, rules: str, tmp_path: Path) -> None:
    model = mixture(kind, seed=0)
    ema = ema_ckpt.ShardedEMA(model, decay=0.5)
    ema.update()
    ema_ckpt.save(tmp_path / "run" / "step_1", model=model, ema=ema)
    fused = weights(model)
    assert any(name.endswith("gate_up_proj") for name in fused)
    model.save_pretrained(tmp_path / "own")
    apart = load_file(tmp_path / "own" / "model.safetensors")
    assert not any(name.endswith("gate_up_proj") for name in apart)

    # A run of transformers 5 to files for the Hub, which have the names of transformers 4.
    ema_ckpt.consolidate(tmp_path / "run", tmp_path / "hub", rules=rules, inverse=True)
    assert_same(load_file(tmp_path / "hub" / "model.safetensors"), apart)
    shutil.copy(tmp_path / "own" / "config.json", tmp_path / "hub")
    loaded, info = type(model).from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same(weights(loaded), fused)

    # A run of transformers 4 into a module of transformers 5.
    tree = {"model": apart, "ema": {"weights": apart, "num_updates": torch.tensor(1)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save(tree, checkpoint_id=tmp_path / "old", no_dist=True)
    other = mixture(kind, seed=1)
    average = ema_ckpt.ShardedEMA(other, decay=0.5)
    ema_ckpt.restore(tmp_path / "old", model=other, ema=average, rules=rules)
    assert_same(weights(other), fused)
    assert_same(dict(average.state_dict()["weights"]), fused)
    ema_ckpt.convert(tmp_path / "own" / "model.safetensors", tmp_path / "v5.pt", rules=rules)
    assert_same(torch.load(tmp_path / "v5.pt", weights_only=True), fused)


# diffusers: FLUX under its original names


def flux() -> Any:
    import diffusers

    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=8, pooled_projection_dim=8, guidance_embeds=True, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip


def test_diffusers_flux(tmp_path: Path) -> None:
    model = flux()
    expected = weights(model)
    model.save_pretrained(tmp_path / "own")
    file = tmp_path / "own" / "diffusion_pytorch_model.safetensors"
    original = tmp_path / "original.safetensors"
    ema_ckpt.convert(file, original, rules="diffusers-flux", inverse=True)
    assert "double_blocks.1.img_attn.qkv.weight" in load_file(original)
    ema_ckpt.consolidate(
        original, tmp_path / "back", basename="diffusion_pytorch_model", rules="diffusers-flux"
    )
    shutil.copy(tmp_path / "own" / "config.json", tmp_path / "back")
    loaded, info = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same(weights(loaded), expected)


def test_diffusers_flux_as_its_own_converter(tmp_path: Path) -> None:
    """The converter knows the real width alone: rows as there, and few columns."""
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    file = tmp_path / "small.safetensors"
    model = flux()
    save_file({name: tensor.contiguous() for name, tensor in weights(model).items()}, file)
    ema_ckpt.convert(file, tmp_path / "names.safetensors", rules="diffusers-flux", inverse=True)
    original = {}
    for number, name in enumerate(load_file(tmp_path / "names.safetensors")):
        rows = 3072 * 7 if "linear1" in name else 6
        shape = (rows,) if name.endswith(("bias", "scale")) else (rows, 2)
        original[name] = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    save_file(original, tmp_path / "original.safetensors")
    ema_ckpt.convert(
        tmp_path / "original.safetensors", tmp_path / "made.safetensors", rules="diffusers-flux"
    )
    expected = convert_flux_transformer_checkpoint_to_diffusers(dict(original))
    assert_same(load_file(tmp_path / "made.safetensors"), expected)


# Megatron-core: queries, keys and values in groups


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=32, rms_norm_eps=1e-6,
        tie_word_embeddings=False, rope_theta=10000.0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gpt() -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.cuda.synchronize = lambda *args: (
        None
    )  # megatron waits for copies that a CPU does not make
    torch.cuda.current_device = lambda: torch.device("cpu")
    parallel_state.initialize_model_parallel(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
        use_cpu_initialization=True, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, layernorm_epsilon=1e-6,
        gradient_accumulation_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, apply_rope_fusion=False, hidden_dropout=0.0, attention_dropout=0.0,
        attention_backend="unfused",
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=64, max_sequence_length=32,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    ).eval()  # fmt: skip


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(3))


def runs_in_megatron(folder: Path) -> None:
    """Load what rules made, compute logits, and save as Megatron does."""
    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    warnings.simplefilter("ignore")
    as_launched()
    model = gpt()
    get_cuda_rng_tracker().fork = lambda *_: nullcontext()  # dropout's; there is none of it
    missing, unexpected = model.load_state_dict(
        load_file(folder / "megatron.safetensors"), strict=False
    )
    assert not [name for name in missing if not name.endswith("_extra_state")]
    assert not unexpected
    ids = tokens()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    causal = torch.triu(torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool), 1)
    with torch.no_grad():
        logits = model(ids, positions, causal)
    keep({"logits": logits.float()}, folder / "logits.pt")
    (folder / "iter_0000001").mkdir()
    dist_checkpointing.save(
        {"model": model.sharded_state_dict(), "iteration": 1}, str(folder / "iter_0000001")
    )
    dist.barrier()


def test_megatron_llama(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "hf")
    source = tmp_path / "hf" / "model.safetensors"
    values = ["groups=2", "heads_per_group=2"]
    made = tmp_path / "megatron.safetensors"
    ema_ckpt.convert(source, made, rules="megatron-llama", rule_values=values)
    assert (
        ema_ckpt.verify(made, against=source, rules="megatron-llama", rule_values=values).status
        == "sound"
    )
    launcher.run(1, runs_in_megatron, tmp_path, timeout=180)
    with torch.no_grad():
        expected = model(tokens()).logits
    assert torch.allclose(kept(tmp_path / "logits.pt")["logits"], expected, atol=1e-4)

    # What Megatron stores, all layers in one tensor, goes back to what transformers loads.
    back = tmp_path / "back"
    ema_ckpt.consolidate(
        tmp_path / "iter_0000001",
        back,
        rules="megatron-llama-dist",
        rule_values=values,
        inverse=True,
    )
    assert_same(load_file(back / "model.safetensors"), load_file(source))
