"""``ModelInputsBuilder`` against token-by-token loops."""

import random

import numpy as np
import pytest
import torch

from backend_engine.core.batch import ScheduledRequest, SchedulerOutput
from backend_engine.model_engine.model_inputs import EngineLimits, ModelInputsBuilder
from tests.support.engine_driver import new_request

SIZE = 4
LIMITS = EngineLimits(max_batch_size=6, max_num_tokens=40, max_seq_len=64)


def builder() -> ModelInputsBuilder:
    return ModelInputsBuilder(LIMITS, SIZE, torch.device("cpu"))


def random_output(pick: random.Random) -> SchedulerOutput:
    context, generation = [], []
    for i in range(pick.randint(1, 6)):
        request = new_request(i, [pick.randrange(1000) for _ in range(pick.randint(1, 30))])
        for _ in range(pick.randint(0, 5)):
            request.promise()
            request.append_token(pick.randrange(1000))
        if pick.random() < 0.5:
            start = pick.randrange(request.num_tokens)
            num_tokens = min(pick.randint(1, 6), request.num_tokens - start)
            context.append(ScheduledRequest(request, start, num_tokens, start + num_tokens == request.num_tokens))
        else:
            generation.append(ScheduledRequest(request, request.num_tokens - 1, 1, True))
    return SchedulerOutput(1, tuple(context), tuple(generation))


@pytest.mark.parametrize("seed", range(12))
def test_every_token_has_its_id_position_and_slot(seed: int) -> None:
    output = random_output(random.Random(seed))
    tables = np.random.default_rng(seed).permutation(6 * 16).reshape(6, 16).astype(np.int32)[: output.batch_size]
    inputs = builder().build(output, tables)
    ids, positions, slots, wanted = [], [], [], []
    for table, row in zip(tables.tolist(), output.rows, strict=True):
        for position in range(row.start, row.start + row.num_tokens):
            ids.append((row.request.prompt_token_ids + row.request.output_token_ids)[position])
            positions.append(position)
            slots.append(table[position // SIZE] * SIZE + position % SIZE)
        if row.needs_logits:
            wanted.append(len(ids) - 1)
    metadata = inputs.attention
    assert inputs.input_ids.tolist() == ids
    assert inputs.position_ids.tolist() == positions
    assert inputs.logits_indices.tolist() == wanted
    assert metadata.slot_mapping.tolist() == slots
    assert metadata.q_lens.tolist() == metadata.q_lens_host.tolist() == [row.num_tokens for row in output.rows]
    kv_lens = [row.start + row.num_tokens for row in output.rows]
    assert metadata.kv_lens.tolist() == metadata.kv_lens_host.tolist() == kv_lens
    width = -(-max(kv_lens) // SIZE)
    assert metadata.block_tables.tolist() == metadata.block_tables_host.tolist() == tables[:, :width].tolist()
    assert (metadata.num_contexts, metadata.num_ctx_tokens) == (len(output.context), output.num_context_tokens)
    assert metadata.tokens_per_block == SIZE


def test_one_builder_serves_steps_of_any_size_one_after_another() -> None:
    shared = builder()
    tables = np.arange(96, dtype=np.int32).reshape(6, 16)
    for seed in range(8):
        output = random_output(random.Random(100 + seed))
        found = shared.build(output, tables[: output.batch_size])
        expected = builder().build(output, tables[: output.batch_size])
        assert torch.equal(found.input_ids, expected.input_ids)
        assert torch.equal(found.attention.slot_mapping, expected.attention.slot_mapping)


def test_the_largest_step_fits() -> None:
    requests = [new_request(i, range(64)) for i in range(6)]
    rows = (ScheduledRequest(requests[0], 29, 35, True),)
    output = SchedulerOutput(0, rows, tuple(ScheduledRequest(request, 63, 1, True) for request in requests[1:]))
    tables = np.arange(96, dtype=np.int32).reshape(6, 16)
    assert builder().build(output, tables).input_ids.shape == (40,)
