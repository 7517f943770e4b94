"""The template filler as existing fill lines call it: grammar, strictness, forced defaults, command line."""

import subprocess
import sys
from pathlib import Path

import pytest
from fill_template import command_line, main, split

SCRIPT = Path(__file__).parents[2] / "scripts" / "fill_template.py"
TEMPLATE = """name: "m"
max_batch_size: ${triton_max_batch_size}
queue: ${max_queue_size} delay: ${max_queue_delay_microseconds}
value: "${tokenizer_dir}" and "${encoder_engine_dir}" $$ $plain
"""


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "config.pbtxt"
    path.write_text(TEMPLATE)
    return path


@pytest.mark.parametrize(
    ("text", "delimiter", "parts"),
    [
        ("", ",", [""]),
        ("a", ",", ["a"]),
        ("a,b,c", ",", ["a", "b", "c"]),
        (",a,", ",", ["", "a", ""]),
        (r"a\,b,c", ",", ["a,b", "c"]),
        (r"a\\,b", ",", ["a\\", "b"]),
        (r"a\\:b", ",", [r"a\:b"]),
        (r"a\:b", ":", ["a:b"]),
        (r"\a", ":", ["a"]),
        ("a\\", ":", ["a"]),
    ],
)
def test_split_honours_backslashes(text: str, delimiter: str, parts: list[str]) -> None:
    assert split(text, delimiter) == parts


def test_fills_what_is_named_and_always_the_queue(template: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(str(template), "triton_max_batch_size:4,tokenizer_dir:/models/x", False)
    printed = capsys.readouterr().out
    assert "max_batch_size: 4\nqueue: 0 delay: 0\n" in printed
    assert 'value: "/models/x" and "${encoder_engine_dir}" $ $plain' in printed
    assert template.read_text() == TEMPLATE


def test_in_place_writes_the_file_back(template: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(file_path=str(template), substitutions="max_queue_size:7,tokenizer_dir:,plain:p", in_place=True)
    assert capsys.readouterr().out == ""
    assert template.read_text() == (
        'name: "m"\nmax_batch_size: ${triton_max_batch_size}\nqueue: 7 delay: 0\n'
        'value: "" and "${encoder_engine_dir}" $ p\n'
    )


def test_protected_commas_and_colons_reach_the_value(template: Path) -> None:
    main(str(template), r"tokenizer_dir:http\\://host\\:80/a\,b", True)
    assert '"http://host:80/a,b"' in template.read_text()


def test_a_key_counts_as_known_when_it_is_part_of_another(template: Path) -> None:
    main(str(template), "engine_dir:/e", True)
    assert '"${encoder_engine_dir}"' in template.read_text()


def test_an_unknown_key_is_an_assertion_error(template: Path) -> None:
    with pytest.raises(AssertionError, match="key 'tokenizer_type' does not exist in the file"):
        main(str(template), "tokenizer_type:llama", True)
    assert template.read_text() == TEMPLATE


@pytest.mark.parametrize("substitutions", ["", "tokenizer_dir", "tokenizer_dir:a:b", "max_queue_size:1,"])
def test_an_item_without_exactly_one_colon_is_a_value_error(template: Path, substitutions: str) -> None:
    with pytest.raises(ValueError, match="unpack"):
        main(str(template), substitutions, True)
    assert template.read_text() == TEMPLATE


def test_command_line_as_fill_lines_use_it(template: Path) -> None:
    # -S: the established mode must run where only the standard library is installed.
    command = [sys.executable, "-S", str(SCRIPT), "-i", str(template), "triton_max_batch_size:64,plain:q"]
    subprocess.run(command, check=True, timeout=60)
    assert "max_batch_size: 64" in template.read_text()


@pytest.mark.parametrize(
    "arguments", [[], ["FILE"], ["FILE", "a:b", "--set", "a:b"], ["FILE", "a:b", "--repository", "OUT"]]
)
def test_command_line_refuses_half_a_call(template: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        command_line([str(template) if item == "FILE" else item for item in arguments])
    assert exit_info.value.code == 2


def test_set_fills_one_file_as_it_is(template: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line([str(template), "--set", r"tokenizer_dir:/a b:c,d=1\x", "--set", "plain:5"]) == 0
    printed = capsys.readouterr().out
    assert 'value: "/a b:c,d=1\\\\x" and "" $ 5' in printed
    assert "max_batch_size: 8" in printed
    assert template.read_text() == TEMPLATE


def test_set_refuses_unknown_keys_and_names_the_nearest(template: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line([str(template), "--set", "tokeniser_dir:/a", "--set", "plain:5"]) == 1
    assert capsys.readouterr().err == "error: unknown setting 'tokeniser_dir'; did you mean tokenizer_dir?\n"


def test_set_refuses_what_has_no_value(template: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line([str(template), "--set", "max_queue_size:1"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "no value for tokenizer_dir; give --set tokenizer_dir:VALUE or --model-dir FOLDER" in lines[0]
    assert "no value for plain; give --set plain:VALUE" in lines[1]
