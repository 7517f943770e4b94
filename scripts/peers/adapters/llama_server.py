"""llama.cpp's server as a child of this process, one HTTP stream a request; 16 slots with continuous batching."""

import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench_common import Job

from peers.child import end_with_parent
from peers.timeline import Recorder, Timeline
from peers.workloads import LATE_AFTER, Phase

HOST = "127.0.0.1"
START_TIMEOUT_S = 120
REQUEST_TIMEOUT_S = 300
SLOTS = 16
SLOT_TOKENS = 4096


class LlamaServer:
    """The GGUF file says the weights' precision."""

    def load(self, model: str, precision: str, threads: int, max_num_tokens: int | None) -> str:
        """See ``Engine``."""
        binary = find_server()
        with socket.socket() as free:
            free.bind((HOST, 0))
            self._port = int(free.getsockname()[1])
        command = [
            binary, "-m", model, "--host", HOST, "--port", str(self._port), "-t", str(threads), "-tb", str(threads),
            "-np", str(SLOTS), "-c", str(SLOTS * SLOT_TOKENS), "--no-webui",
        ]  # fmt: skip
        if max_num_tokens is not None:
            command += ["-b", str(max_num_tokens), "-ub", str(max_num_tokens)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=end_with_parent)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{binary} did not start (exit status {self._process.poll()})")
            time.sleep(0.05)
        said = subprocess.run([binary, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return next((line.strip() for line in said.stdout.splitlines() if "version" in line), "unknown")

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def run(self, phase: Phase, recorder: Recorder) -> list[Timeline]:
        """See ``Engine``."""
        arrived = threading.Condition()
        threads = [self._send(job, recorder, arrived) for job in phase.jobs]
        if phase.late is not None:
            with arrived:
                arrived.wait_for(lambda: recorder.have(LATE_AFTER), REQUEST_TIMEOUT_S)
            threads.append(self._send(phase.late, recorder, arrived))
        for thread in threads:
            thread.join(REQUEST_TIMEOUT_S)
        return recorder.timelines

    def _send(self, job: Job, recorder: Recorder, arrived: threading.Condition) -> threading.Thread:
        timeline = recorder.sent()
        thread = threading.Thread(target=self._follow, args=(job, timeline, recorder, arrived), daemon=True)
        thread.start()
        return thread

    def _follow(self, job: Job, timeline: Timeline, recorder: Recorder, arrived: threading.Condition) -> None:
        body: dict[str, Any] = {
            "prompt": job.prompt_token_ids, "n_predict": job.num_output_tokens, "temperature": 0.0, "stream": True,
            "ignore_eos": True, "cache_prompt": True, "return_tokens": True, "samplers": ["top_k"], "top_k": 1,
        }  # fmt: skip
        connection = http.client.HTTPConnection(HOST, self._port, timeout=REQUEST_TIMEOUT_S)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: "):
                continue
            piece = json.loads(line.removeprefix(b"data: "))
            with arrived:
                timeline.add(list(piece.get("tokens") or []), recorder.now())
                arrived.notify_all()
            if piece.get("stop"):
                break
        connection.close()

    def close(self) -> None:
        """See ``Engine``."""
        self._process.terminate()
        self._process.wait(30)


def find_server() -> str:
    """The server's program in this environment. ``FileNotFoundError`` when there is none."""
    beside = Path(sys.prefix)
    found = [*beside.glob("bin/llama-server"), *beside.glob("lib/python3*/site-packages/**/llama-server")]
    path = str(found[0]) if found else shutil.which("llama-server")
    if path is None:
        raise FileNotFoundError(f"no llama-server under {beside}")
    return path


def create() -> LlamaServer:
    return LlamaServer()
