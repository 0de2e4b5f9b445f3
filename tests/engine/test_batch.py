"""A step on its way to the device: what is laid out, how it moves, and how a decoding step is filled up for a graph."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchrun.engine.batch import Batch, Groups, build_batch
from batchrun.engine.executor import Executor, largest_step
from batchrun.engine.graphs import bucket, fill, takes
from batchrun.engine.request import Request, Step, StepRow
from batchrun.engine.transfer import Transfer, bytes_of, layout_of, numbers_of, tensors_of
from batchrun.ops import torch_ops
from batchrun.ops.attention_batch import no_plan
from batchrun.sampling import SamplingParams
from tests.engine.driver import CPU, load_decoder, request

GROUPS = Groups(
    [None], 0, lambda *batch, **shape: no_plan(*batch, **shape, group=1, head_dim=16, dtype=torch.float32), [0]
)


@dataclass(frozen=True)
class Inner:
    numbers: Tensor
    count: int


@dataclass(frozen=True)
class Outer:
    flags: Tensor
    inner: list[Inner | None]
    nothing: None = None


def running(*lengths: int, params: SamplingParams | None = None) -> list[Request]:
    """Requests of these many tokens, each with blocks of its own from 1 on."""
    made, block = [], 1
    for key, length in enumerate(lengths):
        each = request(key, range(1, length + 1), params or SamplingParams(temperature=0, max_tokens=9))
        each.slot, each.turn = key, key
        count = -(-length // 8)
        each.blocks = [array("i", range(block, block + count))]
        block += count
        made.append(each)
    return made


def decoding(requests: list[Request]) -> Step:
    """The step that computes each request's newest token alone."""
    return Step([StepRow(each, len(each.tokens) - 1, 1, True, 0) for each in requests], [])


def test_inputs_arrive_as_they_were_in_one_buffer() -> None:
    inputs = Outer(
        torch.tensor([True, False, True]),
        [Inner(torch.arange(5), 3), None, Inner(torch.zeros(0, 4), 0), Inner(torch.tensor([[0.5, -1.0]]).T, 7)],
    )
    tensors = list(tensors_of(inputs))
    memory = torch.zeros(bytes_of(layout_of(tensors)), dtype=torch.uint8)
    transfer = Transfer(CPU)
    for _ in range(3):  # the host's buffers take turns
        sent = transfer.send(inputs, memory)
        begin, end = memory.data_ptr(), memory.data_ptr() + len(memory)
        for before, after in zip(tensors, tensors_of(sent), strict=True):
            assert torch.equal(before, after)
            assert before.dtype == after.dtype
            assert not after.numel() or begin <= after.data_ptr() < end
            assert after.data_ptr() % 16 == 0 or not after.numel()
    assert [each.count for each in sent.inner if each] == [3, 0, 7]
    assert transfer.send(inputs) is inputs  # on a CPU nothing moves


@given(st.integers(1, 5000))
def test_a_batch_is_filled_up_by_a_quarter_at_most(count: int) -> None:
    size = bucket(count)
    assert count <= size <= max(count + 0.25 * count, 1)
    assert bucket(size) == size


def test_a_step_without_decoding_alone_is_not_for_a_graph() -> None:
    requests = running(5, 9)
    assert takes(build_batch(decoding(requests), 8, GROUPS))
    prefill = Step([StepRow(requests[0], 0, 5, True, 0), StepRow(requests[1], 8, 1, True, 0)], [])
    assert not takes(build_batch(prefill, 8, GROUPS))
    admitted = decoding(requests)
    admitted.admitted.append(requests[0])
    assert not takes(build_batch(admitted, 8, GROUPS))
    unsampled = Step([StepRow(requests[0], 3, 1, False, 0)], [])
    assert not takes(build_batch(unsampled, 8, GROUPS))


def test_every_number_of_the_inputs_is_in_a_graphs_key() -> None:
    def key(batch: Batch) -> tuple[object, object]:
        return layout_of(list(tensors_of(batch))), tuple(numbers_of(batch))

    requests = running(5, 9, 30)

    @dataclass(frozen=True)
    class Plan:
        items: Tensor
        n: int

    def filled(rows: int, n: int) -> Batch:
        return fill(build_batch(decoding(requests), 8, GROUPS), rows, lambda plan: Plan(torch.zeros(3), n))

    assert key(filled(4, 1)) == key(filled(4, 1))
    assert key(filled(4, 1)) != key(filled(4, 2))
    assert key(filled(4, 1)) != key(filled(5, 1))


def test_rows_that_fill_up_a_batch_change_nothing(tiny_model: Path) -> None:
    decoder = load_decoder(tiny_model, ops=torch_ops, packed=False)
    executor = Executor(decoder, device=CPU, block_size=8, max_num_seqs=16, max_model_len=64)
    executor.allocate(16)
    for cache in executor.caches:
        cache.keys.normal_()
        cache.values.normal_()
    executor.tokens.copy_(torch.arange(executor.tokens.numel()).view_as(executor.tokens) % 50)
    batch = build_batch(decoding(running(5, 9, 30)), 8, GROUPS)
    kept = [(cache.keys.clone(), cache.values.clone()) for cache in executor.caches]
    with torch.inference_mode():
        alone = executor._decode(batch).clone()
        filled = executor._decode(fill(batch, 7, lambda plan: None))
    assert len(filled) == 7
    torch.testing.assert_close(filled[:3], alone, rtol=1e-4, atol=1e-5)
    for cache, (keys, values) in zip(executor.caches, kept, strict=True):  # padding wrote block 0 alone
        changed = (cache.keys != keys).flatten(1).any(1) | (cache.values != values).flatten(1).any(1)
        assert changed.nonzero()[:, 0].tolist() == [0, 1, 3, 7]
    executor.close()


@pytest.mark.parametrize(("rows", "tokens", "computed"), [(3, 17, 17), (4, 4, 4), (2, 500, 126)])
def test_the_largest_step_fills_every_bound(tiny_model: Path, rows: int, tokens: int, computed: int) -> None:
    """500 tokens are more than two sequences of 64 can have, which have to have room for one more each."""
    step = largest_step(rows, 64, tokens, 8, 1)
    assert sum(row.n for row in step.rows) == computed
    assert len(step.rows) == rows
    executor = Executor(load_decoder(tiny_model), device=CPU, block_size=8, max_num_seqs=rows, max_model_len=64)
    executor.allocate(1)
    output = executor.launch(step).result()
    assert len(output.token_ids) == rows
    assert all(entry is not None and len(entry.top) == 20 for entry in output.logprobs)
    executor.close()
