"""Plugins: finds them, loads each once a process, checks what they register and logs it. Called by ``LLM``, before
anything is looked up in a registry.

A plugin is a function ``register(plugin: Registrations)``. It is found by the entry points of installed packages, or
under the name of a module or the path of a file that the operator gives. Looks into no model's folder.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from backend_engine import envs
from backend_engine.errors import ConfigError
from backend_engine.logger import get_logger
from backend_engine.plugins.catalog import PLUGIN_TARGETS
from backend_engine.plugins.foreign_code import call_foreign
from backend_engine.plugins.registrations import Registrations, Targets

_log = get_logger(__name__)

ENTRY_POINTS = "inflight.plugins"
NO_INSTALLED = "none"
_FUNCTION = "register"


class Plugin(NamedTuple):
    """A loaded plugin: what messages call it, and what it added, each in words."""

    owner: str
    registered: tuple[str, ...]


class PluginLoader:
    """Loads plugins into ``targets``. May be called from several threads."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._loaded: dict[Callable[[Registrations], Any], Plugin] = {}
        self._lock = threading.Lock()

    def load(self, named: str | Sequence[str] = ()) -> list[Plugin]:
        """Load the plugins of installed packages, then the ``named`` ones: modules, .py files and package folders.

        ``none`` among the names leaves the installed ones out; without names, ENGINE_PLUGINS has them. A plugin that
        is loaded already stays and is not called again. Raises ``ConfigError``, in one line that begins with the
        plugin, for the first with a fault: nothing of it is registered then.
        """
        names = plugin_names(named) or plugin_names(envs.ENGINE_PLUGINS.get())
        installed = [] if NO_INSTALLED in names else sorted(entry_points(group=ENTRY_POINTS), key=lambda e: e.name)
        with self._lock:
            plugins = [self._load_installed(entry) for entry in installed]
            return plugins + [self._load_named(name) for name in names if name != NO_INSTALLED]

    def _load_installed(self, entry: EntryPoint) -> Plugin:
        package = "" if entry.dist is None else f" ({entry.dist.name} {entry.dist.version})"
        owner = f"plugin {entry.name}{package}"
        found = call_foreign(owner, "cannot be imported", entry.load)
        return self._register(owner, getattr(found, _FUNCTION, None) if isinstance(found, ModuleType) else found)

    def _load_named(self, name: str) -> Plugin:
        owner = f"plugin {name}"
        is_path = "/" in name or name.endswith(".py")
        module = call_foreign(
            owner, "cannot be imported", lambda: _import_path(owner, name) if is_path else importlib.import_module(name)
        )
        version = getattr(module, "__version__", None)
        owner = f"{owner} {version}" if isinstance(version, str) else owner
        return self._register(owner, getattr(module, _FUNCTION, None))

    def _register(self, owner: str, register: Any) -> Plugin:
        if not callable(register):
            raise ConfigError(f"{owner}: it has no function {_FUNCTION}(plugin)")
        if register in self._loaded:
            return self._loaded[register]
        registrations = Registrations(self._targets, owner)
        call_foreign(owner, f"its {_FUNCTION} failed", lambda: register(registrations))
        plugin = Plugin(owner, registrations.commit())
        self._loaded[register] = plugin
        _log.info("loaded %s: %s", owner, ", ".join(plugin.registered) or "it registers nothing")
        return plugin


def plugin_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """The names in a parameter, which are separated by commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip())


def _import_path(owner: str, name_of_path: str) -> ModuleType:
    """The module in a .py file, or the package in a folder, under its own name."""
    path = Path(name_of_path).expanduser().resolve()
    file = path / "__init__.py" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(f"{owner}: there is no such file or folder")
    if not file.is_file() or file.suffix != ".py":
        raise ConfigError(f"{owner}: it is neither a .py file nor the folder of a package, which has an __init__.py")
    name = path.stem
    if not name.isidentifier():
        raise ConfigError(f"{owner}: {name!r} cannot be the name of a module; use letters, digits and _")
    there = sys.modules.get(name)
    if there is not None and _is_of(getattr(there, "__file__", None), file):
        return there
    known = None if there is not None else importlib.util.find_spec(name)
    if there is not None or (known is not None and not _is_of(known.origin, file)):
        raise ConfigError(f"{owner}: there is another module called {name!r}; rename the plugin's")
    return _execute(name, file, [str(path)] if path.is_dir() else None)


def _is_of(origin: str | None, file: Path) -> bool:
    return origin is not None and Path(origin).resolve() == file


def _execute(name: str, file: Path, places: list[str] | None) -> ModuleType:
    """Run a module's file; when it fails, neither it nor what it imported of its own stays."""
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=places)
    assert spec is not None and spec.loader is not None, (name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    is_run = False
    try:
        spec.loader.exec_module(module)
        is_run = True
    finally:
        for other in [] if is_run else list(sys.modules):
            if other == name or other.startswith(name + "."):
                del sys.modules[other]
    return module


PLUGINS = PluginLoader(PLUGIN_TARGETS)


def load_plugins(named: str | Sequence[str] = ()) -> list[Plugin]:
    """``PluginLoader.load`` into the package's own registries."""
    return PLUGINS.load(named)
