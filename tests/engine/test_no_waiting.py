"""Nothing in a step on a GPU waits for the device: its tensors here hold no numbers, so that none can be asked for."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from batchrun.engine.executor import Executor, largest_step
from batchrun.engine.graphs import DecodeGraphs
from batchrun.engine.request import Request, Step, StepRow
from batchrun.engine.speculation.draft_model import DraftModel
from batchrun.job import Quantization
from batchrun.kernels.cpu.build import BuildError, find_compiler
from batchrun.model_files import resolve
from batchrun.models.decoder import Decoder
from batchrun.models.families import model_config
from batchrun.ops import torch_ops
from batchrun.sampling import SamplingParams
from batchrun.weights.load import Loader, open_weights
from batchrun.weights.quantize import PLAIN, QUANTIZERS
from batchrun.weights.stored import SafeTensor
from tests.engine.test_batch import decoding, running

pytest.importorskip("triton")
from batchrun.ops import fixed_triton_ops, fp8_triton, grouped_triton, triton_ops

CUDA = torch.device("cuda")
EVERYTHING = SamplingParams(
    temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, max_tokens=9, min_tokens=3, logprobs=2, repetition_penalty=1.2,
    presence_penalty=0.1, frequency_penalty=0.1,
)  # fmt: skip
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);
"""


@pytest.fixture(scope="module")
def device_guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    """PyTorch built for CPUs knows no guard of CUDA devices, without which it does not even fake them."""
    if torch.version.cuda is not None:
        return
    folder, torch_folder = tmp_path_factory.mktemp("guard"), Path(torch.__file__).parent
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    subprocess.run([*compiler, *flags, "-o", str(library), str(source), "-lc10"], check=True)
    ctypes.CDLL(str(library))


@pytest.fixture
def fake_cuda(device_guard: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake tensors on a GPU of compute capability 8.0; gives the names of the kernels that are launched."""
    launched: list[str] = []

    def start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], *_: Any) -> None:
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        assert all(each.is_cuda for each in tensors), kernel
        assert all(isinstance(size, int) for size in grid), kernel
        launched.append(kernel.fn.__name__)

    monkeypatch.setattr("batchrun.kernels.gpu.launch.start", start)
    monkeypatch.setattr(import_module("batchrun.kernels.gpu.attention"), "capability", lambda device: (8, 0))
    monkeypatch.setattr(SafeTensor, "copy_into", lambda self, out: None)  # weights hold no numbers either
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    return launched


def run(path: Path, ops: ModuleType, steps: Sequence[Step], quantization: Quantization = "none") -> None:
    """Launch steps on a GPU that is not there."""
    files = resolve(str(path))
    config = model_config(files.config)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        quantize = QUANTIZERS.get(quantization, PLAIN)
        decoder = Decoder(config, Loader(open_weights(files), torch.bfloat16, CUDA, ops.pack, quantize), ops, 64)
        sizes = {"block_size": 8, "max_num_seqs": 16, "max_model_len": 64}
        draft_model = DraftModel(decoder, CUDA, config.vocab_size)
        executor = Executor(decoder, device=CUDA, draft_model=draft_model, draft_rows=16, **sizes)
        executor.allocate(32)
    for step in steps:
        laid_out = executor._laid_out(step)
        with fake:
            executor._run(laid_out)


def steps() -> list[Step]:
    """Prefill with everything that sampling can do, a chunk that samples nothing, scored prompts, decoding."""
    plain, sampled = running(5, 9, 30), running(6, 17, params=EVERYTHING)
    scored = running(12, params=SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=3))
    mixed = [StepRow(plain[0], 0, 5, True, 0), StepRow(sampled[1], 4, 13, True, 0), StepRow(plain[2], 8, 4, False, 0)]
    return [
        largest_step(4, 64, 21, 8, 1, drafts=9),
        verifying(plain[0], (7, 8)),
        verifying(sampled[1], ()),
        Step(mixed, [plain[0], sampled[1]]),
        Step([StepRow(plain[2], 0, 8, False, 0)], [plain[2]]),
        Step([StepRow(scored[0], 0, 12, True, 0)], [scored[0]]),
        decoding(plain),
        decoding(sampled),
    ]


def verifying(each: Request, drafts: tuple[int, ...]) -> Step:
    """A request's newest token and two drafts, which are the host's, or made by the draft model in two rounds."""
    known = len(each.tokens)
    rounds = [Step([StepRow(each, 0, known, True, 0)], []), Step([StepRow(each, known, 1, True, 0)], [])]
    row = StepRow(each, known - 1, 3, True, 0, n_drafts=2, drafts=drafts)
    return Step([row], [], [] if drafts else rounds)


@pytest.mark.parametrize("ops", [triton_ops, fixed_triton_ops], ids=["triton", "fixed_triton"])
def test_no_step_waits(
    tiny_model: Path, ops: ModuleType, fake_cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = []

    def capture(self: DecodeGraphs, inputs: Any, memory: Any) -> Any:
        captured.append(self._decode(inputs))
        return SimpleNamespace(inputs=memory, graph=SimpleNamespace(replay=lambda: None), logits=captured[-1])

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    run(tiny_model, ops, [*steps(), *steps()[-2:]])
    assert len(captured) == 2  # the decoding steps, which come again, have a graph each
    assert "_attend" in fake_cuda


@pytest.mark.parametrize("ops", [triton_ops, fixed_triton_ops], ids=["triton", "fixed_triton"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_no_step_of_a_quantized_model_waits(
    tiny_model: Path,
    ops: ModuleType,
    capability: tuple[int, int],
    quantization: Quantization,
    fake_cuda: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("planes", "eight_bits"):
        module = import_module(f"batchrun.kernels.gpu.{name}")
        monkeypatch.setattr(module, "capability", lambda device: capability)
    for module in (grouped_triton, fp8_triton):  # so that some steps have more rows than a kernel is for
        monkeypatch.setattr(module, "DENSE_ROWS", 16)
    monkeypatch.setattr(fp8_triton, "_LIBRARY_ROWS", 16)
    run(tiny_model, ops, steps(), quantization)
    assert {"byte_product_kernel", "plane_product_kernel"} & set(fake_cuda)


def test_operations_that_wait_are_seen(tiny_model: Path, fake_cuda: list[str]) -> None:
    """The reference asks the device for numbers, and this is where that shows."""
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        run(tiny_model, torch_ops, steps()[:1])
    assert not fake_cuda
