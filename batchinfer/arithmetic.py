"""Which arithmetic a model runs in: dtype, quantization, KV cache, kernels; what is "auto" is resolved from facts.

The one rule for jobs, where it is applied once, at the first submit, and for `LLM`. No torch: planning a job asks as
well. Not for sizes, which change no bytes (`runner.load`), nor for how weights are quantized (`quant`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchinfer_kernels import determinism, gpus, numeric_formats, triton_outlook
from batchinfer_kernels.native import outlook
from batchinfer_kernels.triton_outlook import unfit_heads, unfit_int8_blocks, unfit_latents, unfit_width

from batchinfer.errors import ConfigError, ModelError
from batchinfer.modelfiles import ModelFiles
from batchinfer.modelfiles.deepseek_config import DeepseekConfig, is_latent
from batchinfer.modelfiles.experts_config import ExpertsConfig
from batchinfer.modelfiles.llama_config import LlamaConfig
from batchinfer.modelfiles.stored_experts import StoredExperts, stored_experts
from batchinfer.modelfiles.stored_quantization import BLOCK, StoredQuantization, stored_quantization
from batchinfer.modelfiles.supported import read_config

USER = "user"
DTYPES = ("float32", "bfloat16", "float16")
# Made while loading, and how a checkpoint may be stored.
QUANTIZATIONS = ("none", "int8", "w8a8", "fp8", "gptq", "awq")
# Of those, and int8 on GPUs, the ones of eight bits.
_EIGHT_BITS = ("int8", "w8a8", "fp8")
# Of those, as what the cost of weights is known.
_WEIGHTS = {"w8a8": "int8", "gptq": "int4", "awq": "int4"}
KV_CACHE_DTYPES = (*DTYPES, "int8")
KERNELS = ("native", "cpu", "reference", "triton")
# Named by the field's users, and refused by name until they are there.
PLANNED = {"quantization": ("int4",), "kv_cache_dtype": ("fp8",)}
VNNI = "this CPU has AVX-512 VNNI"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What of a machine decides how it computes.

    vector_level     of float32 on its CPU: `determinism.instruction_level`
    product_level    of int8 and bfloat16 on its CPU: `determinism.product_level`
    obstacle, mend   why native kernels can't be used, and what would help; None where they can, or where nothing would
    triton_on_cpu, triton_on_gpu   why Triton's kernels can't be used there; None where they can
    gpu_level, gpu_name   of its GPUs (`gpus.level`); None where they were not looked at, or there is none
    gpu_obstacle     why no GPU can be given to an engine
    torch_on_gpu     why torch can't use a GPU
    """

    vector_level: str
    product_level: str
    obstacle: str | None = None
    mend: str | None = None
    triton_on_cpu: str | None = triton_outlook.NOT_INSTALLED
    triton_on_gpu: str | None = triton_outlook.NOT_INSTALLED
    gpu_level: str | None = None
    gpu_name: str | None = None
    gpu_obstacle: str | None = None
    torch_on_gpu: str | None = None


def this_machine(*, look_at_gpus: bool = False) -> Machine:
    """With `look_at_gpus`, which takes up to seconds, also of its GPUs, within CUDA_VISIBLE_DEVICES."""
    found = outlook.obstacle()
    machine = Machine(
        vector_level=determinism.instruction_level(),
        product_level=determinism.product_level(),
        obstacle=None if found is None else found.reason,
        mend=None if found is None else found.mend,
        triton_on_cpu=triton_outlook.obstacle(on_cpu=True),
        triton_on_gpu=triton_outlook.obstacle(on_cpu=False),
    )
    return _with_gpus(machine) if look_at_gpus else machine


def _with_gpus(machine: Machine) -> Machine:
    try:
        found = gpus.find()
    except gpus.NoGpu as error:
        return replace(machine, gpu_obstacle=str(error))
    levels = {gpu.level: f"{gpu.level} ({gpu.name})" for gpu in found}
    if len(levels) > 1:
        words = " and ".join(levels.values())
        reason = f"this machine's GPUs compute differently: {words}; let {gpus.VARIABLE} name those of one kind"
        return replace(machine, gpu_obstacle=reason)
    first = found[0]
    too_old = f"{first.name} is sm_{first.capability}, and Triton's kernels here need sm_{gpus.OLDEST} or later"
    return replace(
        machine,
        gpu_level=first.level,
        gpu_name=first.name,
        torch_on_gpu=gpus.torch_obstacle(),
        triton_on_gpu=machine.triton_on_gpu or (too_old if first.capability < gpus.OLDEST else None),
    )


def why_no_gpu(files: ModelFiles, machine: Machine) -> str | None:
    """What keeps the model from running on this machine's GPUs, which were looked at; None where nothing is known."""
    return machine.gpu_obstacle or (None if files.kind == "fake" else machine.torch_on_gpu)


def no_gpu(reason: str) -> ConfigError:
    """The error where an engine is to run on a GPU, and can't."""
    return ConfigError(f"engine.device is cuda, and {reason}. Mend that, or set engine.device to cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """All that is resolved; each value's name is a key of `sources`, which say "user" or "auto: " and why.

    instruction_level   of the CPU, or a GPU's architecture (and model, where torch multiplies); None where it decides
                        nothing, or is not known
    degraded            what is slower than it could be here, and how to mend it; None where nothing is
    """

    dtype: str
    quantization: str
    kv_cache_dtype: str
    kernels: str
    instruction_level: str | None
    sources: Mapping[str, str]
    degraded: str | None = None

    @property
    def weights(self) -> str:
        """What layers' weights take, as `cost` names it."""
        return self.dtype if self.quantization == "none" else _WEIGHTS.get(self.quantization, self.quantization)

    @property
    def formats(self) -> frozenset[str]:
        """Names of the numeric formats that completions depend on."""
        return numeric_formats.used(
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            kernels=self.kernels,
        )

    @property
    def format_numbers(self) -> dict[str, int]:
        """Of `formats`, those that have changed since the first numbers, and what theirs are in this version."""
        numbers = {name: numeric_formats.NUMBERS[name] for name in sorted(self.formats)}
        return {name: number for name, number in numbers.items() if number != numeric_formats.FIRST}

    def __str__(self) -> str:
        weights = self.dtype if self.quantization == "none" else self.quantization
        return f"{weights}, KV cache {self.kv_cache_dtype}, {self.kernels} kernels"


def resolve_arithmetic(
    files: ModelFiles,
    machine: Machine,
    *,
    dtype: str = "auto",
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
    kernels: str = "auto",
    device: str = "auto",
) -> Arithmetic:
    """Each option as the user wrote it, or "auto". Raises ConfigError for what is not there or does not go together."""
    _check("model.quantization", quantization, QUANTIZATIONS)
    _check("model.kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    _check("engine.kernels", kernels, KERNELS)
    values: dict[str, str] = {}
    sources: dict[str, str] = {}

    def put(name: str, wanted: str, auto: tuple[str, str]) -> str:
        values[name], sources[name] = auto if wanted == "auto" else (wanted, USER)
        return values[name]

    on_cpu = device in ("auto", "cpu")
    chosen, source = resolve_dtype(dtype, files.config, on_cpu=on_cpu)
    values["dtype"], sources["dtype"] = chosen, USER if dtype != "auto" else source
    if files.kind == "fake":
        values["kernels"], sources["kernels"] = "fake", "model"
        put("quantization", quantization, ("none", "auto: a fake model"))
        put("kv_cache_dtype", kv_cache_dtype, (chosen, "auto: model.dtype"))
        return Arithmetic(**values, instruction_level=None, sources=sources | {"instruction_level": "model"})
    types = chosen if kv_cache_dtype == "auto" else f"{chosen}, {kv_cache_dtype}"
    stored = _stored_scheme(files)
    unfit = _unfit_for_triton(machine, on_cpu=on_cpu, types=types)
    of_model = _unfit_model(files, eight_bits=(stored or quantization) in _EIGHT_BITS)
    used = put("kernels", kernels, _auto_kernels(machine) if on_cpu else _auto_gpu_kernels(unfit or of_model))
    if kernels == "triton" and (unfit or of_model) is not None:
        mend = "; leave engine.kernels out, or set it to cpu (torch)" if unfit is None else ""
        raise ConfigError(f"engine.kernels triton can't be used here: {unfit or of_model}{mend}")
    if kernels == "native" and not on_cpu:
        raise ConfigError("engine.kernels native is for CPUs; with engine.device cuda use auto, triton or cpu (torch)")
    if kernels == "native" and machine.obstacle is not None:
        raise ConfigError(
            f"engine.kernels native can't be used here: {_with_mend(machine)}, or set engine.kernels to cpu"
        )
    if stored is not None:
        put("quantization", quantization, (stored, f"auto: the checkpoint's {stored}"))
    else:
        put("quantization", quantization, _auto_quantization(dtype, used, sources["kernels"]))
    scheme = values["quantization"] = _for_kernels(values["quantization"], stored, used, sources["kernels"])
    if scheme == "int8" and dtype not in ("auto", "float32"):
        raise ConfigError(
            f"model.dtype {dtype} and model.quantization int8 don't go together: what is not int8 is computed in "
            "float32; leave model.dtype out"
        )
    if scheme == "int8" and not on_cpu:
        values["dtype"], sources["dtype"] = "float32", "auto: model.quantization is int8"
    put("kv_cache_dtype", kv_cache_dtype, _auto_kv_cache(files, values["dtype"], scheme, used))
    if values["kv_cache_dtype"] == "int8" and is_latent(files.config):
        raise ConfigError(
            "model.kv_cache_dtype int8: the model has latent attention, whose cache is not there in int8; use auto, "
            "float32, bfloat16 or float16"
        )
    if used == "triton" and is_latent(files.config) and values["kv_cache_dtype"] != values["dtype"]:
        raise ConfigError(
            f"model.kv_cache_dtype {values['kv_cache_dtype']}: with engine.kernels triton the cache of latent "
            f"attention is of the model's dtype, {values['dtype']}; leave model.kv_cache_dtype out"
        )
    level = _level(machine, used, scheme, values["dtype"]) if on_cpu else _gpu_level(machine, used)
    sources["instruction_level"] = "auto: this CPU" if on_cpu else f"auto: {machine.gpu_name or 'the GPU'}"
    degraded = None
    if (
        on_cpu
        and kernels == "auto"
        and machine.mend is not None
        and (scheme == "int8" or (dtype == quantization == "auto" and stored is None))
    ):
        instead = "int8 is computed by torch" if scheme == "int8" else "everything is computed in float32, not in int8"
        degraded = f"{VNNI}, but {machine.obstacle}: {instead}, which is much slower; {machine.mend}"
    if not on_cpu and kernels == "auto" and unfit is None and of_model is not None:
        degraded = f"Triton's kernels can't run this model: {of_model}: plain torch does, which is much slower"
    return Arithmetic(**values, instruction_level=level, sources=sources, degraded=degraded)


def check_block_size(block_size: int, files: ModelFiles, arithmetic: Arithmetic) -> None:
    """Raises ConfigError where the model's KV cache can't be in blocks of so many tokens."""
    if arithmetic.kernels != "triton" or arithmetic.kv_cache_dtype != "int8":
        return
    config = read_config(files.config)
    assert isinstance(config, LlamaConfig)  # latents are not kept in int8
    if (unfit := unfit_int8_blocks(config.head_dim, block_size)) is not None:
        raise ConfigError(f"engine.block_size {block_size} does not go with engine.kernels triton: {unfit}")


def resolve_dtype(dtype: str, config: Mapping[str, Any], *, on_cpu: bool) -> tuple[str, str]:
    """(name of the dtype, where it came from). "auto" is float32 on the CPU, the checkpoint's own type elsewhere."""
    if dtype in DTYPES:
        return dtype, "model.dtype"
    if dtype != "auto":
        raise ConfigError(f"model.dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    if on_cpu:
        return "float32", "auto: float32 on the CPU"
    stored = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if stored in ("float16", "bfloat16"):
        return stored, f"auto: the checkpoint's {stored}"
    # Not float16: a model that was not trained in it may overflow.
    return "bfloat16", "auto: bfloat16 on GPUs"


def _check(key: str, value: str, known: tuple[str, ...]) -> None:
    if value == "auto" or value in known:
        return
    if value in PLANNED.get(key.partition(".")[2], ()):
        raise ConfigError(f"{key}: {value!r} is planned and not there yet; use auto, {' or '.join(known)}")
    raise ConfigError(f"{key} must be auto, {' or '.join(known)}, got {value!r}")


def _auto_kernels(machine: Machine) -> tuple[str, str]:
    if machine.obstacle is None:
        return "native", f"auto: {VNNI}"
    return "cpu", f"auto: native kernels can't be used here: {machine.obstacle}"


def _auto_gpu_kernels(unfit: str | None) -> tuple[str, str]:
    if unfit is None:
        return "triton", "auto: a GPU"
    return "cpu", f"auto: plain torch, since triton can't be used: {unfit}"


def _unfit_for_triton(machine: Machine, *, on_cpu: bool, types: str) -> str | None:
    """Why Triton's kernels can't be used; `types` of hidden states and KV cache, in words. None where they can."""
    obstacle = machine.triton_on_cpu if on_cpu else machine.triton_on_gpu
    if obstacle is not None:
        return obstacle
    if on_cpu and "bfloat16" in types:
        return "Triton's interpreter computes wrong numbers in bfloat16; use float32 or float16"
    if not on_cpu and "float32" in types:
        return "its tiles of float32 do not fit a GPU's shared memory; use bfloat16 or float16, or engine.kernels cpu"
    return None


def _unfit_model(files: ModelFiles, *, eight_bits: bool) -> str | None:
    """Why Triton's kernels can't run a model of these sizes, stored as it is; None where they can, and where its config
    can't be read, which is refused elsewhere. eight_bits: of products' inputs as well as of weights."""
    try:
        config = read_config(files.config)
        stored = stored_quantization(files.config)
    except ModelError:
        return None
    widths = {"hidden_size": config.hidden_size}
    if isinstance(config, DeepseekConfig):
        unfit, keys = unfit_latents(config.rank, config.rotated_dim), "kv_lora_rank, qk_rope_head_dim"
        widths["q_lora_rank"] = config.q_rank or 0
        results, of_results = config.num_heads * config.value_dim, "num_attention_heads times v_head_dim"
    else:
        unfit = unfit_heads(config.head_dim)
        keys = "head_dim" if files.config.get("head_dim") else "hidden_size over num_attention_heads"
        results, of_results = config.num_heads * config.head_dim, "num_attention_heads times head_dim"
    if eight_bits:
        widths[of_results] = results
    for name, width in widths.items():
        if unfit is None:
            unfit, keys = unfit_width(width), name
    if unfit is not None:
        return f"{unfit} ({keys} in the model's config)"
    experts = next((experts for experts in config.experts if experts is not None), None)
    if stored is None or experts is None:
        return None
    return _unfit_experts(stored_experts(files.tensors, stored, config.num_layers), stored, experts)


def _unfit_experts(found: StoredExperts, stored: StoredQuantization, experts: ExpertsConfig) -> str | None:
    """Why such experts of a checkpoint can't be multiplied together; None where they can."""
    if found.difference is not None:
        return f"experts are stored in different ways, and can't be multiplied together: {found.difference}"
    if (found.gate_up or found.down) and stored.act_order and stored.group != -1:
        return (
            "experts whose inputs have orders of their own (desc_act in quantization_config) can't be multiplied "
            "together"
        )
    inner = experts.intermediate_size
    if found.gate_up and stored.splits((inner, inner)):
        return (
            f"an expert's gate and up can't be one product: their {inner} outputs each (moe_intermediate_size, or "
            f"intermediate_size, in the model's config) are no multiple of the {BLOCK} that share a scale"
        )
    return None


def _auto_quantization(dtype: str, kernels: str, kernels_source: str) -> tuple[str, str]:
    """A dtype that is given is the arithmetic that the user asked for."""
    if dtype != "auto":
        return "none", "auto: model.dtype is given"
    if kernels == "native":
        return "int8", f"auto: {VNNI}"
    return "none", f"auto: engine.kernels is {kernels}" if kernels_source == USER else kernels_source


def _auto_kv_cache(files: ModelFiles, dtype: str, quantization: str, kernels: str) -> tuple[str, str]:
    """int8 loses less in keys and values than it does in weights; a latent is both, of all heads."""
    if quantization != "int8" or kernels != "native":
        return dtype, "auto: model.dtype"
    return ("bfloat16", "auto: latents, with int8") if is_latent(files.config) else ("int8", "auto: with int8")


def _stored_scheme(files: ModelFiles) -> str | None:
    """How the checkpoint is quantized; None also where it can't be read, which is refused elsewhere."""
    try:
        stored = stored_quantization(files.config)
    except ModelError:
        return None
    return None if stored is None else stored.scheme


def _for_kernels(scheme: str, stored: str | None, kernels: str, source: str) -> str:
    """The scheme as kernels have it. Raises ConfigError where the checkpoint, or the kernels, do not go with it."""
    wanted = scheme
    if scheme == "int8" and kernels == "triton":
        scheme = "w8a8"
    if stored is not None:
        if scheme != stored:
            raise ConfigError(
                f"model.quantization {wanted}: the checkpoint's weights are stored as {stored}, and nothing else is "
                "made of them; leave model.quantization out, or use the original checkpoint"
            )
    elif scheme in ("gptq", "awq"):
        raise ConfigError(f"model.quantization {scheme}: the checkpoint is not stored so; use none, int8 or fp8")
    elif scheme in ("w8a8", "fp8") and kernels not in ("triton", "reference"):
        raise ConfigError(
            f"model.quantization {scheme} needs engine.kernels triton with engine.device cuda (or kernels reference, "
            f"for comparisons), here they are {kernels} ({source}); use int8 or none"
        )
    return scheme


def _level(machine: Machine, kernels: str, quantization: str, dtype: str) -> str:
    """What of the processor's abilities decides bytes: float32 in torch is the same on all that have AVX-512."""
    if kernels != "native" and quantization != "int8" and dtype == "float32":
        return machine.vector_level
    if kernels == "native" and dtype == "float32" and machine.product_level == "amx":
        return "avx512_bf16"  # the C files do not use more than that
    return machine.product_level


def _gpu_level(machine: Machine, kernels: str) -> str | None:
    """Triton's kernels add up in the same order on all GPUs of an architecture; the libraries behind torch's products
    choose by the model as well (its number of processors)."""
    if kernels == "triton" or machine.gpu_level is None or machine.gpu_name is None:
        return machine.gpu_level
    return f"{machine.gpu_level}, {machine.gpu_name.partition(' MIG ')[0]}"


def _with_mend(machine: Machine) -> str:
    return str(machine.obstacle) if machine.mend is None else f"{machine.obstacle}; {machine.mend}"
