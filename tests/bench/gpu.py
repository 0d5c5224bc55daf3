"""Updates on a CUDA device beside their rivals, and the step of a real FSDP2 training with and without an average.

    python -m tests.bench.gpu update [--layers 24]      one table, the card's copy bandwidth measured in the same run
    python -m tests.bench.gpu offload [--layers 24]     the two-way PCIe rate, and an offloaded update alone
    python -m tests.bench.gpu optimizer [--layers 24]   AdamW's state on the device and in host memory
    python -m tests.bench.gpu step [--pairs 10]         alternating blocks of 20 steps
    torchrun --nproc-per-node 2 -m tests.bench.gpu step

Rivals are written out as their projects do it, on the same tensors, each timed alone in the same process: median of
the repeats, by CUDA events. `of limit` is the least traffic (every parameter read, every average read and written)
over the copy bandwidth, divided by the time.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ema_ckpt import offload_optimizer
from ema_ckpt.ema.engines import offload
from ema_ckpt.ema.manager import ShardedEMA

DECAY = 0.9999
WIDTH, HEADS, VOCABULARY = 2048, 16, 32_000
Update = Callable[[], object]


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.before(x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.after(x))))


class Transformer(nn.Module):
    """1.34 billion parameters in 24 layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(layers: int, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model on the device."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Transformer(layers).to(dtype)


def milliseconds(call: Update, repeats: int = 20) -> float:
    """Median by CUDA events, after three calls that do not count; the device is busy while a call is queued."""
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # about 10 ms
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def host_microseconds(call: Update, repeats: int = 50) -> float:
    """Median time until `call` returns, with an idle device before it."""
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times[3:]) * 1e6


def copy_bandwidth() -> float:
    """Bytes per millisecond, read and written together, of a copy of 4 GiB on the device."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source))


def _pairs(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    params = [p.detach() for p in model.parameters()]
    return [p.float().clone() for p in params], params


def per_tensor_loop(model: nn.Module) -> Update:
    """`e.mul_(d).add_(p, alpha=1 - d)`: NeMo's loop, and torchtitan's."""
    shadows, params = _pairs(model)

    def update() -> None:
        for shadow, param in zip(shadows, params, strict=True):
            shadow.mul_(DECAY).add_(param, alpha=1 - DECAY)

    return update


def per_tensor_cast_loop(model: nn.Module) -> Update:
    """`e.mul_(d).add_(p.float(), alpha=1 - d)`."""
    shadows, params = _pairs(model)

    def update() -> None:
        for shadow, param in zip(shadows, params, strict=True):
            shadow.mul_(DECAY).add_(param.float(), alpha=1 - DECAY)

    return update


def foreach_mul_add(model: nn.Module) -> Update:
    """`_foreach_mul_`, `_foreach_add_`: NeMo's multi-tensor form."""
    shadows, params = _pairs(model)

    def update() -> None:
        torch._foreach_mul_(shadows, DECAY)
        torch._foreach_add_(shadows, params, alpha=1 - DECAY)

    return update


def foreach_lerp(model: nn.Module) -> Update:
    """`_foreach_lerp_`, parameters widened first where they have to be."""
    shadows, params = _pairs(model)
    return lambda: torch._foreach_lerp_(shadows, [p.float() for p in params], 1 - DECAY)


def averaged_model(model: nn.Module) -> Update:
    """`torch.optim.swa_utils.AveragedModel`, of a float32 copy."""
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

    if next(model.parameters()).dtype is torch.float32:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    else:
        averaged = AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY))
        averaged.module.float()
    averaged.n_averaged.fill_(1)
    return lambda: averaged.update_parameters(model)


def diffusers_foreach(model: nn.Module) -> Update:
    """The arithmetic of `diffusers.training_utils.EMAModel(foreach=True)`."""
    shadows, params = _pairs(model)
    return lambda: torch._foreach_sub_(
        shadows, torch._foreach_sub(shadows, params), alpha=1 - DECAY
    )


def to_the_host_per_tensor(model: nn.Module) -> Update:
    """`.float().cpu()` per tensor and the update there: LongLive's form."""
    shadows, params = _pairs(model)
    shadows = [shadow.cpu() for shadow in shadows]

    def update() -> None:
        for shadow, param in zip(shadows, params, strict=True):
            shadow.mul_(DECAY).add_(param.float().cpu(), alpha=1 - DECAY)

    return update


def whole_shadow_moved(model: nn.Module) -> Update:
    """The pinned average goes to the device, is moved there and comes back: diffusers' offload."""
    shadows, params = _pairs(model)
    shadows = [shadow.cpu().pin_memory() for shadow in shadows]

    def update() -> None:
        there = [shadow.to("cuda", non_blocking=True) for shadow in shadows]
        torch._foreach_sub_(there, torch._foreach_sub(there, params), alpha=1 - DECAY)
        for shadow, moved in zip(shadows, there, strict=True):
            shadow.copy_(moved, non_blocking=True)

    return update


def ours(**options: object) -> Callable[[nn.Module], Update]:
    """`ShardedEMA.update`."""

    def make(model: nn.Module) -> Update:
        return ShardedEMA(model, DECAY, **options).update  # type: ignore[arg-type]

    make.__doc__ = "ours" + "".join(
        f", {k}={str(v).removeprefix('torch.')}" for k, v in options.items()
    )
    return make


def update_table(layers: int) -> None:
    """Each way to move the average of one model, by the dtype of its parameters."""
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e6:.0f} GB/s")
    noisy = {"dtype": torch.bfloat16, "rounding": "stochastic"}
    for dtype in (torch.bfloat16, torch.float32):
        model = made(layers, dtype)
        numel = sum(p.numel() for p in model.parameters())
        print(
            f"\n{numel:,} parameters in {len(list(model.parameters()))} tensors, {dtype}; averages float32"
        )
        print(f"| {'':58} | ms | of limit | ours is | host µs |\n|---|---|---|---|---|")
        reference = None
        for make in [
            ours(), ours(compensate=True), ours(nonfinite="skip"), ours(dtype=torch.bfloat16), ours(**noisy),
            foreach_lerp, foreach_mul_add, per_tensor_loop, per_tensor_cast_loop, averaged_model, diffusers_foreach,
        ]:  # fmt: skip
            update = make(model)
            took, host = milliseconds(update), host_microseconds(update, 10)
            reference = reference or took
            name = (make.__doc__ or "").rstrip(".")
            width = 2 if "dtype=bfloat16" in name else 4
            least = numel * (2 * width + dtype.itemsize + 4 * ("compensate" in name)) / bandwidth
            print(
                f"| {name[:58]:58} | {took:.2f} | {least / took:.0%} | {took / reference:.2f} × | {host:.0f} |"
            )
            del update
            gc.collect()
            torch.cuda.empty_cache()
        del model
    for title, bag in (
        (
            "2 000 parameters in one list",
            nn.ParameterList([torch.randn(64, 64) for _ in range(2000)]),
        ),
        ("1 000 Linear layers", nn.ModuleList([nn.Linear(64, 64) for _ in range(1000)])),
    ):
        for kind in (torch.float32, torch.bfloat16):
            update = ShardedEMA(bag.to("cuda", kind), DECAY).update
            print(
                f"host time of update(): {title}, {kind}: {host_microseconds(update, 200):.0f} µs"
            )


def two_way_rate() -> float:
    """Bytes per millisecond each way, of pinned copies in both directions at once."""
    device = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2)]
    host = [torch.empty(1 << 30, dtype=torch.uint8).pin_memory() for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        for i, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                source, target = (host[i], device[i]) if i else (device[i], host[i])
                target.copy_(source, non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return device[0].nbytes / milliseconds(both, 8)


def offload_table(layers: int) -> None:
    """An offloaded update with nothing beside it, and what it holds."""
    rate = two_way_rate()
    print(f"two-way PCIe {rate / 1e6:.1f} GB/s each way")
    gc.collect()
    torch.cuda.empty_cache()
    model = made(layers, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    ema = ShardedEMA(model, DECAY, offload=True)
    constructed = time.perf_counter() - begin
    ema.update()
    ema.wait(host=True)
    prepared = time.perf_counter() - begin
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    host = host_microseconds(ema.update, 10)
    took = milliseconds(lambda: (ema.update(), ema.wait()), 5)
    print(
        f"constructor {constructed:.1f} s, with the first update {prepared:.1f} s; {ema.nbytes / 1e9:.2f} GB averages"
    )
    print(
        f"update alone {took:.0f} ms, two-way PCIe time {ema.nbytes / rate:.0f} ms; host time {host:.0f} µs"
    )
    print(f"device memory held {held / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    for make, repeats in ((whole_shadow_moved, 3), (to_the_host_per_tensor, 1)):
        del ema
        gc.collect()
        ema = make(model)
        begin = time.perf_counter()
        for _ in range(repeats):
            ema()
        torch.cuda.synchronize()
        print(f"{make.__doc__} {(time.perf_counter() - begin) / repeats * 1e3:.0f} ms")


def optimizer_table(layers: int) -> None:
    """Fused AdamW over float32 parameters: its state on the device and in pinned host memory."""
    rate = two_way_rate()
    gc.collect()
    torch.cuda.empty_cache()
    model = made(layers)
    count = sum(param.numel() for param in model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    bare = torch.cuda.memory_allocated()
    moments = 8 * count
    print(
        f"{count / 1e9:.3f} G parameters, {moments / 1e9:.2f} GB of moments; two-way PCIe {rate / 1e6:.1f} GB/s each way"
    )
    for slot_bytes in (None, 128 << 20, 64 << 20, 32 << 20):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        begin = time.perf_counter()
        handle = None if slot_bytes is None else offload_optimizer(optimizer, slot_bytes)
        optimizer.step()
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        held = torch.cuda.memory_allocated() - bare
        times = []
        for _ in range(7):  # until the state is back, as the next step's copies would find it
            begin = time.perf_counter()
            optimizer.step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        host = host_microseconds(optimizer.step, 5) / 1e3
        name = (
            "on the device" if slot_bytes is None else f"offloaded, slots of {slot_bytes >> 20} MiB"
        )
        took, wanted = statistics.median(times), moments / rate
        print(
            f"{name}: step {took:.1f} ms = {took / wanted:.2f} x two-way PCIe time ({wanted:.1f} ms), host {host:.1f} ms, "
            f"first step {first:.1f} s, device memory held {held / 1e9:.2f} GB"
        )
        del optimizer, handle
        gc.collect()
        torch.cuda.empty_cache()


def step_table(layers: int, pairs: int, tokens: int, accumulate: int) -> None:
    """The step of a training, in blocks of 20 that alternate between without and with an average."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store = None if "RANK" in os.environ else dist.HashStore()
    ranks = {} if store is None else {"store": store, "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", **ranks)
    model = made(layers)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = torch.randint(VOCABULARY, (tokens // 2048, 2049), device="cuda")

    def step(update: Update | None) -> None:
        for _ in range(accumulate):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if update is not None:
            update()

    variants = _variants(model)
    counts = {
        "offload": pairs,
        "offload, 32 MiB slots": pairs // 3,
        "offload, every=4": pairs // 2,
        "device": pairs // 3,
    }
    for update in variants.values():
        step(None)
        update()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(pairs):
        for name, update in variants.items():
            if index < counts[name]:
                times[name].append(_block(step, update) / (without := _block(step, None)) - 1)
    if not dist.get_rank():
        print(
            f"{dist.get_world_size()} ranks, {accumulate} x {tokens} tokens a rank and step; a step without an average"
            f" {without:.1f} ms"
        )
        for name, ratios in times.items():
            low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            print(
                f"{name}: {statistics.median(ratios):+.2%} (quartiles {low:+.2%} {high:+.2%}, {len(ratios)} pairs)"
            )
    dist.destroy_process_group()


def _variants(model: nn.Module) -> dict[str, Update]:
    """Managers of one model, ready to update; all but the larger slots have their usual settings."""
    emas = {"offload": ShardedEMA(model, DECAY, offload=True)}
    emas["offload"].update()
    usual, offload.SLOT_NBYTES = offload.SLOT_NBYTES, 32 << 20
    emas["offload, 32 MiB slots"] = ShardedEMA(model, DECAY, offload=True)
    emas["offload, 32 MiB slots"].update()
    offload.SLOT_NBYTES = usual
    emas["offload, every=4"] = ShardedEMA(model, DECAY, every=4, offload=True)
    emas["device"] = ShardedEMA(model, DECAY)
    return {name: ema.update for name, ema in emas.items()}


def _block(step: Callable[[Update | None], None], update: Update | None) -> float:
    """Milliseconds a step of 20, after two that bring in the update of the step before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for index in range(22):
        if index == 2:
            start.record()
        step(update)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", choices=["update", "offload", "optimizer", "step"])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=12_288)
    parser.add_argument(
        "--accumulate", type=int, default=1, help="forward and backward passes of one step"
    )
    options = parser.parse_args()
    if not int(os.environ.get("RANK", "0")):
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
        )
    if options.table == "step":
        step_table(options.layers, options.pairs, options.tokens, options.accumulate)
    else:
        tables = {"update": update_table, "offload": offload_table, "optimizer": optimizer_table}
        tables[options.table](options.layers)


if __name__ == "__main__":
    main()
