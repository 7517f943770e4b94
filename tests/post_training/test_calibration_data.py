"""Windows of token ids to calibrate and to judge with: which texts they are of, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from backend_engine.errors import ConfigError
from backend_engine.post_training.calibration_data import WindowLimits, calibration_windows, evaluation_windows
from backend_engine.text.tokenizer import Tokenizer
from tests.support.small_tokenizers import sentencepiece_like
from tests.support.table_model import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Without a begin token."""
    return Tokenizer(build_tokenizer())


def test_the_topics_are_divided_between_the_two(tokenizer: Tokenizer) -> None:
    """The topics quote each other, which must not bring a text to both sides."""
    names = sorted(topics)
    paragraphs = []
    for make, half in ((calibration_windows, 0), (evaluation_windows, 1)):
        windows = make(tokenizer, None, 10**6, 100)
        text = tokenizer.decode([i for window in windows for i in window])
        paragraphs.append({p.strip() for p in text.split("\n\n") if len(p.strip()) > 60})
        assert text.startswith(topics[names[half]][:500]) and len(text) > 120_000
        # All but the last one is a paragraph of a topic of that half.
        known = {p.strip() for name in names[half::2] for p in topics[name].split("\n\n")}
        assert len(paragraphs[half] - known) <= 1
        some = make(tokenizer, None, 12, 100)
        assert some == make(tokenizer, None, 12, 100) and [len(window) for window in some] == [100] * 12
        # From all over the text.
        places = [windows.index(window) for window in some]
        assert places == sorted(places) and places[0] == 0 and places[-1] > 0.9 * len(windows)
    assert paragraphs[0].isdisjoint(paragraphs[1])


def test_windows_begin_as_texts_do() -> None:
    tokenizer = Tokenizer(sentencepiece_like(add_bos=True))
    windows = calibration_windows(tokenizer, None, 3, 64)
    assert all(window[0] == tokenizer.bos_token_id and len(window) == 64 for window in windows)
    assert tokenizer.bos_token_id not in {i for window in windows for i in window[1:]}


def test_a_text_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """No token is lost or repeated; fewer windows where there is no more text."""
    path = tmp_path / "own.txt"
    text = "".join(f"line {i} of a text – with é\n" for i in range(5000))
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    ids = tokenizer.encode_plain(text)
    windows = calibration_windows(tokenizer, path, 10**6, 100)
    assert len(windows) == len(ids) // 100
    assert [i for window in windows for i in window] == ids[: len(windows) * 100]
    first, second = evaluation_windows(tokenizer, path, 2, 100)
    assert first == windows[0] and second in windows[8:]


def test_a_file_of_texts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"text": "Say alpha beta", "id": 7}\n\n{"text": " one two"}\n')
    ids = tokenizer.encode_plain("Say alpha beta") + tokenizer.encode_plain(" one two")
    assert calibration_windows(tokenizer, path, 5, len(ids)) == [ids]
    with pytest.raises(ConfigError) as caught:
        calibration_windows(tokenizer, path, 5, 1000)
    assert str(caught.value) == f"{path} has {len(ids)} tokens; a window needs 1000"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"good\n\xff\xfe", "line 2 is not UTF-8 text: invalid start byte at byte 0"),
        ("x.txt", b"", "has 0 tokens; a window needs 4"),
        ("x.jsonl", b'{"text": "a"}\n{"txt": 1}', "line 2 is {'txt': 1}; expected an object with a text under 'text'"),
        ("x.jsonl", b'{"text": 5}', "line 1 is {'text': 5}; expected an object with a text under 'text'"),
        ("x.jsonl", b'["a"]', "line 1 is ['a']; expected an object with a text under 'text'"),
        ("x.jsonl", b"no json", "line 1 is not valid JSON: 'no json'"),
        ("x.jsonl", b"[" * 100_000, "line 1 is not valid JSON: '[[["),
        ("x.jsonl", b'{"text": "\\ud800"}', "has half of a surrogate pair; expected Unicode text"),
        ("x.csv", b"a,b", "is no text to calibrate with; expected a file named .txt or .jsonl"),
    ],
)
def test_bad_files(tokenizer: Tokenizer, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        calibration_windows(tokenizer, path, 2, 4)
    assert str(caught.value).startswith(f"{path} {message}")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_a_file_that_is_not_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    with pytest.raises(ConfigError, match=r"x\.txt cannot be read: No such file or directory$"):
        evaluation_windows(tokenizer, path, 2, 4)
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read: it is no regular file"):
        evaluation_windows(tokenizer, path, 2, 4)


def test_limits_of_the_model(tokenizer: Tokenizer) -> None:
    highest = max(i for window in calibration_windows(tokenizer, None, 10**6, 64) for i in window)
    limits = WindowLimits(vocab_size=highest + 1, max_positions=64)
    assert len(calibration_windows(tokenizer, None, 3, 64, limits)) == 3
    with pytest.raises(ConfigError, match="is 65; the model takes texts of at most 64 tokens"):
        calibration_windows(tokenizer, None, 3, 65, limits)
    with pytest.raises(ConfigError, match=f"gives the id {highest} for the text .*vocabulary has {highest} tokens"):
        calibration_windows(tokenizer, None, 10**6, 64, WindowLimits(vocab_size=highest))
    with pytest.raises(ConfigError, match="the number of windows is 0; expected at least 1"):
        calibration_windows(tokenizer, None, 0, 64)
    with pytest.raises(ConfigError, match="the length of a window is 1; expected at least 2 tokens"):
        calibration_windows(tokenizer, None, 1, 1)


def test_only_the_beginning_of_a_long_file_is_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """What follows is not even looked at."""
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join([json.dumps({"text": "alpha beta " * 50})] * 10) + "\nno json")
    assert len(calibration_windows(tokenizer, path, 2, 20)) == 2
    with pytest.raises(ConfigError, match="line 11 is not valid JSON"):
        calibration_windows(tokenizer, path, 200, 20)


def test_texts_are_read_without_torch() -> None:
    code = "import sys, backend_engine.post_training.calibration_data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
