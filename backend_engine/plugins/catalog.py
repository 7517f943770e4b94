"""The registries of the package, with the built-in entries by lazy name.

Imported by whoever looks an implementation up; imports none of them.
"""

from typing import Any

from backend_engine.plugins.registry import Registry

ARCHITECTURES: Registry[Any] = Registry(
    "architecture", {"LlamaForCausalLM": "backend_engine.models.families.llama:FAMILY"}
)
ATTENTION_BACKENDS: Registry[Any] = Registry(
    "attention backend", {"torch": "backend_engine.attention.torch_attention:TorchAttention"}
)
CAPACITY_POLICIES: Registry[Any] = Registry(
    "capacity policy",
    {
        "guaranteed_no_evict": "backend_engine.scheduler.capacity_scheduler:GuaranteedNoEvict",
        "max_utilization": "backend_engine.scheduler.capacity_scheduler:MaxUtilization",
        "static_batch": "backend_engine.scheduler.capacity_scheduler:StaticBatch",
    },
)
CONTEXT_CHUNKING_POLICIES: Registry[Any] = Registry(
    "context chunking policy",
    {
        "equal_progress": "backend_engine.scheduler.context_chunking:EqualProgress",
        "first_come_first_served": "backend_engine.scheduler.context_chunking:FirstComeFirstServed",
    },
)
WAITING_QUEUES: Registry[Any] = Registry(
    "waiting queue policy",
    {
        "fcfs": "backend_engine.scheduler.waiting_queue:FcfsQueue",
        "priority": "backend_engine.scheduler.keyed_queue:priority_queue",
        "shortest_first": "backend_engine.scheduler.keyed_queue:shortest_first_queue",
    },
)
