"""``EngineArgs``: what a caller of ``LLM`` may say, with ``None`` or ``auto`` for what it leaves to us.

``resolve.py`` turns it into an ``EngineConfig``. No logic here but the check of names.
"""

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from backend_engine.config.engine_config import KvCacheConfig, SchedulerConfig
from backend_engine.errors import ConfigError


@dataclass(frozen=True)
class EngineArgs:
    """Arguments of ``LLM``.

    model: a checkpoint in any format, or an engine folder. tokenizer: folder, ``None`` = the model's own.
    dtype: ``auto`` (float32 on a CPU, the checkpoint's on a GPU), ``float32``, ``bfloat16``, ``float16``.
    device: ``auto``, ``cpu``, ``cuda``.
    max_batch_size, max_num_tokens, context_cost_tokens: override the scheduler's. max_seq_len: ``None`` = the model's
    positions.
    max_input_len: longest prompt, ``None`` = all but one token of max_seq_len.
    model_backend: ``native`` (our layers), ``transformers`` (its modules over our cache), ``auto`` (native where we
    have the architecture). trust_remote_code: whether code in the folder may run.
    generation_config: whether requests that leave temperature, top_k, top_p, min_p, repetition_penalty or max_tokens
    unset take those of the model's generation_config.json (``model``) or not (``ignore``).
    operators: what layers compute with: ``native`` (C, compiled on this machine), ``torch``, a plugin's by its name,
    ``auto`` (native on a CPU). weight_only_precision: the form in which plain weights stay in a CPU's memory: ``auto``
    (that of dtype), ``float16``, ``bfloat16``, ``int16`` (a scale for 64 numbers of a row), ``int8`` (one for each
    row), ``w8a8`` (as int8, and tokens have 7 bits). Floats are computed with in float32, integers in integers.
    batch_invariant: whether logits must have the same bits whatever is computed beside them; ``None`` = where it can be
    had, true refuses to start where it cannot.
    record_layers: whether the layers' operations are recorded at start and run as one call, on a CPU with native
    operators.
    plugins: modules, .py files and package folders with plugins, besides those of installed packages, which ``none``
    leaves out; empty = those of the environment variable ENGINE_PLUGINS.
    skip_tokenizer_init: work on token ids alone. num_threads: CPU threads for torch, 0 = one per usable core.
    step_timeout_s: a step that takes longer counts as stuck, ``None`` = chosen. iter_stats_max_iterations: steps kept
    for ``get_stats``. debug_*: test hooks (``executor/fault_injection.py``).
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    context_cost_tokens: int | None = None
    max_seq_len: int | None = None
    max_input_len: int | None = None
    kv_cache_config: KvCacheConfig | None = None
    scheduler_config: SchedulerConfig | None = None
    attention_backend: str = "auto"
    operators: str = "auto"
    weight_only_precision: str = "auto"
    batch_invariant: bool | None = None
    record_layers: bool = True
    plugins: tuple[str, ...] = ()
    model_backend: str = "auto"
    generation_config: str = "ignore"
    num_threads: int = 0
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    step_timeout_s: float | None = None
    iter_stats_max_iterations: int = 1000
    debug_step_delay_ms: float = 0.0
    debug_fail_on_tokens: tuple[tuple[int, ...], ...] = ()
    debug_hang_on_tokens: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, model: str, tokenizer: str | None, kwargs: dict[str, Any]) -> "EngineArgs":
        """Build from keyword arguments; an unknown one is a ``ConfigError`` that names the nearest."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
                raise ConfigError(f"LLM() has no argument {name!r}{hint}")
        return cls(model=str(model), tokenizer=None if tokenizer is None else str(tokenizer), **kwargs)
