"""The tokenizer that a GGUF file describes, rebuilt for the ``tokenizers`` library.

A GGUF file stores the vocabulary and names the kind of tokenizer; how text is split before merging follows from that
name (``tokenizer.ggml.pre``), as it would stand in the model's own ``tokenizer.json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from batchrun.errors import JobError
from batchrun.weights.gguf import GGUFFile


class _TokenType(IntEnum):
    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4


_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # so spelled in the format
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
_SENTENCEPIECE_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # where a file does not say


@dataclass(frozen=True)
class _Splitting:
    """How byte-level text is cut before merges apply: by each pattern in turn, matches and gaps standing alone."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word in the vocabulary is one token, whatever the merges
    add_bos: bool = False
    compose: bool = False  # Unicode NFC first


_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS_AND_REST = (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # %s: digits in a group
)
_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = _Splitting((_GPT2_PATTERN,))
_SINGLE_DIGITS = _Splitting((r"\p{N}", _GPT2_PATTERN))
_LLAMA3_PATTERN = _CASELESS_SUFFIX + _LETTERS_AND_REST % "{1,3}"
_LLAMA3 = _Splitting((_LLAMA3_PATTERN,), whole_words=True, add_bos=True)
_QWEN2 = _Splitting((_CASELESS_SUFFIX + _LETTERS_AND_REST % "",), compose=True)
_SPLITTINGS = {
    # What llama.cpp does for files that name nothing.
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _Splitting((_LLAMA3_PATTERN,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Splitting((_TEKKEN_PATTERN,), whole_words=True, add_bos=True),
}


def gguf_tokenizer(gguf: GGUFFile) -> tuple[Backend, dict[str, str]]:
    """Rebuild the tokenizer of ``gguf``, which must have been read with its vocabulary.

    Beside it stands the text of each special token under its name (``bos_token`` and so on). Raises
    :class:`JobError` if its kind is not known here: a wrong guess would give wrong tokens without a sign of it.
    """
    kind = gguf.metadata.get("tokenizer.ggml.model")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise JobError(f"{gguf.path}: this GGUF file has no vocabulary")
    if kind == "gpt2":
        splitting = _splitting(gguf)
        backend, add_bos, ids = _byte_level(gguf, tokens, splitting), splitting.add_bos, {}
    elif kind == "llama":
        backend, add_bos, ids = _sentencepiece(gguf, tokens), True, _SENTENCEPIECE_IDS
    else:
        raise JobError(f"{gguf.path}: GGUF tokenizer {kind!r} is not supported (supported: gpt2, llama)")
    stated = {name: gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    ids = ids | {name: number for name, number in stated.items() if number is not None}
    special = {name: tokens[number] for name, number in ids.items() if number < len(tokens)}
    _add_whole_tokens(backend, tokens, _types(gguf, tokens), set(special.values()))
    before = [special["bos_token"]] if _flag(gguf, "add_bos_token", add_bos) and "bos_token" in special else []
    after = [special["eos_token"]] if _flag(gguf, "add_eos_token", False) and "eos_token" in special else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=[(token, tokens.index(token)) for token in {*before, *after}]
    )
    return backend, special


def _flag(gguf: GGUFFile, name: str, default: bool) -> bool:
    return bool(gguf.metadata.get(f"tokenizer.ggml.{name}", default))


def _splitting(gguf: GGUFFile) -> _Splitting:
    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITTINGS:
        known = ", ".join(_SPLITTINGS)
        raise JobError(f"{gguf.path}: GGUF pre-tokenizer {name!r} is not supported (supported: {known})")
    return _SPLITTINGS[name]


def _types(gguf: GGUFFile, tokens: Sequence[str]) -> Sequence[int]:
    return gguf.metadata.get("tokenizer.ggml.token_type") or [_TokenType.NORMAL] * len(tokens)


def _add_whole_tokens(backend: Backend, tokens: Sequence[str], types: Sequence[int], special: set[str]) -> None:
    """Register what is matched whole in text. Every such token is in the vocabulary already, so none gets a new id."""
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _TokenType.CONTROL]
    added = [token for token, kind in zip(tokens, types, strict=True) if kind == _TokenType.USER_DEFINED]
    special_tokens = list(dict.fromkeys([*control, *sorted(special)]))
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special_tokens])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in added if token not in special])


def _bpe(gguf: GGUFFile, **options: Any) -> models.BPE:
    try:
        return models.BPE(**options)
    except Exception as error:  # tokenizers raises plain Exception
        raise JobError(f"{gguf.path}: the vocabulary of this GGUF file is damaged: {error}") from error


def _byte_level(gguf: GGUFFile, tokens: Sequence[str], splitting: _Splitting) -> Backend:
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Backend(_bpe(gguf, vocab=vocab, merges=merges, ignore_merges=splitting.whole_words))
    if splitting.compose:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(gguf: GGUFFile, tokens: Sequence[str]) -> Backend:
    """SentencePiece's BPE: the best-scored piece is merged first, and bytes stand in for unknown characters."""
    vocab = {token: number for number, token in enumerate(tokens)}
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise JobError(f"{gguf.path}: this GGUF file has no token scores")
    merges = _implied_merges(vocab, scores, _types(gguf, tokens))
    unknown = tokens[gguf.metadata.get("tokenizer.ggml.unknown_token_id", _SENTENCEPIECE_IDS["unk_token"])]
    model = _bpe(gguf, vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Backend(model)
    prefix = _flag(gguf, "add_space_prefix", True)
    blanks = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if prefix else blanks
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _implied_merges(vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best-scored result first."""
    pairs = [
        (-scores[number], -cut, number, token[:cut], token[cut:])
        for token, number in vocab.items()
        if types[number] == _TokenType.NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]
