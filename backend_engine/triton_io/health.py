"""``EngineHealth``: makes the death of the engine visible outside its process.

The engine model starts it beside the sender. It writes the reason into the file that the launcher watches, and where
the server allows it (model control mode ``explicit``) asks Triton Server to unload the engine model, which turns it and
every ensemble over it not-ready. It never touches a request.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend_engine.errors import ShutdownError
from backend_engine.executor.iteration_stats import EngineStats
from backend_engine.logger import get_logger
from backend_engine.triton_io.error_codes import one_line

_log = get_logger(__name__)

PERIOD_S = 0.2


class EngineHealth:
    """Looks at ``stats`` every ``PERIOD_S`` and reports the first failure.

    health_file: path or empty. may_unload: whether the server lets models be unloaded; asking one that does not damages
    the memory that it shares with its models, and one of the next requests ends it (seen in Triton 24.10).
    """

    def __init__(
        self,
        pb_utils: Any,
        model_name: str,
        stats: Callable[[], EngineStats],
        health_file: str,
        *,
        may_unload: bool,
    ) -> None:
        self._pb_utils = pb_utils
        self._model_name = model_name
        self._stats = stats
        self._health_file = health_file
        self._may_unload = may_unload
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-health", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ask the thread to end. Does not wait: it may be the very unload it asked for that calls this."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                failure = self._stats().failure
            except ShutdownError:
                return
            if failure:
                self._report(one_line(failure))
                return

    def _report(self, reason: str) -> None:
        if self._health_file:
            write_health_file(Path(self._health_file), self._model_name, reason)
        if not self._may_unload:
            _log.error("model %r stays loaded though its engine is dead: unloading is not allowed", self._model_name)
            return
        try:
            self._pb_utils.unload_model(self._model_name)
        except self._pb_utils.TritonModelException as error:
            _log.error("model %r stays loaded though its engine is dead: %s", self._model_name, error)


def write_health_file(path: Path, model_name: str, reason: str) -> None:
    """Write one line, ``<model>: <reason>``, at once for whoever reads it. A disk that refuses is logged."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(f"{model_name}: {reason}\n")
        draft.replace(path)
    except OSError as error:
        _log.error("the health file %s cannot be written: %s", path, error)
