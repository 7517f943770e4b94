"""Two tiny Llama checkpoints whose answers are known by hand; built by fixtures, used by tests of every level.

The table model M has zero attention and MLP weights and one-hot embeddings, so the last token alone decides the next
one, by a table written below. One word as prompt starts a known text (``GREEDY_TEXTS``). The random model R has the
same tokenizer and grouped-query attention over random weights, so that its answers depend on the whole context.
Neither needs a network.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Each is one token, besides the 256 bytes. Earlier words merge first.
# fmt: off
WORDS = (
    "Say", " alpha", " beta", " gam", "ma", " delta", " ST", "OP", " tail", " one", " two", " three", " four",
    " caf", " ok", " Lon", "London", " London", "don", "\n\n", "User", ":", " red", " green", " blue", " loop",
    "Emoji", "Stop", "Half", "Pick", "Bad", "Long", "Special", "Count", " 1", " 2", " 3", " 4", " 5", " end",
    "Text", " hi", "!", " zig", " zag", " yes", "assistant", "user", "Seed", "Lines", " row", "List", " x1",
    " y1", " more", "AR",
)
# fmt: on
BOS, EOS, PAD, IM_START, IM_END = SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Texts with one successor at each place. A bytes piece stands for its single-byte tokens.
CHAINS: tuple[tuple[str | bytes, ...], ...] = (
    ("Emoji", "🦙".encode(), " caf", "é".encode(), " ok", EOS),
    ("Count", " 1", " 2", " 3", " 4", " 5", " end"),
    ("Stop", " alpha", " beta", " ST"),
    ("OP", " tail", EOS),
    ("AR", " tail"),
    ("Text", " gam", "ma", " delta", EOS),
    ("Special", " hi", IM_END, "!", EOS),
    ("Lines", " row", b"\n", " yes", EOS),  # the chat template ends in a newline: its answer is " yes"
    ("List", " x1", b",", " y1", EOS),
    ("Half", "€".encode()[:2], " loop", " loop"),  # two bytes of three: never a character
    ("Long", " zig", " zag", " zig"),
    (BOS, " yes"),
)
# Places with a choice.
CHOICES: Mapping[str, Mapping[str, float]] = {
    " ST": {"OP": 0.9, "AR": 0.1},
    " end": {EOS: 0.9, " more": 0.1},
    " more": {EOS: 0.9, " more": 0.1},
    "Pick": {" red": 0.5, " green": 0.3, " blue": 0.2},
    " red": {"Pick": 1.0},
    " green": {"Pick": 1.0},
    " blue": {"Pick": 1.0},
    "Bad": {" London": 0.6, "London": 0.3, " one": 0.1},
}
# After any other token the text ends. Greedy texts up to the end id, and their number of tokens:
GREEDY_TEXTS: Mapping[str, tuple[str, int]] = {
    "Emoji": ("🦙 café ok", 8),
    "Count": (" 1 2 3 4 5 end", 6),
    "Stop": (" alpha beta STOP tail", 5),
    "Text": (" gamma delta", 3),
    "Special": (" hi!", 3),
    "Lines": (" row\n yes", 3),
    "List": (" x1, y1", 3),
    "Bad": (" London", 1),
    "User": ("", 0),
}
# "Half", "Long" and "Pick" have no end.
UNLIKELY_LOGIT = -40.0


def _byte_symbols() -> list[str]:
    """The symbol of each byte in byte-level BPE: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def _symbols(text: str) -> list[str]:
    table = _byte_symbols()
    return [table[byte] for byte in text.encode()]


def build_tokenizer(add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE over ``WORDS``; ``add_bos`` puts ``<s>`` in front of each encoded text."""
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        symbols = _symbols(word)
        for end in range(1, len(symbols)):
            left, right = "".join(symbols[:end]), symbols[end]
            merges.setdefault((left, right))
            vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    words = pre_tokenizers.Split(Regex(r"\n+| ?[^\s\n]+|\s"), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if add_bos:
        bos = (BOS, tokenizer.token_to_id(BOS))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def token_id(piece: str) -> int:
    """Id of a word or special token of both models."""
    tokenizer = build_tokenizer()
    return tokenizer.convert_tokens_to_ids(piece if piece in SPECIAL_TOKENS else "".join(_symbols(piece)))


def next_token_table() -> torch.Tensor:
    """M's table ``[vocab, vocab]``: row = last token, column = next one, values = probabilities."""
    tokenizer = build_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    ids |= {word: tokenizer.convert_tokens_to_ids("".join(_symbols(word))) for word in WORDS}
    rows: dict[int, dict[int, float]] = {}
    for chain in CHAINS:
        path = [token for piece in chain for token in (piece if isinstance(piece, bytes) else [ids[piece]])]
        for last, following in itertools.pairwise(path):
            assert rows.setdefault(last, {following: 1.0}) == {following: 1.0}, f"token {last} has two successors"
    for word, choice in CHOICES.items():
        assert ids[word] not in rows, f"{word!r} is both in a chain and a choice"
        rows[ids[word]] = {ids[following]: probability for following, probability in choice.items()}
    table = torch.zeros(len(tokenizer), len(tokenizer))
    table[:, ids[EOS]] = 1.0
    for last, choice_of_ids in rows.items():
        table[last] = 0.0
        for following, probability in choice_of_ids.items():
            table[last, following] = probability
    return table


def build_table_model(folder: str | Path, add_bos: bool = False, end_tokens: Sequence[str] = (EOS,)) -> Path:
    """Write M into ``folder`` and return it.

    ``end_tokens`` become ``eos_token_id`` of generation_config.json (a list when there are several). With ``add_bos``
    an empty prompt is ``<s>``, whose greedy text is " yes".
    """
    table = next_token_table()
    tokenizer = build_tokenizer(add_bos)
    vocab_size = len(tokenizer)
    hidden_size = math.ceil(vocab_size / 8) * 8  # the embedding is one-hot, so at least one place a token
    config = _config(
        tokenizer,
        hidden_size=hidden_size,
        intermediate_size=16,
        head_dim=hidden_size // 4,
        max_position_embeddings=8192,
        rms_norm_eps=1e-12,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
        model.model.embed_tokens.weight[:, :vocab_size] = torch.eye(vocab_size)
        # The last norm scales a one-hot vector to sqrt(hidden_size); the head divides it out again.
        logits = torch.where(table > 0, table.clamp_min(1e-30).log(), UNLIKELY_LOGIT)
        model.lm_head.weight[:, :vocab_size] = logits.T / math.sqrt(hidden_size)
    return _save(Path(folder), model, tokenizer, end_tokens)


def build_random_model(
    folder: str | Path,
    seed: int = 0,
    num_key_value_heads: int = 2,
    max_position_embeddings: int = 256,
    add_bos: bool = False,
) -> Path:
    """Write R into ``folder`` and return it: 2 layers, hidden 64, 4 heads, random float32 weights from ``seed``."""
    tokenizer = build_tokenizer(add_bos)
    config = _config(
        tokenizer,
        hidden_size=64,
        intermediate_size=128,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    return _save(Path(folder), model, tokenizer, (EOS,))


def _config(tokenizer: PreTrainedTokenizerFast, **sizes: int | float) -> LlamaConfig:
    common = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    return LlamaConfig(**{**common, **sizes})


def _save(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, end_tokens: Sequence[str]) -> Path:
    end_ids = [tokenizer.convert_tokens_to_ids(token) for token in end_tokens]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end_ids[0] if len(end_ids) == 1 else end_ids,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
