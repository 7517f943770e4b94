"""What is read out of a growing Triton Server log: states of models, and the one line that says what went wrong."""

from pathlib import Path

import pytest
from server_log import ModelEvent, ServerLog

NOISE = (
    "Error: Failed to initialize NVML\n"
    'E1129 14:53:44.038770 6767 server.cc:241] "CudaDriverHelper has not been initialized."\n'
    'W1129 14:53:44.777494 6767 metrics.cc:798] "DCGM unable to start: DCGM initialization error"\n'
)
LOADING = 'I1129 14:53:44.041464 6767 model_lifecycle.cc:472] "loading: tensorrt_llm:1"\n'
LOADED = "I1129 14:53:44.566222 6767 model_lifecycle.cc:839] \"successfully loaded 'tensorrt_llm'\"\n"
FAILED = (
    "E1129 14:53:44.775826 6767 model_lifecycle.cc:642] \"failed to load 'bad' version 1: Internal: RuntimeError: "
    'no tokenizer\\n\\nAt:\\n  /x/model.py(4): initialize\\n"\n'
)


def test_events_come_once_and_in_order_while_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = ServerLog(path)
    assert log.poll() == []
    path.write_text(NOISE + LOADING + LOADED[:30])
    assert log.poll() == [ModelEvent("tensorrt_llm", "loading")]
    with path.open("a") as file:
        file.write(LOADED[30:])
    assert log.poll() == [ModelEvent("tensorrt_llm", "loaded")]
    assert log.poll() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the server wrote no log"),
        (NOISE + FAILED, "model 'bad' failed to load: RuntimeError: no tokenizer"),
        (
            FAILED
            + "/b/python/triton_python_backend_stub: error while loading shared libraries: libpython3.11.so.1.0: "
            "cannot open shared object file: No such file or directory\n",
            "/b/python/triton_python_backend_stub: error while loading shared libraries: libpython3.11.so.1.0: "
            "cannot open shared object file: No such file or directory",
        ),
        (
            NOISE + "error: creating server: Internal - failed to load all models\n",
            "Internal - failed to load all models",
        ),
        (
            NOISE + 'E1129 14:53:44.0 67 main.cc:1] "failed to start HTTP service"\nlast\n',
            "failed to start HTTP service",
        ),
        (NOISE + "terminate called\n", "terminate called"),
        (
            "E1129 1:2:3.4 67 model_repository_manager.cc:1460] \"Poll failed for model directory 'm': bad name\"\n",
            "model folder 'm': bad name",
        ),
    ],
)
def test_the_relevant_line_is_found(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    log = ServerLog(path)
    log.poll()
    assert log.relevant_error() == expected
