"""A checkpoint that cannot be served ends the start of the server with one line that names the fault."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from triton_server import ServerStartError

from tests.support.server import running_server

pytestmark = pytest.mark.triton


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def rename_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLLM"]}))


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def contradict_weights(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 24}))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (truncate_weights, "model.safetensors"),
        (rename_architecture, "LlamaForCausalLLM"),
        (remove_tokenizer, "tokenizer"),
        (contradict_weights, "mlp"),
    ],
)
def test_the_start_fails_and_says_why(
    table_model_dir: Path, tmp_path: Path, spoil: Callable[[Path], None], named: str
) -> None:
    folder, log = tmp_path / "model", tmp_path / "server.log"
    shutil.copytree(table_model_dir, folder)
    spoil(folder)
    with pytest.raises(ServerStartError) as caught, running_server(model_dir=folder, options={"log_path": log}):
        pass
    assert named in str(caught.value) and "\n" not in str(caught.value)
    assert "Traceback" not in log.read_text(errors="replace")
