"""A worked example of a plugin: one of each kind of thing that a plugin can add.

Copy it, keep what you need and rename the rest. Names must be unlike those of Inflight and of other plugins.
"""

from typing import Any


def register(plugin: Any) -> None:
    """Called once, when an engine starts, with a ``backend_engine.plugins.registrations.Registrations``.

    Each line names what is added and where it lies. The objects themselves may stand there too; a lazy name keeps
    importing this package cheap. If anything here is wrong, the engine says so and registers nothing of the plugin.
    """
    plugin.architecture("CappedLlamaForCausalLM", "inflight_example_plugin.family:FAMILY")
    plugin.logits_processor("allow_ids", "inflight_example_plugin.logits:AllowIds")
    plugin.operators("float32_norm", "inflight_example_plugin.operators:Float32NormOps")
    plugin.quantization_method("rowwise_int8", "inflight_example_plugin.quantization:read")
    plugin.attention_backend("checked_torch", "inflight_example_plugin.attention:CheckedTorchAttention")
