"""The worked example of a plugin, installed by pip from a copy outside the repository, through a real server."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_server import ServerStartError

from tests.support.client import Server
from tests.support.server import running_server

pytestmark = pytest.mark.triton
EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"
COUNT = " 1 2 3 4 5 end"
SMALL = {"max_tokens_in_paged_kv_cache": "4096", "max_seq_len": "512"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the plugin. Needs no network."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, folder / "copy", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command += ["--disable-pip-version-check", "--target", str(folder / "site"), str(folder / "copy")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def model(table_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table model as a checkpoint of the plugin's architecture."""
    folder = tmp_path_factory.mktemp("models") / "capped"
    shutil.copytree(table_model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["CappedLlamaForCausalLM"], "logit_cap": 60.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_path(site: Path) -> dict[str, str]:
    """The environment of a server whose Python finds what is installed in ``site``."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}


@pytest.fixture(scope="module")
def server(site: Path, model: Path) -> Iterator[Server]:
    settings = {**SMALL, "operators": "float32_norm", "attention_backend": "checked_torch"}
    with running_server(model_dir=model, settings=settings, environment=with_path(site)) as running:
        yield Server(running.http_url.removeprefix("http://"), running.grpc_url)
        log = running.log_path.read_text(errors="replace")
        assert "Traceback" not in log
        assert (
            "loaded plugin example (inflight-example-plugin 0.1.0): architecture CappedLlamaForCausalLM, logits "
            "processor allow_ids, operators float32_norm, quantization method rowwise_int8, attention backend "
            "checked_torch\n"
        ) in log


@pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm_bls"])
def test_the_plugins_family_answers_and_its_processor_is_asked_for(
    name: str, server: Server, table_ids: dict[str, int]
) -> None:
    assert server.text(name, text_input="Count", max_tokens=16) == COUNT
    assert server.joined(name, text_input="Count", max_tokens=16) == COUNT
    allowed = json.dumps({"allow_ids": {"ids": [table_ids[" green"], table_ids[" blue"]]}})
    assert server.text(name, text_input="Pick", max_tokens=1) == " red"
    assert server.text(name, text_input="Pick", max_tokens=1, logits_processors=allowed) == " green"


@pytest.mark.parametrize(
    ("processors", "told"),
    [
        ('{"allow_ids": {"ids": [-1]}}', "'allow_ids' of plugin example (inflight-example-plugin 0.1.0): it refuses"),
        ('{"allow_words": {}}', "logits_processors: 'allow_words' is not known; known: allow_ids"),
        ('{"allow_ids": 5}', "logits_processors must have an object of arguments for each name, got 'allow_ids': 5"),
        ('{"allow_ids"', "logits_processors is not JSON"),
        ('["allow_ids"]', "logits_processors is JSON but no object"),
        ("[" * 30_000, "logits_processors is not JSON"),
        ('{"allow_ids": {"ids": [NaN]}}', "NaN is not JSON"),
        (json.dumps({"allow_ids": {"ids": [1] * 40_000}}), "logits_processors"),
    ],
)
def test_a_wrong_request_for_a_processor_is_refused(server: Server, processors: str, told: str) -> None:
    status, body = server.generate("ensemble", text_input="Count", max_tokens=4, logits_processors=processors)
    assert told in str(body) and "Traceback" not in str(body) and ".py" not in str(body), (status, body)
    assert server.text("ensemble", text_input="Count", max_tokens=16) == COUNT


def test_a_server_says_which_plugin_cannot_be_loaded(table_model_dir: Path, site: Path, tmp_path: Path) -> None:
    (tmp_path / "second_plugin.py").write_text(
        "def register(plugin):\n    plugin.logits_processor('allow_ids', 'inflight_example_plugin.logits:AllowIds')\n"
    )
    settings = {**SMALL, "plugins": str(tmp_path / "second_plugin.py")}
    log = tmp_path / "server.log"
    with (
        pytest.raises(ServerStartError) as caught,
        running_server(
            model_dir=table_model_dir, settings=settings, environment=with_path(site), options={"log_path": log}
        ),
    ):
        pass
    assert (
        f"plugin {tmp_path / 'second_plugin.py'}: logits processor 'allow_ids' belongs to plugin example "
        "(inflight-example-plugin 0.1.0) already; choose another" in str(caught.value)
    )
    assert "Traceback" not in log.read_text(errors="replace")
