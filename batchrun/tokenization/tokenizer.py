"""Text to token ids and back, and messages to text, without importing transformers.

transformers brings torch in, which takes seconds; a tokenizer file needs the ``tokenizers`` library alone, and a chat
template Jinja.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend

from batchrun.errors import JobError
from batchrun.model_files import ModelFiles
from batchrun.tokenization.chat_template import compile_templates, render
from batchrun.tokenization.convert_slow import converted
from batchrun.tokenization.gguf_vocabulary import gguf_tokenizer
from batchrun.weights.gguf import read_gguf

_SURROGATES = re.compile("[\ud800-\udfff]")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def clean_text(text: str) -> str:
    """``text`` with each lone surrogate, which no encoding can carry, replaced by U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


class Tokenizer:
    """A model's tokenizer and chat templates. It can be pickled, and is safe to use from several threads.

    ``special_token_ids``: what ``decode`` leaves out with ``skip_special_tokens``. ``eos_token_ids``: the tokens that
    end a generation, by the tokenizer and by the generation config.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """``special_tokens`` maps ``bos_token`` and so on to the text of the token; chat templates see these names."""
        backend.no_truncation()
        backend.no_padding()
        compile_templates(chat_templates)
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._chat_templates = dict(chat_templates)
        own_eos = self._special_id("eos_token")
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_ids = tuple(sorted({*eos_token_ids, *(() if own_eos is None else (own_eos,))}))
        self.special_token_ids = frozenset(
            number for number, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def load(cls, files: ModelFiles) -> Tokenizer:
        """The tokenizer of a resolved model. Raises :class:`JobError` if it cannot be read or is of an unknown kind."""
        eos = files.generation.get("eos_token_id")
        if eos is None:
            eos = files.config.get("eos_token_id")
        eos_token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if files.format == "gguf":
            backend, special_tokens = gguf_tokenizer(read_gguf(files.tokenizer, vocabulary=True))
        else:
            backend, special_tokens = _from_directory(files)
        return cls(
            backend, special_tokens=special_tokens, chat_templates=files.chat_templates, eos_token_ids=eos_token_ids
        )

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template."""
        return self._chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``, none of it stripped. Special tokens spelled out in it become those tokens.

        ``add_special_tokens`` puts BOS and EOS around it as the model wants them for plain text. A rendered chat is
        encoded without: its template has written them.
        """
        return self._backend.encode(clean_text(text), add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """:meth:`encode` of each text, on all cores unless ``TOKENIZERS_PARALLELISM`` says otherwise."""
        cleaned = [clean_text(text) for text in texts]
        return [found.ids for found in self._backend.encode_batch_fast(cleaned, add_special_tokens=add_special_tokens)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that make no character become U+FFFD, ids that name no token nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 of one token as it stands after other text, which may be a part of a character."""
        before = self.encode("a", add_special_tokens=False)  # some tokenizers drop a text's first blank
        text_before = self.decode(before, skip_special_tokens=False)
        text = self.decode([*before, token_id], skip_special_tokens=False)
        if not text.startswith(text_before):
            text_before, text = "", self.decode([token_id], skip_special_tokens=False)
        text = text.removeprefix(text_before)
        own = _own_bytes(self._backend.id_to_token(token_id) or "") if "\ufffd" in text else None
        return text.encode() if own is None else own

    def tokens(self) -> dict[int, str]:
        """Every token by its id, as the vocabulary spells it."""
        return {number: token for token, number in self._backend.get_vocab(with_added_tokens=True).items()}

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation, through the model's chat template; ``kwargs`` are further variables of it.

        With ``continue_final_message`` the text ends where the content of the final message does, and there is no
        generation prompt. Raises :class:`ChatTemplateError` if the messages do not fit the template, :class:`JobError`
        if the model has none.
        """
        return render(
            self._chat_templates,
            messages,
            {**self._special_tokens, **kwargs},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _own_bytes(token: str) -> bytes | None:
    """The bytes that a vocabulary's token stands for, if it spells bytes: all at once, or one as ``<0xE2>``."""
    if match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
        return bytes.fromhex(match[1])
    table = _byte_characters()
    return bytes(map(table.__getitem__, token)) if token and all(character in table for character in token) else None


@functools.cache
def _byte_characters() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary: its own number, or of the rest, in order, those left."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [ord(character) for character in alphabet if ord(character) < 256]
    left = [byte for byte in range(256) if byte not in own]
    return dict(zip(alphabet, [*own, *left], strict=True))


def _from_directory(files: ModelFiles) -> tuple[Backend, dict[str, str]]:
    path = files.tokenizer if files.tokenizer.name == "tokenizer.json" else converted(files)
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise JobError(f"{path}: not a readable tokenizer: {error}") from error
    _add_listed_tokens(backend, files.tokenizer_config)
    named = {name: _token_text(files.tokenizer_config.get(name)) for name in _SPECIAL_NAMES}
    return backend, {name: text for name, text in named.items() if text is not None}


def _token_text(value: Any) -> str | None:
    """A token in ``tokenizer_config.json``: its text, or an object that describes it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_listed_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Tokens that were added after ``tokenizer.json`` was written stand in the config alone, by id."""
    listed = config.get("added_tokens_decoder") or {}
    for _, entry in sorted((int(number), entry) for number, entry in listed.items()):
        if backend.token_to_id(entry["content"]) is None:
            flags = {key: bool(entry.get(key)) for key in ("special", "normalized", "lstrip", "rstrip", "single_word")}
            backend.add_tokens([AddedToken(entry["content"], **flags)])
