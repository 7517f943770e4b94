"""The engine's configuration as frozen data. No logic: ``resolve.py`` is the only place that decides values."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class KvCacheConfig:
    """The KV cache. ``max_tokens`` ``None`` = from free memory.

    tokens_per_block: tokens a block holds. max_tokens: size of the pool in tokens. free_gpu_memory_fraction:
    share of the memory left after the weights (GPU; on a CPU at most a quarter of the process's memory is taken).
    enable_block_reuse: keep finished blocks and reuse them for prompts with the same beginning.
    """

    tokens_per_block: int = 32
    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = True


@dataclass(frozen=True)
class SchedulerConfig:
    """Scheduling limits and policies.

    max_batch_size: most requests in a step. max_num_tokens: most tokens in a step. max_queue_size: most requests
    waiting, 0 = no limit. capacity_policy: who may hold memory, ``guaranteed_no_evict`` or ``max_utilization``.
    waiting_queue_policy: ``fcfs`` or ``shortest_first``. enable_chunked_context: split prompts over steps, in
    chunks that are multiples of ``chunk_unit_size`` but for the last.
    """

    max_batch_size: int = 32
    max_num_tokens: int = 512
    max_queue_size: int = 0
    capacity_policy: str = "guaranteed_no_evict"
    waiting_queue_policy: str = "fcfs"
    enable_chunked_context: bool = True
    chunk_unit_size: int = 1


@dataclass(frozen=True)
class EngineConfig:
    """Everything ``create_py_executor`` needs, with every "auto" already decided.

    model_dir: Hugging Face folder. dtype: ``float32``, ``bfloat16`` or ``float16``. device: ``cpu`` or ``cuda``.
    max_seq_len: most tokens of a request, prompt and output together. num_threads: torch's CPU threads, 0 = torch's
    own choice. debug_*: test hooks, see ``executor/fault_injection.py``.
    """

    model_dir: str
    dtype: str
    device: str
    max_seq_len: int
    kv_cache: KvCacheConfig = field(default_factory=KvCacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention_backend: str = "torch"
    num_threads: int = 0
    debug_step_delay_ms: float = 0.0
    debug_fail_on_tokens: tuple[tuple[int, ...], ...] = ()
