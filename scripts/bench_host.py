#!/usr/bin/env python3
"""Host time of a step: everything but the model, with a fake model engine and many running requests.

Prints a table over the number of running requests, the effect of a long queue, and, last, one JSON line.
The work counted is admit, schedule, prepare, block tables, apply, settle and emit, in plain Python.
"""

import argparse
import time
from typing import Any

import bench_common as common
import numpy as np


class ConstantModel:
    """Answers every row with token 7 at no cost."""

    def forward(self, output: Any, block_tables: np.ndarray) -> list[int]:
        return [7] * len(output.logits_rows)


class PassThrough:
    """A decoder that takes the tokens as they come."""

    def decode_async(self, logits: list[int], output: Any) -> "PassThrough":
        from backend_engine.core.outputs import DecoderOutput

        self._decoded = DecoderOutput(logits)
        return self

    def wait(self) -> Any:
        return self._decoded

    def remove(self, request_id: int) -> None:
        pass


def host_ms(num_running: int, num_queued: int, num_steps: int) -> float:
    """Median milliseconds of a generation-only step."""
    from backend_engine.config.engine_config import SchedulerConfig
    from backend_engine.config.sampling_params import SamplingParams
    from backend_engine.core.request import LlmRequest, StopConditions
    from backend_engine.executor.py_executor import PyExecutor
    from backend_engine.executor.rooms import Rooms
    from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
    from backend_engine.scheduler.request_scheduler import RequestScheduler

    config = SchedulerConfig(max_batch_size=num_running, max_num_tokens=max(num_running * 16, 512))
    kv_cache = KVCacheManager(num_running * 40, 32, 64, num_running, True)
    decoder = PassThrough()
    rooms = Rooms(RequestScheduler(config), kv_cache, ConstantModel(), decoder)
    executor = PyExecutor(rooms, max_batch_size=num_running)
    params = SamplingParams(max_tokens=1000)
    for request_id in range(num_running + num_queued):
        prompt = [request_id % 5000, *range(15)]
        executor.enqueue([LlmRequest(request_id, prompt, params, StopConditions(1000), lambda output: None)])
    while executor.stats().num_waiting > num_queued or executor.stats().num_context:
        executor.step()
    taken = []
    for _ in range(num_steps):
        start = time.perf_counter()
        executor.step()
        taken.append((time.perf_counter() - start) * 1e3)
    return common.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    rows, result = [], {}
    for num_running in (1, 16, 64, 128, 256, 512):
        alone = host_ms(num_running, 0, args.steps)
        queued = host_ms(num_running, 10_000, args.steps)
        rows.append([str(num_running), f"{alone:.3f}", f"{queued:.3f}", f"{alone / num_running * 1e3:.2f}"])
        result = {"host_ms_512": round(alone, 3), "host_ms_512_with_10000_queued": round(queued, 3)}
        common.progress(f"{num_running} running: {alone:.3f} ms, with 10,000 queued {queued:.3f} ms")
    common.print_table(["running", "ms a step", "with 10,000 queued", "us a request"], rows)
    common.print_json(result)


if __name__ == "__main__":
    main()
