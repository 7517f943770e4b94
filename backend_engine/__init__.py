"""Inflight's engine: ``from backend_engine import LLM, SamplingParams``.

Names are imported on first use, so that a process which only tokenizes does not pay for torch.
"""

from typing import TYPE_CHECKING, Any

from backend_engine.plugins.registry import Registry

if TYPE_CHECKING:
    from backend_engine.config.build_config import BuildConfig
    from backend_engine.config.engine_config import KvCacheConfig, SchedulerConfig
    from backend_engine.config.sampling_params import SamplingParams
    from backend_engine.llm import LLM
    from backend_engine.results import CompletionOutput, GenerationHandle, GenerationResult

__all__ = [
    "LLM", "SamplingParams", "BuildConfig", "KvCacheConfig", "SchedulerConfig",
    "GenerationResult", "GenerationHandle", "CompletionOutput",
]  # fmt: skip

__version__ = "0.1.0"

_PUBLIC: Registry[Any] = Registry(
    "public name",
    {
        "LLM": "backend_engine.llm:LLM",
        "SamplingParams": "backend_engine.config.sampling_params:SamplingParams",
        "BuildConfig": "backend_engine.config.build_config:BuildConfig",
        "KvCacheConfig": "backend_engine.config.engine_config:KvCacheConfig",
        "SchedulerConfig": "backend_engine.config.engine_config:SchedulerConfig",
        "GenerationResult": "backend_engine.results:GenerationResult",
        "GenerationHandle": "backend_engine.results:GenerationHandle",
        "CompletionOutput": "backend_engine.results:CompletionOutput",
    },
)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'backend_engine' has no attribute {name!r}")
    return _PUBLIC.get(name)
