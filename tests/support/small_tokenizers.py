"""Small tokenizers of the kinds that models use, built with the ``tokenizers`` library; no files, no network."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
WORDS = ("▁Hello", "▁big", "▁world", "▁the", "▁n't", "▁'", "▁.", "ing", "▁▁", "n't", "'s", "▁'s", "Hello")
# Name: (decoder, what puts the blank's sign in).
SENTENCEPIECE_DECODERS: dict[str, Any] = {
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace_first": decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()]),
    "metaspace_last": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "replace_fused": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]),
    "metaspace_never": decoders.Metaspace(prepend_scheme="never"),
}


def sentencepiece_like(decoder: str = "llama", add_bos: bool = True, **settings: Any) -> PreTrainedTokenizerFast:
    """BPE with byte fallback over ``WORDS``, decoded as ``SENTENCEPIECE_DECODERS`` says."""
    vocab: dict[str, int] = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges: dict[tuple[str, str], None] = {}
    for character in "▁abcdefghijklmnopqrstuvwxyzHL.,!?'é語":
        vocab.setdefault(character, len(vocab))
    for word in WORDS:
        for end in range(1, len(word)):
            merges.setdefault((word[:end], word[end]))
            vocab.setdefault(word[: end + 1], len(vocab))
    rust = Tokenizer(models.BPE(vocab, list(merges), unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if decoder == "gemma":
        rust.normalizer = normalizers.Replace(" ", "▁")
    else:
        rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    rust.decoder = SENTENCEPIECE_DECODERS[decoder]
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    rust.add_tokens([AddedToken("<think>", normalized=False), AddedToken("a b", normalized=False)])
    if add_bos:
        rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings
    )


def unigram(**settings: Any) -> PreTrainedTokenizerFast:
    """Unigram and Metaspace, as T5; control tokens are ordinary pieces too."""
    words = [*SPECIAL_TOKENS, *WORDS, "▁", *"abcdefghijklmnopqrstuvwxyzHL.,!?'<>|_/"]
    rust = Tokenizer(models.Unigram([(word, -float(i % 7) - 1) for i, word in enumerate(words)], unk_id=0))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="</s>", unk_token="<unk>", **settings)


def word_piece(cleanup: bool = False, **settings: Any) -> PreTrainedTokenizerFast:
    """WordPiece, as BERT: a decoder that puts blanks between tokens. ``cleanup`` is the decoder's own."""
    words = ["[UNK]", "hello", "##ing", "##s", "world", ".", "'", "t", "don", "##'", "##t", ","]
    rust = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece(cleanup=cleanup)
    return PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="[UNK]", **settings)


# Tokens that decoders rewrite: signs of blanks, word ends, continuations, contractions, bytes, repetitions.
ODD_TOKENS = (
    "<unk>", "<s>", "</s>", "<pad>", "|", "a", "b", "hello", "world", "##ing", "##s", "##", "##.", ".", "?", "!", ",",
    "'", "n't", "'m", "'s", "'ve", "'re", "do", "not", " do not", " ' ", " .", " ", "  ", "", "n", "lo</w>", "</w>",
    ".</w>", "a</w>b", "</", "w>", "▁", "▁the", "▁.", "aa", "aab", "<0xE2>", "<0x82>", "<0xAC>", "<0x41>", "<0xFF>",
    "\u00e2", "\u0124", "\u00ac", "\u0120x", "\u00f0", "\u8a9e", "-", "--", "w", ">",
)  # fmt: skip
# Decoders that are neither byte-level BPE nor SentencePiece; ``None`` = a tokenizer without one.
ODD_DECODERS: dict[str, Any] = {
    "none": None,
    "word_piece": decoders.WordPiece(cleanup=False),
    "word_piece_cleanup": decoders.WordPiece(cleanup=True),
    "word_piece_other_prefix": decoders.WordPiece(prefix="a", cleanup=True),
    "word_ends": decoders.BPEDecoder(),
    "word_ends_fused": decoders.Sequence([decoders.BPEDecoder(), decoders.Fuse(), decoders.Replace(" .", ".")]),
    "word_ends_replaced": decoders.Sequence([decoders.BPEDecoder(), decoders.Replace("o ", "0")]),
    "fused_word_ends": decoders.Sequence([decoders.Fuse(), decoders.BPEDecoder()]),
    "ctc": decoders.CTC(),
    "ctc_no_cleanup": decoders.CTC(cleanup=False),
    "bytes_ctc": decoders.Sequence([decoders.ByteFallback(), decoders.CTC()]),
    "replace_long": decoders.Sequence([decoders.Fuse(), decoders.Replace("aab", "<"), decoders.Replace("<</w>", "-")]),
    "replace_itself": decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", "a"), decoders.Replace("a-a", "aa")]),
    "replace_regex": decoders.Sequence([decoders.Replace(Regex("[ab]+"), "x"), decoders.WordPiece(cleanup=False)]),
    "regex_over_text": decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+$|^ *"), "x")]),
    "strip_each": decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Strip("a", 2, 0)]),
    "strip_begin": decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 2, 0), decoders.Strip("b", 1, 0)]),
    "strip_end": decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 0, 2)]),  # the library fails on ""
    "byte_level_strip": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    "byte_level_twice": decoders.Sequence([decoders.ByteLevel(), decoders.ByteLevel()]),
    "metaspace_word_piece": decoders.Sequence([decoders.Metaspace(), decoders.WordPiece(cleanup=True)]),
    "fused_metaspace": decoders.Sequence([decoders.Fuse(), decoders.Metaspace(), decoders.WordPiece(cleanup=True)]),
    "fused_ctc": decoders.Sequence([decoders.Fuse(), decoders.CTC(), decoders.ByteFallback()]),
}


def odd(decoder: str, **settings: Any) -> PreTrainedTokenizerFast:
    """Whole words of ``ODD_TOKENS``, decoded as ``ODD_DECODERS`` says. Not for encoding."""
    rust = Tokenizer(models.WordLevel({token: i for i, token in enumerate(ODD_TOKENS)}, unk_token="<unk>"))
    if ODD_DECODERS[decoder] is not None:
        rust.decoder = ODD_DECODERS[decoder]
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="<unk>", eos_token="</s>", **settings)


class _BlankJoined:
    """A decoder in Python."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return [
            token.removeprefix("##") if token.startswith("##") or not at else f" {token}"
            for at, token in enumerate(tokens)
        ]


def python_decoded(**settings: Any) -> PreTrainedTokenizerFast:
    """``word_piece`` with a decoder that is written in Python."""
    fast = word_piece(**settings)
    fast.backend_tokenizer.decoder = decoders.Decoder.custom(_BlankJoined())
    return fast
