"""Small tokenizers of the kinds that models use, built with the ``tokenizers`` library; no files, no network."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
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


def word_piece(**settings: Any) -> PreTrainedTokenizerFast:
    """WordPiece, as BERT: a decoder that puts blanks between tokens."""
    words = ["[UNK]", "hello", "##ing", "##s", "world", ".", "'", "t", "don", "##'", "##t", ","]
    rust = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="[UNK]", **settings)
