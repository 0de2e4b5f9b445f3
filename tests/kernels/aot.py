"""Compiles a Triton kernel ahead of time, without a GPU, and says what is wrong with what it became."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from batchrun.kernels.gpu import launch

ARCHS = (80, 90, 100)

_REGISTERS = 65536  # of a multiprocessor, in words
_WARPS = 64
_BLOCKS = 32
_SHARED = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10}
_SHARED_OF_SYSTEM = 1 << 10  # of every block
_DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}


@dataclass(frozen=True)
class Compiled:
    """What a kernel became for one architecture."""

    arch: int
    num_warps: int
    registers: int  # of a thread
    spilled: int  # bytes that a thread stores and loads because registers ran out
    stack: int  # bytes of a thread
    shared: int  # bytes of a block
    warnings: tuple[str, ...]  # ptxas's
    instructions: Counter[str]  # SASS mnemonics with their modifiers, such as LDG.E.128
    ptx: str

    def count(self, instruction: str) -> int:
        """How many instructions have the operation and all modifiers of ``instruction``, in any order."""
        operation, *wanted = instruction.split(".")
        parts = ((mnemonic.split("."), n) for mnemonic, n in self.instructions.items())
        return sum(n for (first, *modifiers), n in parts if first == operation and set(wanted) <= set(modifiers))

    @property
    def warps_per_sm(self) -> int:
        """Warps that a multiprocessor holds at once, by registers and shared memory."""
        of_registers = _REGISTERS // (-(-self.registers // 8) * 8 * 32 * self.num_warps)
        of_shared = _SHARED[self.arch] // (self.shared + _SHARED_OF_SYSTEM)
        return min(of_registers, of_shared, _BLOCKS, _WARPS // self.num_warps) * self.num_warps


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], *, arch: int, num_warps: int = 4, num_stages: int = 3
) -> Compiled:
    """Compile ``kernel`` for ``sm_<arch>``.

    ``types`` names the type of every argument that is no constant: ``*bf16``, ``i32``, ``fp32``. Pointers are taken
    for multiples of 16, as torch's are, and so are integers written ``i32:16``.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name].removesuffix(":16") for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants and (types[name].startswith("*") or types[name].endswith(":16"))
    }
    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True  # what comes from Triton's cache has no log
        knobs.nvidia.dump_ptxas_log = True
        result = triton.compile(
            ASTSource(kernel, signature, constants, attributes),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
    text = log.getvalue()
    return Compiled(
        arch=arch,
        num_warps=num_warps,
        registers=_number(r"Used (\d+) registers", text),
        spilled=_number(r"(\d+) bytes spill stores", text) + _number(r"(\d+) bytes spill loads", text),
        stack=_number(r"(\d+) bytes stack frame", text),
        shared=result.metadata.shared,
        warnings=warnings(text),
        instructions=_instructions(result.asm["cubin"]),
        ptx=result.asm["ptx"],
    )


def launched(call: Callable[[], object], *, arch: int, alone: bool = False) -> list[Compiled]:
    """Compile, for ``sm_<arch>``, what ``call`` launches on tensors of the ``meta`` device; ``alone``: first.

    On this device a tensor has no values, so a call that asks for one raises.
    """
    with pytest.MonkeyPatch.context() as patch:
        found: list[Compiled] = []

        def start(kernel: Any, _: object, args: tuple[Any, ...], constants: dict[str, Any], options: Any) -> None:
            if alone and found:
                return
            arguments = dict(zip(kernel.arg_names, args, strict=False))
            general = kernel.do_not_specialize or ()
            fixed = {
                name: value
                for name, value in arguments.items()
                if value is None or (isinstance(value, int) and value == 1 and name not in general)
            }
            types = {name: _type(value) for name, value in arguments.items() if name not in fixed}
            types |= {name: types[name].removesuffix(":16") for name in general if name in types}
            found.append(compiled(kernel, types, fixed | constants, arch=arch, **options))

        patch.setattr(launch, "start", start)
        call()
    return found


def _type(argument: Any) -> str:
    """The type for which Triton would compile an argument."""
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<{_DTYPES[argument.base.dtype]}[{','.join(map(str, argument.block_shape))}]>"
    if isinstance(argument, torch.Tensor):
        return "*" + _DTYPES[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    return "i32:16" if argument % 16 == 0 else "i32"


def problems(compiled: Compiled, *, instruction: str | tuple[str, ...] = (), min_warps_per_sm: int = 1) -> list[str]:
    """What a kernel must not be; ``instruction``: those that it must have."""
    found = [f"ptxas: {line}" for line in compiled.warnings]
    if compiled.spilled or compiled.count("STL") or compiled.count("LDL"):
        found.append(
            f"{compiled.spilled} bytes spilled, {compiled.count('STL')} STL and {compiled.count('LDL')} LDL,"
            f" with {compiled.registers} registers"
        )
    if compiled.stack:
        found.append(f"a stack of {compiled.stack} bytes")
    if compiled.warps_per_sm < min_warps_per_sm:
        found.append(
            f"{compiled.warps_per_sm} warps on a multiprocessor, fewer than {min_warps_per_sm}:"
            f" {compiled.registers} registers, {compiled.shared} bytes shared"
        )
    for wanted in [instruction] if isinstance(instruction, str) else instruction:
        if not compiled.count(wanted):
            found.append(f"no {wanted}")
    return [f"sm_{compiled.arch}: {line}" for line in found]


def warnings(log: str) -> tuple[str, ...]:
    """The lines of ptxas's log that tell of a warning, or of a loss of speed (C75xx)."""
    return tuple(line for line in log.splitlines() if re.search(r"\bwarning\b|\bC75\d\d\b", line))


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    assert found, f"no {pattern} in the log of ptxas: {log!r}"
    return int(found[1])


def _instructions(cubin: bytes) -> Counter[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [knobs.nvidia.nvdisasm.path, "-c", file.name], check=True, capture_output=True, text=True
        ).stdout
    # A line is an address in a comment, perhaps a predicate, then the mnemonic.
    return Counter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing, re.MULTILINE))
