"""``BuildConfig``: what an engine folder is built for. Frozen data; ``builder/`` checks and fills it.

The names are those of TensorRT-LLM's ``BuildConfig`` and of its trtllm-build.
"""

from dataclasses import dataclass

PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class BuildConfig:
    """max_batch_size, max_num_tokens: most requests and tokens in a step. max_input_len: longest prompt. max_seq_len:
    most tokens of a request, prompt and output together. ``None`` for each of them = what a checkpoint would get at
    load. precision: of plain weights, a name of ``PRECISIONS``, or ``auto``: the checkpoint's own.
    tensor_parallel_size, pipeline_parallel_size: ranks that the weights are divided over. plugins: as of
    ``EngineArgs``, told to whoever loads the folder without them.
    """

    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    precision: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    plugins: tuple[str, ...] = ()
