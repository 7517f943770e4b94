"""``Registrations``: what a plugin's ``register`` is handed, to say what it adds; nothing counts before all is checked.

Made by ``discovery.py``, once a plugin. Every method takes an object or, so that importing the plugin stays cheap, its
lazy name ``"module:attribute"``.
"""

from typing import Any, NamedTuple

from backend_engine.errors import ConfigError
from backend_engine.plugins.registry import Registry


class Targets(NamedTuple):
    """The registries that plugins add to."""

    architectures: Registry[Any]
    attention_backends: Registry[Any]
    quantization_methods: Registry[Any]
    logits_processors: Registry[Any]
    operators: Registry[Any]


class _Entry(NamedTuple):
    registry: Registry[Any]
    name: str
    value: Any


class Registrations:
    """What one plugin adds. A fault is a ``ConfigError`` of one line that begins with the plugin."""

    def __init__(self, targets: Targets, owner: str) -> None:
        self._targets = targets
        self._owner = owner
        self._entries: list[_Entry] = []

    def architecture(self, name: str, family: Any) -> None:
        """A model family (``models.family.Family``) for checkpoints whose config.json names ``name`` in
        ``architectures``.
        """
        self._add(self._targets.architectures, name, family)

    def attention_backend(self, name: str, backend: Any) -> None:
        """A subclass of ``attention.interface.AttentionBackend``; the parameter ``attention_backend`` chooses it, or
        ``auto`` when its ``preference`` is the highest.
        """
        self._add(self._targets.attention_backends, name, backend)

    def quantization_method(self, name: str, read: Any) -> None:
        """A function ``(HfConfig, StoredTensors) -> Quantization`` (``quantization.weight_format``) for checkpoints
        whose quantization config names ``name`` as ``quant_method``.
        """
        self._add(self._targets.quantization_methods, name, read)

    def logits_processor(self, name: str, processor: Any) -> None:
        """A subclass of ``decoder.custom_processors.CustomLogitsProcessor``, which requests ask for by name."""
        self._add(self._targets.logits_processors, name, processor)

    def operators(self, name: str, ops: Any) -> None:
        """A subclass of ``ops.torch_ops.TorchOps``, made without arguments; the parameter ``operators`` chooses it."""
        self._add(self._targets.operators, name, ops)

    def _add(self, registry: Registry[Any], name: str, value: Any) -> None:
        if not isinstance(name, str) or not name or name != name.strip():
            raise ConfigError(
                f"{self._owner}: {registry.kind} {name!r} has no proper name; it must be a string without blanks around"
            )
        if any(entry.registry is registry and entry.name == name for entry in self._entries):
            raise ConfigError(f"{self._owner}: {registry.kind} {name!r} is registered twice by it")
        self._entries.append(_Entry(registry, name, value))

    def commit(self) -> tuple[str, ...]:
        """Check every entry, importing lazy ones, then add them all, or raise and add none. Returns what was added,
        each in words.
        """
        for registry, name, _ in self._entries:
            registry.check_free(name, self._owner)
        checked = [
            _Entry(registry, name, registry.checked(name, value, self._owner))
            for registry, name, value in self._entries
        ]
        for registry, name, value in checked:
            registry.add(name, value, self._owner)
        return tuple(f"{registry.kind} {name}" for registry, name, _ in checked)
