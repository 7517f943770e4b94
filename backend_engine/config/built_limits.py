"""``within_built``: the limits of a run of an engine folder: those that it was built for, or smaller ones.

Called by ``resolve.py``, for models that come from an engine folder. Nothing in the folder depends on the limits; they
are what whoever built it planned with, so going beyond them is refused rather than left to be noticed later.
"""

import dataclasses

from backend_engine.config.build_config import BuildConfig
from backend_engine.config.engine_args import EngineArgs
from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.errors import ConfigError

_LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")


def within_built(args: EngineArgs, built: BuildConfig, reasons: list[str]) -> EngineArgs:
    """``args`` with the built limits where they set none. Raises ``ConfigError`` for a larger one."""
    chosen = {}
    for name in _LIMITS:
        most, asked = getattr(built, name), _asked(args, name)
        if most is None:
            continue
        if asked is None:
            chosen[name] = most
            reasons.append(f"{name} {most}: what the engine folder was built for")
        elif asked > most:
            raise ConfigError(
                f"{name} {asked} is more than the engine folder {args.model} was built for; use {most} or less, or "
                "build it again"
            )
    if "max_input_len" in chosen and args.max_seq_len is not None:
        # A shorter text has a shorter prompt.
        chosen["max_input_len"] = min(chosen["max_input_len"], args.max_seq_len - 1)
    return dataclasses.replace(args, **chosen)


def _asked(args: EngineArgs, name: str) -> int | None:
    """What the caller says; some limits may stand in the scheduler's configuration as well."""
    value: int | None = getattr(args, name)
    usual = getattr(SchedulerConfig(), name, None)
    if value is None and args.scheduler_config is not None and usual is not None:
        in_scheduler: int = getattr(args.scheduler_config, name)
        return None if in_scheduler == usual else in_scheduler
    return value
