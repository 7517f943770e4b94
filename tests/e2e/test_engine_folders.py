"""Engine folders behind a real server: exact texts, limits of the build, packed weights, damage, and code that stays
where it is.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_server import ServerStartError

from backend_engine import LLM, BuildConfig, KvCacheConfig, SamplingParams
from backend_engine.builder.engine_builder import build_engine
from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.config.engine_files import entry_of
from backend_engine.config.engine_manifest import ENGINE_FILE, manifest_text, read_manifest
from backend_engine.post_training.quantize_model import quantize_checkpoint
from backend_engine.post_training.recipes import recipe_of
from tests.e2e.conftest import ProductServer, serving
from tests.e2e.test_lifecycle import MODELS
from tests.e2e.test_text import ENTRY, all_ways
from tests.support.client import Server, at_once
from tests.support.server import running_server
from tests.support.table_model import GREEDY_TEXTS

pytestmark = pytest.mark.triton
WEIGHTS = "rank0-00001.safetensors"
MAX_INPUT_LEN = 40
OWN_CODE = """
from pathlib import Path
Path({mark!r}).touch()
class Own: pass
"""


@pytest.fixture(scope="module")
def table_engine(table_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table model as an engine folder of two ranks, with a limit of its own."""
    folder = tmp_path_factory.mktemp("engines") / "table"
    build_engine(table_model_dir, folder, BuildConfig(max_input_len=MAX_INPUT_LEN, pipeline_parallel_size=2))
    return folder


@pytest.fixture(scope="module")
def table_engine_server(table_engine: Path) -> Iterator[ProductServer]:
    with serving(table_engine) as server:
        yield server


@contextlib.contextmanager
def flipped_byte(path: Path) -> Iterator[None]:
    """The last byte of the file is another one for a while."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        yield
    finally:
        path.write_bytes(whole)


def fine(server: Server) -> None:
    """The server answers as ever."""
    for model in ENTRY:
        assert server.text(model, text_input="Count", max_tokens=3) == " 1 2 3"


@pytest.mark.parametrize("model", ENTRY)
def test_the_texts_are_those_of_the_checkpoint(table_engine_server: ProductServer, model: str) -> None:
    for word, (text, _) in GREEDY_TEXTS.items():
        assert all_ways(table_engine_server, model, text_input=word, max_tokens=16) == {text}, word
    chat = '[{"role": "user", "content": "Lines"}]'
    assert all_ways(table_engine_server, model, text_input="", messages=chat, max_tokens=4) == {" yes"}
    assert "the weights of 2 ranks are put together for one device" in table_engine_server.log()


@pytest.mark.parametrize("model", ENTRY)
def test_a_prompt_longer_than_the_build_allows_is_refused(table_engine_server: ProductServer, model: str) -> None:
    longest, longer = "Count" * MAX_INPUT_LEN, "Count" * (MAX_INPUT_LEN + 1)
    told = f"Prompt length ({MAX_INPUT_LEN + 1}) exceeds maximum input length ({MAX_INPUT_LEN})"

    def refused() -> None:
        status, body = table_engine_server.generate(model, text_input=longer, max_tokens=3)
        assert status == 400 and told in body["error"], (status, body)
        assert told in next(iter(table_engine_server.events(model, text_input=longer, max_tokens=3)))["error"]

    def kept() -> str:
        return table_engine_server.joined(model, text_input="Long", max_tokens=40)

    assert at_once([kept, refused, kept])[::2] == [" zig zag" * 20] * 2
    assert all_ways(table_engine_server, model, text_input=longest, max_tokens=3) == {" 1 2 3"}


def test_a_flipped_byte_is_refused_by_a_server_that_goes_on(
    table_engine_server: ProductServer, table_engine: Path
) -> None:
    for model in MODELS:
        table_engine_server.unload(model)
    with flipped_byte(table_engine / WEIGHTS):
        before = len(table_engine_server.log())
        status, body = table_engine_server.control("tensorrt_llm", "load")
        told = f"{table_engine / WEIGHTS} was changed or damaged: sha256 "
        assert status == 400 and told in str(body), (status, body)
        assert any(told in line for line in table_engine_server.log()[before:].splitlines())
        assert table_engine_server.states()["tensorrt_llm"] != "READY" and not table_engine_server.stub_pids()
    for model in reversed(MODELS):
        table_engine_server.load(model)
    fine(table_engine_server)


def test_a_flipped_byte_ends_the_start_of_the_server_with_a_line(table_engine: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with (
        flipped_byte(table_engine / WEIGHTS),
        pytest.raises(ServerStartError) as caught,
        running_server(model_dir=table_engine, options={"log_path": log}),
    ):
        pass
    assert f"{table_engine / WEIGHTS} was changed or damaged" in str(caught.value) and "\n" not in str(caught.value)
    assert "Traceback" not in log.read_text(errors="replace")


@pytest.fixture(scope="module")
def packed_folder(random_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model with 8-bit weights, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("packed") / "int8"
    quantize_checkpoint(open_checkpoint(random_model_dir), folder, recipe_of("int8_wo"), [])
    return folder


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is there once code of the folder ran."""
    return tmp_path_factory.mktemp("mark") / "ran"


@pytest.fixture(scope="module")
def packed_server(packed_folder: Path, mark: Path) -> Iterator[ProductServer]:
    """Its engine folder, to which somebody who knows how checksums are made has added code. The code is trusted."""
    engine = packed_folder.parent / "engine"
    build_engine(packed_folder, engine)
    (engine / "own.py").write_text(OWN_CODE.format(mark=str(mark)))
    calls = {
        "config.json": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
        "tokenizer_config.json": {"AutoTokenizer": [None, "own.Own"]},
    }
    for name, auto_map in calls.items():
        values = json.loads((engine / name).read_text())
        (engine / name).write_text(json.dumps({**values, "auto_map": auto_map}))
    files = {path.name: entry_of(path) for path in engine.iterdir() if path.name != ENGINE_FILE}
    manifest = dataclasses.replace(read_manifest(engine), files=files)
    (engine / ENGINE_FILE).write_text(manifest_text(manifest))
    with serving(engine, trust_remote_code="true") as server:
        yield server


def test_packed_weights_answer_as_their_checkpoint_and_no_code_runs(
    packed_server: ProductServer, packed_folder: Path, mark: Path
) -> None:
    params = SamplingParams(max_tokens=12)
    with LLM(str(packed_folder), kv_cache_config=KvCacheConfig(max_tokens=4096)) as llm:
        expected = {word: llm.generate(word, params).outputs[0].text for word in ("Say alpha beta", "Count 1")}
    assert len(set(expected.values())) == 2 and all(expected.values())
    for model in ENTRY:
        for word, text in expected.items():
            assert all_ways(packed_server, model, text_input=word, max_tokens=12) == {text}
    assert "trust_remote_code is ignored" in packed_server.log()
    assert not mark.exists()
