"""Builds a LocalRunner from a model's files and the engine's options; resolves what is "auto" and says from what.

Call `batchinfer_kernels.determinism.prepare()` in the process before anything imports torch.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from batchinfer_kernels import gpus
from batchinfer_kernels.determinism import prepare
from batchinfer_kernels.native import library, outlook
from batchinfer_kernels.probe import STRICT, RowFacts, RowRule, find_row_rule
from batchinfer_kernels.table import resolve

from batchinfer.arithmetic import USER, Arithmetic, check_block_size, resolve_arithmetic, this_machine
from batchinfer.attention.backend import AttentionBackend, make_attention, why_not_c
from batchinfer.attention.context import LayerCache
from batchinfer.attention.tiles import product_tiles
from batchinfer.config import EngineConfig
from batchinfer.errors import ConfigError, OutOfMemory
from batchinfer.modelfiles import ModelFiles
from batchinfer.modelfiles.deepseek_config import DeepseekConfig
from batchinfer.modelfiles.supported import architecture_of, check_supported, read_config
from batchinfer.models import CausalLM, load_model
from batchinfer.models.dtype import DTYPES, KV_CACHE_DTYPES
from batchinfer.models.registry import ALL_LINEAR
from batchinfer.runner.host import num_cores
from batchinfer.runner.kv_memory import (
    FREE_SHARE,
    HOST_AUTO_LEN,
    KVLayout,
    allocate,
    bytes_per_block,
    free_memory,
    resolve_num_blocks,
)
from batchinfer.runner.local import Fact, LocalRunner
from batchinfer.runner.memory_profile import CudaMeter, MemoryMeter, largest_step, measure_spare
from batchinfer.weights import Fill

if TYPE_CHECKING:
    from batchinfer.runner.graphs import DecodeGraphs  # imports triton, which need not be there

CPU_MAX_NUM_SEQS = 64  # products reach their full rate here; more sequences only take memory
CPU_MAX_NUM_BATCHED_TOKENS = 512
# int8 products are so fast that what a step costs whatever its size counts; KV in int8 takes a quarter of the memory.
INT8_MAX_NUM_SEQS = 256
INT8_MAX_NUM_BATCHED_TOKENS = 1024
GPU_MAX_NUM_SEQS = 256
GPU_MAX_NUM_BATCHED_TOKENS = 8192

_log = logging.getLogger(__name__)


def load_runner(
    files: ModelFiles,
    config: EngineConfig,
    *,
    max_model_len: int | None = None,
    meter: MemoryMeter | None = None,
    fill: Fill | None = None,
) -> LocalRunner:
    """A runner with its model loaded. meter: of the device's memory; None: a GPU's own, if it is a GPU. fill: see
    `load_model`. Raises ConfigError, ModelError or OutOfMemory."""
    facts: dict[str, Fact] = {}
    device = _resolve_device(config.device)
    facts["device"] = Fact(str(device), "auto" if config.device == "auto" else "engine.device")
    threads, threads_source = _resolve_threads(config.num_threads)
    torch.set_num_threads(threads)
    facts["num_threads"] = Fact(threads, threads_source)
    check_supported(files)
    arithmetic = _resolve_arithmetic(files, config, device)
    config.check_kernels(arithmetic.kernels)
    check_block_size(config.block_size, files, arithmetic)
    facts["instruction_level"] = _instruction_fact(arithmetic, device)
    facts["torch"] = Fact(torch.__version__, "installed")

    max_model_len = max_model_len or config.max_model_len or files.max_model_len
    linear_in_c = _linear_in_c(files, arithmetic)
    if arithmetic.kernels == "triton":  # no product is torch's
        rows = STRICT
        facts["batch_invariant"] = Fact(config.deterministic, "engine.deterministic")
    elif linear_in_c:
        rows = STRICT
        facts["batch_invariant"] = Fact(True, "products are in C")
    else:
        rows = _row_rule(_probe(files, config, device, DTYPES[arithmetic.dtype]), facts)
    ops = resolve(arithmetic.kernels, device, rows=rows, deterministic=config.deterministic)
    model = load_model(
        files,
        dtype=arithmetic.dtype,
        device=device,
        ops=ops,
        quantization=arithmetic.quantization,
        max_model_len=max_model_len,
        num_threads=threads,
        fill=fill,
    )
    specs = model.attention_specs
    for name in ("dtype", "quantization", "kv_cache_dtype", "kernels"):
        source = arithmetic.sources[name]
        key = f"engine.{name}" if name == "kernels" else f"model.{name}"
        facts[name] = Fact(getattr(arithmetic, name), key if source == USER else source)
    facts["max_model_len"] = Fact(max_model_len, "engine.max_model_len" if config.max_model_len else "model")
    on_cpu = device.type == "cpu"
    auto_num_seqs, auto_budget = _auto_batch(arithmetic, on_cpu)
    max_num_seqs = _number(config.max_num_seqs, auto_num_seqs)
    budget = _number(config.max_num_batched_tokens, auto_budget)
    if config.max_num_batched_tokens == "auto":
        budget = max(budget, max_num_seqs)
    facts["max_num_seqs"] = Fact(max_num_seqs, _source("max_num_seqs", config.max_num_seqs, device))
    facts["max_num_batched_tokens"] = Fact(
        budget, _source("max_num_batched_tokens", config.max_num_batched_tokens, device)
    )
    layout = KVLayout.of(specs)
    kv_dtype = KV_CACHE_DTYPES[arithmetic.kv_cache_dtype]
    sizes = {"block_size": config.block_size, "split_size": config.split_size}
    group_specs = [specs[layout.group_of_layer.index(group)] for group in range(len(layout.windows))]
    if linear_in_c and any(why_not_c(spec, ops, kv_dtype=kv_dtype, **sizes) for spec in group_specs):
        ops = replace(ops, row_rule=_row_rule(_probe(files, config, device, torch.float32), facts))
    backends = tuple(
        make_attention(spec, ops, kv_dtype=kv_dtype, device=device, deterministic=config.deterministic, **sizes)
        for spec in group_specs
    )
    not_c = why_not_c(group_specs[0], ops, kv_dtype=kv_dtype, **sizes)
    facts["attention"] = Fact(backends[0].name, not_c or "the KV cache's type")
    block_bytes = bytes_per_block(specs, config.block_size, kv_dtype)
    runner = partial(
        LocalRunner,
        model,
        backends=backends,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        sampling=ops.sampling,
    )
    pool = partial(allocate, specs, layout, backends, block_size=config.block_size)
    # Engines that share a machine each have some of its cores; each takes that part of its memory.
    share = FREE_SHARE * (min(1.0, threads / max(1, num_cores())) if on_cpu else 1.0)
    free, what = free_memory(device), "free memory"
    if meter is None and not on_cpu:
        meter = CudaMeter(device)
    if meter is not None and config.kv_cache_memory == "auto":
        step = largest_step(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            block_size=config.block_size,
            num_groups=len(group_specs),
        )
        peak_blocks = len(step.chunks[0].block_tables[0])

        def run_largest() -> None:
            layers, groups = pool(num_blocks=peak_blocks)
            runner(layers=layers, kv_groups=groups, facts={}).execute(step)

        try:
            free = measure_spare(
                run_largest,
                meter,
                utilization=config.gpu_memory_utilization,
                peak_kv=peak_blocks * block_bytes,
            )
        except OutOfMemory as error:
            raise OutOfMemory(f"{error}; lower engine.max_num_batched_tokens or engine.max_num_seqs") from error
        share, what = 1.0, "that the largest step leaves of engine.gpu_memory_utilization"
    num_blocks, source = resolve_num_blocks(
        config.kv_cache_memory,
        block_bytes=block_bytes,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        free_bytes=free,
        share=share,
        auto_len=HOST_AUTO_LEN if on_cpu else None,
        what=what,
    )
    facts["num_blocks"] = Fact(num_blocks, source)
    facts["kv_cache_bytes"] = Fact(num_blocks * block_bytes, source)
    facts["block_size"] = Fact(config.block_size, "engine.block_size")
    facts["split_size"] = Fact(config.split_size, "engine.split_size")
    layers, groups = pool(num_blocks=num_blocks)
    graphs = None
    if ops.backend == "triton":
        wanted, source = _wants_graphs(config, on_cpu)
        facts["cuda_graphs"] = Fact(wanted, source)
        if wanted:
            graphs = _make_graphs(model, layers, backends, device=device, max_rows=max_num_seqs, max_len=max_model_len)
    for name, fact in facts.items():
        _log.info("%s = %s (%s)", name, fact.value, fact.source)
    return runner(layers=layers, kv_groups=groups, facts=facts, graphs=graphs)


def _wants_graphs(config: EngineConfig, on_cpu: bool) -> tuple[bool, str]:
    """(whether, from what), with Triton's kernels."""
    if config.cuda_graphs == "auto":
        return not on_cpu, "auto: the interpreter" if on_cpu else "auto: a GPU"
    return config.cuda_graphs, "engine.cuda_graphs"


def _make_graphs(
    model: CausalLM,
    layers: tuple[LayerCache, ...],
    backends: tuple[AttentionBackend, ...],
    *,
    device: torch.device,
    max_rows: int,
    max_len: int,
) -> DecodeGraphs:
    """Of Triton's backends. In the interpreter nothing is recorded: the calls are made again."""
    # These import triton, which need not be there.
    from batchinfer.attention.triton import TritonAttention, TritonLatentAttention
    from batchinfer.runner.graphs import CudaCapture, DecodeGraphs, rerun

    kept = [backend for backend in backends if isinstance(backend, TritonAttention | TritonLatentAttention)]
    assert len(kept) == len(backends)
    return DecodeGraphs(
        model,
        layers=layers,
        backends=kept,
        device=device,
        max_rows=max_rows,
        max_len=max_len,
        new_capture=CudaCapture if device.type == "cuda" else lambda: rerun,
    )


def _resolve_device(wanted: str) -> torch.device:
    if wanted in ("auto", "cpu"):
        return torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"engine.device must be auto, cpu or cuda, got {wanted!r}") from error
    if device.type != "cuda":
        raise ConfigError(f"engine.device {wanted!r} is not supported; use auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"engine.device is {wanted!r}, but this torch ({torch.__version__}) sees no CUDA device; use cpu, or "
            "install a CUDA build of torch on a machine with an NVIDIA GPU"
        )
    # Triton launches, and graphs are captured, on the current one.
    if device.index is not None and device.index != torch.cuda.current_device():
        raise ConfigError(f"engine.device {wanted!r} is not supported; use cuda, and say which by CUDA_VISIBLE_DEVICES")
    return device


def _resolve_threads(wanted: int | None) -> tuple[int, str]:
    if wanted is None:
        return num_cores(), "auto: the cores of this process"
    return wanted, "engine.num_threads"


def _resolve_arithmetic(files: ModelFiles, config: EngineConfig, device: torch.device) -> Arithmetic:
    """Native kernels that were expected and can't be had give way to torch, unless they were asked for: a frozen job
    asks for what its first run had."""
    machine = this_machine()
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        machine = replace(machine, gpu_level=gpus.level(10 * major + minor, name), gpu_name=name)
    options = {name: getattr(config, name) for name in ("dtype", "quantization", "kv_cache_dtype", "kernels", "device")}
    found = resolve_arithmetic(files, machine, **options)
    if found.kernels == "native" and (reason := library.available()) is not None:
        machine = replace(machine, obstacle=reason, mend=outlook.MEND)
        found = resolve_arithmetic(files, machine, **options)
    if config.instruction_level not in (None, found.instruction_level):
        raise ConfigError(
            f"engine.instruction_level: the job is run with {config.instruction_level}, this machine's is "
            f"{found.instruction_level}, so that completions would differ; run it on machines like the first one, or "
            "start over with --fresh"
        )
    if found.degraded is not None:
        _log.warning("%s", found.degraded)
    return found


def _instruction_fact(arithmetic: Arithmetic, device: torch.device) -> Fact:
    if device.type == "cuda":
        return Fact(str(arithmetic.instruction_level), "the GPU")
    mode = prepare().mkl_mode
    source = f"the CPU ({platform.machine()}), MKL_CBWR={mode}" if mode else "the CPU"
    return Fact(str(arithmetic.instruction_level), source)


def _auto_batch(arithmetic: Arithmetic, on_cpu: bool) -> tuple[int, int]:
    """(sequences, tokens) of a step where the user leaves them open."""
    if not on_cpu:
        return GPU_MAX_NUM_SEQS, GPU_MAX_NUM_BATCHED_TOKENS
    if arithmetic.quantization == "int8" and arithmetic.kernels == "native":
        return INT8_MAX_NUM_SEQS, INT8_MAX_NUM_BATCHED_TOKENS
    return CPU_MAX_NUM_SEQS, CPU_MAX_NUM_BATCHED_TOKENS


def _linear_in_c(files: ModelFiles, arithmetic: Arithmetic) -> bool:
    """Whether torch multiplies nothing but, perhaps, in attention: then nothing of it has to be measured, which takes
    a quarter of a second where other processes are starting as well."""
    if arithmetic.quantization != "int8" or arithmetic.kernels != "native":
        return False
    return architecture_of(files.config) in ALL_LINEAR


def _probe(files: ModelFiles, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> RowFacts:
    model = read_config(files.config)
    if isinstance(model, DeepseekConfig):
        wide, head_dim, num_kv_heads = model.router_shapes(), model.row_size, 1
    else:
        wide, head_dim, num_kv_heads = [], model.head_dim, model.num_kv_heads
    tiles = partial(
        product_tiles,
        head_dim=head_dim,
        group=model.num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        split_size=config.split_size,
        block_size=config.block_size,
    )
    return find_row_rule(
        model.product_shapes(),
        wide=wide,
        attention=lambda rule: tiles(rule=rule),
        dtype=dtype,
        device=str(device),
    )


def _row_rule(found: RowFacts, facts: dict[str, Fact]) -> RowRule:
    """The rule that was found; says so in `facts`, and warns where not even it holds."""
    facts["row_rule"] = Fact(str(found.rule), f"measured with {found.threads} threads")
    facts["batch_invariant"] = Fact(found.holds, "measured")
    if not found.holds:
        _log.warning(
            "products of this machine's BLAS differ with the number of rows or threads whatever their size: "
            "completions may differ between batches"
        )
    return found.rule


def _number(value: int | str, auto: int) -> int:
    return auto if isinstance(value, str) else value


def _source(name: str, value: int | str, device: torch.device) -> str:
    return f"auto: for {device.type}" if isinstance(value, str) else f"engine.{name}"
