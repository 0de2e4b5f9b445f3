"""What a model needs of a machine: KV bytes, context length, numbers and device, worked out from plain configuration.

The engine sizes its pool with these functions and ``batchrun plan`` predicts it with the same ones, so this module
imports no torch. A configuration is the dictionary of a Hugging Face ``config.json`` (a GGUF file's is translated).
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

from batchrun.errors import JobError
from batchrun.job import EngineSpec, KVCacheDType, ModelSpec, Quantization
from batchrun.kernels.machine import describe_cpu
from batchrun.model_files import ModelFiles
from batchrun.text import format_bytes
from batchrun.weights.gguf import read_gguf, resident_bytes
from batchrun.weights.quantization_config import is_floats, packed_bytes

Device = Literal["cpu", "cuda"]
Config = Mapping[str, Any]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BYTES = {"int8": 1.25, "int4": 0.625}  # of a number, scale and minimum included
_KV_BITS = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}  # of a number
_KV_SCALE_BYTES = {"fp8": 4, "int8": 4, "int4": 4}  # of a key, and of a value
RESERVED_BLOCKS = 1  # block 0 fills up block tables and is never handed out
_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
_CPU_KV_CEILING = 4 * _GIB
_CPU_KV_SHARE = 0.25
_CPU_ONE_SEQUENCE_SHARE = 0.75  # an automatic budget grows this far to hold one whole sequence
_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_LEAST_CAPABILITY = 8  # that the kernels are compiled for
_ROPE_ALREADY_SCALED = {"default", "llama3", "longrope", "su", "mrope"}


def resolve_device(device: str) -> Device:
    """``auto`` is ``cuda`` where there is a device that PyTorch can use, else ``cpu``.

    Raises JobError where ``cuda`` is asked for and cannot be.
    """
    if device == "cpu":
        return "cpu"
    reason = _why_no_cuda()
    if reason is None:
        return "cuda"
    if device == "cuda":
        raise JobError(f"engine.device: cuda cannot be used: {reason}")
    return "cpu"


def _why_no_cuda() -> str | None:
    """Why PyTorch has no CUDA device, found out without it; None where it has one."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}:
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        build = Path(torch.origin).with_name("version.py")
        if build.exists() and re.search(r"^cuda\b.*= None$", build.read_text(encoding="utf-8"), re.MULTILINE):
            return "the installed PyTorch is built without CUDA"
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver"
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver shows no GPU"
    major = ctypes.c_int(0)
    if driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, 0) == 0 and major.value < _LEAST_CAPABILITY:
        return f"the GPU's compute capability is {major.value}.x, and {_LEAST_CAPABILITY}.0 is needed"
    return None


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name, one entry for each GPU that can be used here."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()) not in {"", "-1"}:
        return visible.split(",")
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return [str(number) for number in range(count.value if found else 0)]


def resolve_dtype(dtype: str, device: str) -> str:
    """``auto`` is ``bfloat16`` on a GPU and on a CPU that multiplies it natively, else ``float32``."""
    if dtype != "auto":
        return dtype
    if device == "cuda":
        return "bfloat16"
    description = describe_cpu()
    return "bfloat16" if "amx_bf16" in description or "avx512_bf16" in description else "float32"


def head_dim(config: Config) -> int:
    """Elements of one attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def kv_heads(config: Config) -> int:
    """Key/value heads of one layer."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def kv_bytes_per_token(config: Config, dtype: str, kv_cache_dtype: KVCacheDType) -> int:
    """Bytes of keys and values, scales included, that one token keeps over all layers; ``dtype``: the model's."""
    bits = _KV_BITS.get(kv_cache_dtype, 8 * DTYPE_BYTES[dtype])
    vector = head_dim(config) * bits // 8 + _KV_SCALE_BYTES.get(kv_cache_dtype, 0)
    return 2 * int(config["num_hidden_layers"]) * kv_heads(config) * vector


def pool_bytes_per_token(files: ModelFiles, dtype: str, kv_cache_dtype: KVCacheDType, draft: ModelFiles | None) -> int:
    """Bytes that one token takes in the pool, whose blocks hold the keys and values of the model and of a draft model.

    The draft model's are plain numbers of ``dtype``, the model's.
    """
    own = kv_bytes_per_token(files.config, dtype, kv_cache_dtype)
    return own if draft is None else own + kv_bytes_per_token(draft.config, dtype, "auto")


def parameter_count(config: Config) -> tuple[int, int]:
    """``(matrix, embedding)`` parameters of a dense decoder; a token multiplies by every matrix parameter once.

    The LM head counts as embedding: it is applied only to the tokens that a step samples from.
    """
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    attention = hidden * head_dim(config) * (2 * heads + 2 * kv_heads(config))
    mlp = 3 * hidden * int(config["intermediate_size"])
    tables = 1 if config.get("tie_word_embeddings") else 2
    return int(config["num_hidden_layers"]) * (attention + mlp), tables * int(config["vocab_size"]) * hidden


def auto_forms(files: ModelFiles) -> list[Quantization]:
    """What ``model.quantization: auto`` chooses from; those that lose nothing come first."""
    return ["dequantize", "none"] if files.encodings else ["none", "int8", "int4"]


def weight_bytes(files: ModelFiles, dtype_bytes: int, quantization: Quantization, device: Device) -> int:
    """Bytes of the loaded matrices; of ``auto``, of the smallest form that it chooses from."""
    if quantization == "auto":
        return min(weight_bytes(files, dtype_bytes, form, device) for form in auto_forms(files))
    if quantization == "none" and files.format == "gguf":
        return resident_bytes(read_gguf(files.weights[0]), dtype_bytes)
    matrix, embedding = parameter_count(files.config)
    return int(matrix * _bytes_per_number(files, dtype_bytes, quantization, device)) + embedding * dtype_bytes


def _bytes_per_number(files: ModelFiles, dtype_bytes: int, quantization: Quantization, device: Device) -> float:
    """Of linear layers. FP8 is plain numbers on a CPU."""
    stored = files.config.get("quantization_config")
    is_fp8 = quantization == "fp8" or (quantization == "none" and stored is not None and is_floats(stored))
    if is_fp8:
        return dtype_bytes if device == "cpu" else 1
    if quantization == "none" and stored is not None:
        return packed_bytes(stored) or dtype_bytes
    return QUANTIZED_BYTES.get(quantization, dtype_bytes)


def context_length(config: Config) -> int:
    """Tokens that the model was made for, its rope scaling included."""
    try:
        length = _context_length(config)
    except (TypeError, ValueError, AttributeError) as error:
        raise JobError(f"model config: the context length is not understood: {error}") from None
    if length <= 0:
        raise JobError("model: its configuration has no max_position_embeddings; set model.max_model_len")
    return length


def _context_length(config: Config) -> int:
    length = int(config.get("max_position_embeddings") or 0)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in _ROPE_ALREADY_SCALED or not scaling.get("factor"):
        return length
    if kind == "yarn":
        length = int(scaling.get("original_max_position_embeddings") or length)
    return int(length * float(scaling["factor"]))


def resolve_max_model_len(config: Config, spec: ModelSpec) -> int:
    """Most tokens, prompt and output together, that one row may take.

    Raises JobError when the job asks for more than the model was made for.
    """
    if spec.max_model_len == "auto":
        return context_length(config)
    if config.get("max_position_embeddings") and spec.max_model_len > (limit := context_length(config)):
        raise JobError(f"model.max_model_len: {spec.max_model_len} is above the model's context of {limit} tokens")
    return spec.max_model_len


def total_memory() -> int:
    """Bytes of host memory that this process could ever have, a container's limit included."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def available_memory() -> int:
    """Bytes of host memory that this process may still take, a container's limit included."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        cache = re.search(r"^inactive_file (\d+)$", (_CGROUP / "memory.stat").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return available
    if limit == "max":
        return available
    reclaimable = int(cache[1]) if cache else 0
    return max(0, min(available, int(limit) - used + reclaimable))


def gpu_memory() -> int | None:
    """Total bytes of the first visible GPU by its driver's own tool; None where that does not answer."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        return int(answer.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def sequence_bytes(max_model_len: int, *, bytes_per_token: int, block_size: int) -> int:
    """Bytes of the smallest pool that holds one sequence of ``max_model_len`` tokens."""
    blocks = -(-max_model_len // block_size) + RESERVED_BLOCKS
    return blocks * block_size * bytes_per_token


def kv_budget(spec: EngineSpec, device: Device, *, bytes_per_token: int, max_model_len: int, free: int) -> int:
    """Bytes of the KV pool, ``engine.kv_cache_memory`` or what ``auto`` comes to; a multiple of the block's bytes.

    ``free`` is the memory that may be taken: on a CPU :func:`available_memory`, on a GPU what
    ``gpu_memory_utilization`` leaves beside weights, all of which ``auto`` takes there.

    Raises JobError when the budget cannot hold one sequence of ``max_model_len`` tokens, or no memory holds the budget.
    """
    needed = sequence_bytes(max_model_len, bytes_per_token=bytes_per_token, block_size=spec.block_size)
    if spec.kv_cache_memory != "auto":
        budget = int(spec.kv_cache_memory)
        total = total_memory() if device == "cpu" else gpu_memory()
        if total is not None and budget > total:
            there_is = format_bytes(total)
            raise JobError(
                f"engine.kv_cache_memory: {format_bytes(budget)} is more than the memory there is: {there_is}"
            )
    elif device == "cuda":
        budget = max(0, free)
    else:
        budget = max(min(_CPU_KV_CEILING, int(free * _CPU_KV_SHARE)), min(needed, int(free * _CPU_ONE_SEQUENCE_SHARE)))
    if budget < 0:
        raise JobError(f"model.name_or_path: its weights need {format_bytes(-free)} more memory than is free")
    if budget < needed:
        raise JobError(
            f"engine.kv_cache_memory: {format_bytes(budget)} cannot hold one sequence of model.max_model_len = "
            f"{max_model_len} tokens, which takes {format_bytes(needed)}; raise the one or lower the other"
        )
    return budget - budget % (spec.block_size * bytes_per_token)
