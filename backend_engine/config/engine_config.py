"""The engine's configuration as frozen data. No logic: ``resolve.py`` is the only place that decides values."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class KvCacheConfig:
    """The KV cache.

    tokens_per_block: tokens a block holds, ``None`` = chosen. max_tokens: size of the pool in tokens, ``None`` = from
    free memory. free_gpu_memory_fraction:
    share of the memory left after the weights (GPU; on a CPU at most a quarter of the process's memory is taken).
    enable_block_reuse: keep finished blocks and reuse them for prompts with the same beginning. layout: ``paged``, or
    ``contiguous`` (one run of ``max_seq_len`` tokens a request, no reuse). max_attention_window: most recent tokens a
    layer sees, one value a layer, repeated over the layers; ``None`` = the model's own windows. dtype: format of its
    numbers, a name of ``KV_FORMATS``, or ``auto``: what the checkpoint was made for, else the model's dtype.
    """

    tokens_per_block: int | None = None
    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = True
    layout: str = "paged"
    max_attention_window: tuple[int, ...] | None = None
    dtype: str = "auto"


@dataclass(frozen=True)
class SchedulerConfig:
    """Scheduling limits and policies.

    max_batch_size: most requests in a step. max_num_tokens: most tokens in a step. max_queue_size: most requests
    waiting, 0 = no limit. capacity_policy: who may hold memory, ``guaranteed_no_evict``, ``max_utilization`` or
    ``static_batch``. waiting_queue_policy: ``priority`` (equal ones first come, first served), ``fcfs`` or
    ``shortest_first``. enable_chunked_context: split prompts over steps, in chunks that are multiples of
    ``chunk_unit_size`` but for the last. context_chunking_policy: ``first_come_first_served`` or ``equal_progress``.
    context_cost_tokens: tokens before a token of a prompt with which it takes twice as long as with none; beside
    requests that generate, chunks late in a prompt get smaller by it (``MicroBatchScheduler``). 0 = position costs
    nothing, ``None`` = chosen from the model (and nothing where there is none).
    """

    max_batch_size: int = 32
    max_num_tokens: int = 512
    max_queue_size: int = 0
    capacity_policy: str = "guaranteed_no_evict"
    waiting_queue_policy: str = "priority"
    enable_chunked_context: bool = True
    chunk_unit_size: int = 1
    context_chunking_policy: str = "first_come_first_served"
    context_cost_tokens: int | None = None


@dataclass(frozen=True)
class EngineConfig:
    """Everything ``create_py_executor`` needs, with every "auto" already decided.

    model_dir: a checkpoint in any format, or an engine folder. dtype: ``float32``, ``bfloat16`` or ``float16``.
    device: ``cpu`` or ``cuda``.
    operators: a name of the registry ``OPERATORS``. weight_only_precision: form of plain weights in memory. Of both,
    and of batch_invariant and record_layers, see ``EngineArgs``.
    model_backend: ``native`` or ``transformers``. trust_remote_code: whether code in the model's folder may run.
    max_seq_len: most tokens of a request, prompt and output together. max_input_len: longest prompt. num_threads:
    torch's CPU threads, 0 = torch's own choice. step_timeout_s: seconds after which a step that has not returned counts
    as stuck, ``None`` = chosen from the model's size. iter_stats_max_iterations: steps whose statistics are kept.
    debug_*: test hooks, see ``executor/fault_injection.py``.
    """

    model_dir: str
    dtype: str
    device: str
    max_seq_len: int
    max_input_len: int
    kv_cache: KvCacheConfig = field(default_factory=KvCacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention_backend: str = "torch"
    operators: str = "torch"
    weight_only_precision: str = "float32"
    batch_invariant: bool = False
    record_layers: bool = True
    model_backend: str = "native"
    trust_remote_code: bool = False
    num_threads: int = 0
    step_timeout_s: float | None = None
    iter_stats_max_iterations: int = 1000
    debug_step_delay_ms: float = 0.0
    debug_fail_on_tokens: tuple[tuple[int, ...], ...] = ()
    debug_hang_on_tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens_per_block(self) -> int:
        """Tokens a block of the KV cache holds."""
        assert self.kv_cache.tokens_per_block is not None, "a configuration that resolve() has not made"
        return self.kv_cache.tokens_per_block
