"""``ModelInputsBuilder``: a ``SchedulerOutput`` and its block tables as the tensors of one forward pass.

Used by ``ModelEngine``. Depends on nothing but its arguments; all numbers of a step are written into one
persistent numpy buffer and reach the device in one upload.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from backend_engine.attention.interface import AttentionMetadata, IntArray
from backend_engine.core.batch import SchedulerOutput
from backend_engine.models.model_inputs import ModelInputs


@dataclass(frozen=True)
class EngineLimits:
    """The largest step: rows, tokens, and tokens of one request."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int


class ModelInputsBuilder:
    """Builds inputs up to ``limits``. On a CPU the tensors are views of the buffer: valid until the next ``build``."""

    def __init__(self, limits: EngineLimits, tokens_per_block: int, device: torch.device) -> None:
        self._tokens_per_block = tokens_per_block
        self._device = device
        max_blocks = -(-limits.max_seq_len // tokens_per_block)
        self._capacity = 5 * limits.max_num_tokens + limits.max_batch_size * (3 + max_blocks)
        self._buffer = np.zeros(self._capacity, np.int32)
        self._tensor = torch.from_numpy(self._buffer)
        self._arange = np.arange(max(limits.max_num_tokens, limits.max_batch_size), dtype=np.int32)

    def build(self, output: SchedulerOutput, block_tables: IntArray) -> ModelInputs:
        """``block_tables``: int32 ``[batch_size, >= blocks in use]``, aligned with ``output.rows``.

        Reads ``start`` and ``num_tokens`` of the rows and the requests' token ids, nothing else.
        """
        rows = output.rows
        num_rows, num_tokens = len(rows), output.num_tokens
        size = self._tokens_per_block
        starts = np.array([row.start for row in rows], np.int32)
        q_lens = self._q_lens(output)
        kv_lens = starts + q_lens
        width = -(-int(kv_lens.max()) // size)
        assert block_tables.shape[0] == num_rows and block_tables.shape[1] >= width, (
            block_tables.shape,
            num_rows,
            width,
        )
        logits, context_logits = self._logits_indices(output, q_lens)
        lengths = [num_tokens, num_tokens, num_tokens, num_tokens, num_rows, num_rows, num_rows * width, len(logits)]
        bounds = np.cumsum([0, *lengths]).tolist()
        assert bounds[-1] <= self._capacity, (num_tokens, num_rows, width, len(logits), self._capacity)
        pieces = [self._buffer[a:b] for a, b in itertools.pairwise(bounds)]
        ids, positions, text_lens, slots, q_out, kv_out, tables, logits_out = pieces
        self._write_ids(output, ids)
        q_out[:], kv_out[:], logits_out[:] = q_lens, kv_lens, logits
        tables = tables.reshape(num_rows, width)
        tables[:] = block_tables[:, :width]
        row_of_token = self._arange[:num_rows]
        if output.is_generation_only:
            positions[:] = starts
        else:
            row_of_token = np.repeat(row_of_token, q_lens)
            first_tokens = np.cumsum(q_lens, dtype=np.int32) - q_lens
            positions[:] = self._arange[:num_tokens] + (starts - first_tokens)[row_of_token]
        prompt_lens = np.array([len(row.request.prompt_token_ids) for row in rows], np.int32)
        np.maximum(positions + np.int32(1), prompt_lens[row_of_token], out=text_lens)
        slots[:] = tables[row_of_token, positions // size] * size + positions % size

        device = self._tensor[: bounds[-1]].to(self._device)
        parts = [device[a:b] for a, b in itertools.pairwise(bounds)]
        metadata = AttentionMetadata(
            num_contexts=len(output.context),
            num_ctx_tokens=output.num_context_tokens,
            tokens_per_block=size,
            q_lens=parts[4],
            kv_lens=parts[5],
            block_tables=parts[6].view(num_rows, width),
            slot_mapping=parts[3],
            q_lens_host=q_out,
            kv_lens_host=kv_out,
            block_tables_host=tables,
        )
        return ModelInputs(parts[0], parts[1], parts[2], parts[7], metadata, context_logits)

    def _q_lens(self, output: SchedulerOutput) -> IntArray:
        q_lens = np.ones(output.batch_size, np.int32)
        q_lens[: len(output.context)] = [row.num_tokens for row in output.context]
        assert int(q_lens.sum()) == output.num_tokens, "a generation row has more than one token"
        return q_lens

    def _logits_indices(
        self, output: SchedulerOutput, q_lens: IntArray
    ) -> tuple[IntArray, tuple[tuple[int, int], ...]]:
        """Tokens of the step whose logits are wanted, and how many of them, at the end, are whose context logits."""
        last_tokens = np.cumsum(q_lens, dtype=np.int32) - np.int32(1)
        wanted: IntArray = last_tokens[np.array([row.needs_logits for row in output.rows])]
        counts: list[tuple[int, int]] = []
        parts = [wanted]
        for index, row in enumerate(output.context):
            first, end = row.context_logits_range()
            if first < end:
                first_token = int(last_tokens[index]) + 1 - row.num_tokens - row.start
                parts.append(np.arange(first_token + first, first_token + end, dtype=np.int32))
                counts.append((row.request.request_id, end - first))
        return (np.concatenate(parts) if counts else wanted), tuple(counts)

    def _write_ids(self, output: SchedulerOutput, ids: IntArray) -> None:
        end = 0
        for row in output.context:
            start, end = end, end + row.num_tokens
            ids[start:end] = row.request.token_ids(row.start, row.start + row.num_tokens)
        ids[end:] = [row.request.last_token_id() for row in output.generation]
