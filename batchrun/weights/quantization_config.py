"""Which quantized checkpoints can be loaded: what their ``config.json`` says under ``quantization_config``.

Imports no torch: a job is checked, and planned, without it. Reading the tensors is the work of the module of this
package for each method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

_Setting = tuple[str, Any, Collection[Any]]  # an option, what it is set to, and what it may be


def method(config: Mapping[str, Any]) -> str:
    """The method that made a checkpoint."""
    if "quant_method" not in config and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        return "bitsandbytes"
    return str(config.get("quant_method"))


def packed_bytes(config: Mapping[str, Any]) -> float | None:
    """Bytes that a number of a linear layer takes in memory, scales included; None where it becomes a plain number.

    FP8, which only some devices multiply, is 1. For a config that `check` lets pass.
    """
    match method(config):
        case "gptq" | "awq":
            return _grouped_bytes(config.get("bits", 4), config.get("group_size", 128))
        case "compressed-tensors":
            groups = list(_mapping(config.get("config_groups")).values())
            bits, size = _at(groups[0], "weights", "num_bits"), _at(groups[0], "weights", "group_size")
            return 1.0 if is_floats(config) else _grouped_bytes(bits, size)
        case "bitsandbytes":
            return 1.0 if config.get("load_in_8bit") else None
        case "mxfp4":
            return 1 + 4 / 32
        case _:
            return 1.0


def is_floats(config: Mapping[str, Any]) -> bool:
    """Whether linear layers are FP8."""
    groups = list(_mapping(config.get("config_groups")).values())
    form = str(_at(groups[0], "format") if groups else "") + str(config.get("format"))
    return method(config) == "fp8" or (method(config) == "compressed-tensors" and "float" in form)


def _grouped_bytes(bits: int, group_size: Any) -> float:
    floats = 8 / group_size if isinstance(group_size, int) and group_size > 0 else 0.0  # a scale and a minimum
    return bits / 8 + floats


def check(config: Any) -> dict[str, Any]:
    """The settings that readers go by, defaults filled in and words in lower case.

    Raises ``ValueError``, naming the method and the option, if such checkpoints cannot be loaded.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config is a {type(config).__name__}, not an object")
    name = method(config)
    if name not in _SETTINGS:
        known = ", ".join(sorted(_SETTINGS))
        raise ValueError(f"weights quantised with {name!r} are not supported (supported: {known})")
    settings = {}
    for option, value, allowed in _SETTINGS[name](config):
        setting = value.lower() if isinstance(value, str) else value
        if not any(setting == each and type(setting) is type(each) for each in allowed):
            known = ", ".join("nothing" if each in (None, {}) else str(each) for each in allowed)
            raise ValueError(
                f"weights quantised with {name!r}, {option}: {value!r} is not supported (supported: {known})"
            )
        settings[option] = setting
    return settings


def _gptq(config: Mapping[str, Any]) -> Iterator[_Setting]:
    yield "bits", config.get("bits"), (4, 8)
    yield from _group_size(config)
    yield "sym", config.get("sym", True), (True, False)
    for option in ("checkpoint_format", "format"):
        yield option, config.get(option), (None, "gptq", "gptq_v2")
    yield "pack_dtype", config.get("pack_dtype"), (None, "int32")
    yield "is_marlin_format", config.get("is_marlin_format", False), (False,)
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        yield "dynamic", dynamic, (None, {})
    for rule, override in _mapping(dynamic).items():
        if not str(rule).startswith("-:"):  # which says that modules are plain
            yield f"dynamic {rule}", override, ({},)


def _awq(config: Mapping[str, Any]) -> Iterator[_Setting]:
    yield "bits", config.get("bits"), (4,)
    yield from _group_size(config)
    for option in ("version", "format"):
        yield option, config.get(option), (None, "gemm")
    yield "zero_point", config.get("zero_point", True), (True,)


def _group_size(config: Mapping[str, Any]) -> Iterator[_Setting]:
    size = config.get("group_size", 128)
    yield "group_size", size, (size,) if type(size) is int and size > 0 else (-1,)


def _compressed_tensors(config: Mapping[str, Any]) -> Iterator[_Setting]:
    yield "sparsity_config.format", _at(config, "sparsity_config", "format"), (None, "dense")
    yield "transform_config", config.get("transform_config") or None, (None,)
    for name, group in (_mapping(config.get("config_groups")) or {"config_groups": {}}).items():
        form = _at(group, "format") or config.get("format")
        yield f"{name}.format", form, ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
        yield (
            f"{name}.weights.num_bits",
            _at(group, "weights", "num_bits"),
            (4, 8) if form == "pack-quantized" else (8,),
        )
        strategies = ("tensor", "channel", "group", "block")
        yield f"{name}.weights.strategy", _at(group, "weights", "strategy"), strategies
        if _at(group, "weights", "strategy") == "block":
            yield f"{name}.weights.block_structure", _at(group, "weights", "block_structure"), ([128, 128],)


def _fp8(config: Mapping[str, Any]) -> Iterator[_Setting]:
    yield "fmt", config.get("fmt"), (None, "e4m3")
    yield "weight_block_size", config.get("weight_block_size"), (None, [128, 128])


def _bitsandbytes(config: Mapping[str, Any]) -> Iterator[_Setting]:
    if config.get("load_in_4bit"):
        yield "bnb_4bit_quant_type", config.get("bnb_4bit_quant_type"), ("nf4", "fp4")
        yield "bnb_4bit_quant_storage", config.get("bnb_4bit_quant_storage"), (None, "uint8")


def _mxfp4(config: Mapping[str, Any]) -> Iterator[_Setting]:
    yield from ()


_SETTINGS = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _at(value: Any, *keys: str) -> Any:
    """What a nested object has under ``keys``; None if it has nothing there."""
    for key in keys:
        value = _mapping(value).get(key)
    return value
