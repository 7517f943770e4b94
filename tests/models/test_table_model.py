"""The table model answers, through transformers, as the tests that use it believe."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.table_model import (
    EOS,
    GREEDY_TEXTS,
    IM_END,
    build_random_model,
    build_table_model,
    next_token_table,
    token_id,
)


def greedy_ids(folder: Path, prompt: str, max_tokens: int = 16) -> list[int]:
    """New ids, the end id cut off; the model's own generation settings."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [token for token in output[0, ids.shape[1] :].tolist() if token not in ends]


def decode(folder: Path, ids: list[int]) -> str:
    return AutoTokenizer.from_pretrained(folder).decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("word", GREEDY_TEXTS)
def test_greedy_text(table_model_dir: Path, word: str) -> None:
    ids = greedy_ids(table_model_dir, word)
    assert (decode(table_model_dir, ids), len(ids)) == GREEDY_TEXTS[word]


@pytest.mark.parametrize(
    ("word", "text"),
    [("Half", "\ufffd loop loop loop"), ("Long", " zig zag zig zag zig"), ("Pick", " redPick redPick red")],
)
def test_endless_texts(table_model_dir: Path, word: str, text: str) -> None:
    assert decode(table_model_dir, greedy_ids(table_model_dir, word, 5)) == text


def test_probabilities_are_the_table(table_model_dir: Path) -> None:
    table = next_token_table()
    assert torch.allclose(table.sum(1), torch.ones(len(table)))
    model = AutoModelForCausalLM.from_pretrained(table_model_dir)
    assert model.config.vocab_size == len(table)
    with torch.inference_mode():
        logits = model(torch.arange(len(table))[:, None]).logits[:, 0]
    assert torch.allclose(torch.softmax(logits, -1), table, atol=1e-6)
    pick = torch.log_softmax(logits[token_id("Pick")], -1)
    assert pick[token_id(" red")].item() == pytest.approx(-0.693147, abs=1e-5)


def test_words_split_as_the_stop_word_tests_need(table_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(table_model_dir)
    assert tokenizer("STOP").input_ids == [ord("S"), ord("T"), token_id("OP")]
    assert tokenizer(" STOP").input_ids == [token_id(" ST"), token_id("OP")]
    assert tokenizer(" London").input_ids == [token_id(" London")]
    assert tokenizer("London").input_ids == [token_id("London")]


def test_chat_template_leads_to_yes(table_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(table_model_dir)
    messages = [{"role": "user", "content": "Say"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nSay<|im_end|>\n<|im_start|>assistant\n"
    assert decode(table_model_dir, greedy_ids(table_model_dir, text)) == " yes"


def test_two_end_tokens(tmp_path: Path) -> None:
    folder = build_table_model(tmp_path, end_tokens=(EOS, IM_END))
    assert decode(folder, greedy_ids(folder, "Special")) == " hi"


def test_begin_token_variant(tmp_path: Path) -> None:
    folder = build_table_model(tmp_path, add_bos=True)
    assert AutoTokenizer.from_pretrained(folder)("Count").input_ids == [token_id("<s>"), token_id("Count")]
    assert decode(folder, greedy_ids(folder, "")) == " yes"
    assert decode(folder, greedy_ids(folder, "Count")) == " 1 2 3 4 5 end"


def test_random_model_is_the_same_each_time_and_looks_at_its_context(random_model_dir: Path, tmp_path: Path) -> None:
    again = build_random_model(tmp_path)
    assert (again / "model.safetensors").read_bytes() == (random_model_dir / "model.safetensors").read_bytes()
    config = json.loads((random_model_dir / "config.json").read_text())
    assert (config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]) == (64, 4, 2)
    assert config["max_position_embeddings"] == 256
    prompts = (" alpha one two", " beta one two", " alpha two one two")
    answers = {tuple(greedy_ids(random_model_dir, prompt, 8)) for prompt in prompts}
    assert len(answers) == len(prompts)
