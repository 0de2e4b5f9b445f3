"""Tokenizers and chat templates: the same ids and the same text as transformers gives for the same files."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from batchrun.errors import JobError
from batchrun.model_files import resolve
from batchrun.tokenization.chat_template import ChatTemplateError
from batchrun.tokenization.tokenizer import Tokenizer, clean_text
from tests import gguf_files
from tests.models import CHAT_TEMPLATE, SPECIAL, save_model, save_tokenizer

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6

TEXTS = [
    "",
    " ",
    "  leading and trailing  ",
    "a   1 and  22,333.5\n\n 4",
    "don't DON'T I'LL we'Ve",
    "tabs\t\t1\r\n\r\n  x\n",
    "日本語、数字123と½ Ⅷ ٣٤٥",
    "e\u0301 é \u200b zero width \ufeff",
    "🙂‍↔️ 👩‍👩‍👧‍👦 🇯🇵",
    "def f(x):\n    return x ** 2  # ok\n",
    "<|user|>hello<|end|><|nothing|>",
    "x" * 300 + " " * 300 + "!?" * 50,
    "नमस्ते दुनिया ไทย 中文",
    "\x00\x01\x7f\x85\xa0",
]
texts = st.one_of(
    st.text(max_size=60),
    st.lists(
        st.sampled_from(["a", "The", " quick", "1", "23", " ", "  ", "\n", "\t", "'s", "'LL", "é", "本", "."])
    ).map("".join),
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  2 < 3 & 'so' \"on\"?  "},
    {"role": "assistant", "content": "Yes. "},
]


def byte_level_gguf(path: Path, pre: str | None, **flags: bool) -> Path:
    tokens, merges = gguf_files.train_bpe()
    types = [NORMAL] * len(tokens) + [CONTROL] * len(SPECIAL) + [USER_DEFINED]
    tokens = [*tokens, *SPECIAL, "<think>"]
    special = {"bos": tokens.index("<|bos|>"), "eos": tokens.index("<|eos|>"), "eot": tokens.index("<|end|>")}
    return gguf_files.write_tokenizer(
        path,
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_types=types,
        merges=merges,
        special=special,
        flags=flags,
        chat_template=CHAT_TEMPLATE,
    )


def sentencepiece_gguf(path: Path, **flags: bool) -> Path:
    """A vocabulary as SentencePiece writes it: control tokens, bytes, then pieces scored by their rank."""
    from tokenizers import models, normalizers, trainers

    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trained.train_from_iterator(
        gguf_files.CORPUS.splitlines(), trainers.BpeTrainer(vocab_size=400, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    merged = list(dict.fromkeys("".join(pair) for pair in model["merges"]))
    letters = [token for token in sorted(model["vocab"], key=model["vocab"].get) if token not in merged]
    heads = ["<unk>", "<s>", "</s>"]
    tokens = heads + [f"<0x{byte:02X}>" for byte in range(256)] + merged + letters
    types = [2, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    scores = [0.0] * 259 + [float(-rank) for rank in range(len(tokens) - 259)]
    special = {"bos": 1, "eos": 2, "unknown": 0}
    return gguf_files.write_tokenizer(
        path, model="llama", tokens=tokens, token_types=types, scores=scores, special=special, flags=flags
    )


def load(path: Path) -> Tokenizer:
    if path.is_dir():
        save_file({}, path / "model.safetensors")  # what makes it a model
    return Tokenizer.load(resolve(str(path), weights=False))


def reference(path: Path) -> Any:
    from transformers import AutoTokenizer

    if path.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return AutoTokenizer.from_pretrained(path)


def assert_same(ours: Tokenizer, theirs: Any, text: str) -> None:
    for add_special_tokens in (False, True):
        ids = ours.encode(text, add_special_tokens=add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


class TestByteLevelGGUF:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("gguf")

    @staticmethod
    @functools.cache
    def pair(folder: Path, pre: str) -> tuple[Tokenizer, Any]:
        """Ours, and transformers' with the splitting that the model family's own tokenizer.json has."""
        path = byte_level_gguf(folder / f"{pre}.gguf", pre, add_bos_token=pre == "llama-bpe")
        theirs = reference(path)
        own: dict[str, list[Any]] = {
            "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
            "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        }
        if pre in own:
            theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(own[pre])
        if pre == "qwen2":
            from transformers import Qwen2Tokenizer

            theirs.backend_tokenizer.normalizer = Qwen2Tokenizer().backend_tokenizer.normalizer
        return load(path), theirs

    @pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken"])
    def test_equals_transformers(self, folder: Path, pre: str) -> None:
        ours, theirs = self.pair(folder, pre)
        for text in [*TEXTS, gguf_files.CORPUS]:
            assert_same(ours, theirs, text)

    @pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "tekken"])
    def test_equals_transformers_on_any_text(self, folder: Path, pre: str) -> None:
        ours, theirs = self.pair(folder, pre)

        @settings(max_examples=150, deadline=None)
        @given(texts)
        def check(text: str) -> None:
            assert_same(ours, theirs, text)

        check()

    def test_special_tokens(self, folder: Path) -> None:
        ours = load(byte_level_gguf(folder / "special.gguf", "smollm"))
        bos, eos, end = (ours.encode(token, add_special_tokens=False) for token in ("<|bos|>", "<|eos|>", "<|end|>"))
        assert bos == [ours.bos_token_id]
        assert list(ours.eos_token_ids) == sorted([*eos, *end])  # end of sequence and end of turn
        assert len(ours.special_token_ids) == len(SPECIAL)
        think = ours.encode("<think>", add_special_tokens=False)
        assert len(think) == 1
        assert ours.decode([*bos, *think, *eos]) == "<think>"
        assert ours.vocab_size == max(think) + 1

    def test_bos_and_eos_around_plain_text_only(self, folder: Path) -> None:
        ours = load(byte_level_gguf(folder / "both.gguf", "smollm", add_bos_token=True, add_eos_token=True))
        assert ours.decode(ours.encode("a", add_special_tokens=True), skip_special_tokens=False) == "<|bos|>a<|eos|>"
        assert ours.decode(ours.encode("a", add_special_tokens=False), skip_special_tokens=False) == "a"

    def test_batches_equal_single_texts(self, folder: Path) -> None:
        ours, _ = self.pair(folder, "smollm")
        assert ours.encode_batch(TEXTS, add_special_tokens=True) == [
            ours.encode(text, add_special_tokens=True) for text in TEXTS
        ]

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
    def test_no_text_is_lost(self, folder: Path, text: str) -> None:
        ours, _ = self.pair(folder, "smollm")
        assert ours.decode(ours.encode(text, add_special_tokens=False), skip_special_tokens=False) == text

    def test_lone_surrogates(self, folder: Path) -> None:
        ours, _ = self.pair(folder, "smollm")
        assert clean_text("a\ud800b\udfff🙂") == "a\ufffdb\ufffd🙂"
        assert ours.decode(ours.encode("a\ud800", add_special_tokens=False)) == "a\ufffd"
        assert ours.encode_batch(["\udc80"], add_special_tokens=False)

    def test_pickles(self, folder: Path) -> None:
        ours, _ = self.pair(folder, "smollm")
        copy = pickle.loads(pickle.dumps(ours))
        assert copy.encode(TEXTS[3], add_special_tokens=True) == ours.encode(TEXTS[3], add_special_tokens=True)
        assert copy.render_chat(MESSAGES) == ours.render_chat(MESSAGES)

    def test_unknown_kinds_are_refused(self, folder: Path) -> None:
        with pytest.raises(JobError, match=r"pre-tokenizer 'novel' is not supported \(supported: default, gpt-2"):
            load(byte_level_gguf(folder / "novel.gguf", "novel"))
        path = byte_level_gguf(folder / "bert.gguf", "default")
        path.write_bytes(path.read_bytes().replace(b"gpt2", b"bert", 1))
        with pytest.raises(JobError, match="'bert' is not supported"):
            load(path)


class TestSentencePieceGGUF:
    @pytest.fixture(scope="class")
    def path(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return sentencepiece_gguf(tmp_path_factory.mktemp("gguf") / "spm.gguf")

    @pytest.fixture(scope="class")
    def pair(self, path: Path) -> tuple[Tokenizer, Any]:
        return load(path), reference(path)

    @staticmethod
    def comparable(text: str) -> str:
        """transformers adds no blank before a leading one, nor after a special token; SentencePiece does."""
        return text.lstrip(" ▁").replace("<", "(")

    def test_equals_transformers(self, pair: tuple[Tokenizer, Any]) -> None:
        for text in map(self.comparable, [*TEXTS, gguf_files.CORPUS]):
            assert_same(*pair, text)

    @settings(max_examples=200, deadline=None)
    @given(text=texts)
    def test_equals_transformers_on_any_text(self, pair: tuple[Tokenizer, Any], text: str) -> None:
        assert_same(*pair, self.comparable(text))

    @settings(max_examples=200, deadline=None)
    @given(text=texts.filter(lambda text: "▁" not in text))
    def test_no_text_is_lost(self, pair: tuple[Tokenizer, Any], text: str) -> None:
        ours, _ = pair
        assert ours.decode(ours.encode(text, add_special_tokens=True)) == text

    def test_blanks_bytes_and_bos(self, path: Path, tmp_path: Path) -> None:
        ours = load(path)
        assert ours.encode("a", add_special_tokens=True) == [1, *ours.encode("a", add_special_tokens=False)]
        assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))
        snowman = ours.encode("\u2603", add_special_tokens=False)
        assert [number - 3 for number in snowman[-3:]] == list("\u2603".encode())
        blank = ours.encode("", add_special_tokens=False)
        assert blank == []
        for text in ("a", " a", "  a"):  # one blank is added, and none is taken for it
            marks = "".join(ours._backend.encode(text, add_special_tokens=False).tokens)
            assert marks == "\u2581" + text.replace(" ", "\u2581")

    def test_without_prefix_and_bos(self, tmp_path: Path) -> None:
        plain = load(sentencepiece_gguf(tmp_path / "plain.gguf", add_space_prefix=False, add_bos_token=False))
        assert plain.decode(plain.encode(" a", add_special_tokens=True)) == " a"
        assert plain.encode("a", add_special_tokens=True) == plain.encode("a", add_special_tokens=False)


class TestDirectory:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return save_model(tmp_path / "model", layers=1)

    @staticmethod
    def configure(folder: Path, **changes: Any) -> None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def test_equals_transformers(self, folder: Path) -> None:
        ours, theirs = load(folder), reference(folder)
        for text in TEXTS:
            assert_same(ours, theirs, text)
        assert ours.eos_token_ids == (257,)
        assert ours.chat_template == CHAT_TEMPLATE

    @pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True},
                                       {"add_bos_token": False}, {}])  # fmt: skip
    @pytest.mark.parametrize("in_file", [False, True])
    def test_bos_is_what_the_file_says(self, folder: Path, flags: dict[str, bool], in_file: bool) -> None:
        save_tokenizer(folder, add_bos=in_file)
        self.configure(folder, **flags)
        assert_same(load(folder), reference(folder), "text")

    def test_special_tokens_as_objects_and_added_later(self, folder: Path) -> None:
        late = {"content": "<late>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        late["single_word"] = False
        eos = {"__type": "AddedToken", "content": "<|end|>", "special": True}
        self.configure(folder, eos_token=eos, added_tokens_decoder={"262": late})
        ours, theirs = load(folder), reference(folder)
        assert_same(ours, theirs, "a<late>b")
        assert ours.encode("<late>", add_special_tokens=False) == [262]
        assert ours.eos_token_ids == (257, 258)

    @pytest.mark.parametrize(("eos", "expected"), [([258, 260], (257, 258, 260)), (259, (257, 259)), (None, (257,))])
    def test_end_of_sequence_ids(self, folder: Path, eos: Any, expected: tuple[int, ...]) -> None:
        path = folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos}))
        assert load(folder).eos_token_ids == expected

    def test_truncation_in_the_file_is_ignored(self, folder: Path) -> None:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        backend.enable_truncation(4)
        backend.enable_padding(length=50)
        backend.save(str(folder / "tokenizer.json"))
        assert len(load(folder).encode("a" * 20, add_special_tokens=True)) == 20

    def test_damaged_file_is_named(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(JobError, match=r"tokenizer\.json: not a readable tokenizer"):
            load(folder)

    def test_vocabulary_files_are_converted_once(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BATCHRUN_CACHE", str(tmp_path / "cache"))
        tokens, merges = gguf_files.train_bpe(320)
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
        self.configure(folder, tokenizer_class="GPT2Tokenizer", bos_token=None, eos_token=None)
        ours, theirs = load(folder), reference(folder)
        for text in TEXTS[:8]:
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        monkeypatch.setattr("subprocess.run", None)
        assert load(folder).vocab_size == ours.vocab_size

    def test_what_cannot_be_converted_is_named(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BATCHRUN_CACHE", str(tmp_path / "cache"))
        (folder / "tokenizer.json").rename(folder / "tokenizer.model")
        with pytest.raises(JobError, match=r"cannot make one from tokenizer\.model"):
            load(folder)


TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "blocks": """
    {%- for message in messages %}
        {% if loop.first and message['role'] == 'system' %}
{{ bos_token }}SYSTEM {{ message.content | trim }}
        {% elif message.role == 'user' %}
[U] {{ message.content | trim }} [/U]
        {% else %}
{{ message.content }}{{ eos_token }}
        {% endif %}
    {%- endfor %}
    {% if add_generation_prompt -%} GO {%- endif %}
""",
    "json and namespace": """{% set ns = namespace(n=0) %}{% for m in messages %}
{% set ns.n = ns.n + 1 %}{{ m | tojson }}{% endfor %}
{{ ns.n }}{{ {'b': '<é&\\'>', 'a': [1, none, true]} | tojson(indent=2) }}""",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 1 %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ x is defined }}{% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson }}{% else %}none{% endif %}{{ documents is none }}{{ style }}"
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{% endfor %}",
    "macro and date": "{% macro turn(m) %}{{ m.role | upper }}:{{ m.content }}\n{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}{{ strftime_now('%Y-%m') }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }}{% endfor %}",
}


class TestChat:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return save_model(tmp_path_factory.mktemp("chat") / "model", layers=1)

    @pytest.fixture(scope="class")
    def pair(self, folder: Path) -> Callable[[str], tuple[Tokenizer, Any]]:
        theirs = reference(folder)

        def with_template(template: str) -> tuple[Tokenizer, Any]:
            theirs.chat_template = template
            backend = Backend.from_file(str(folder / "tokenizer.json"))
            special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
            return Tokenizer(backend, special_tokens=special, chat_templates={"default": template}), theirs

        return with_template

    @pytest.mark.parametrize("name", TEMPLATES)
    @pytest.mark.parametrize("add_generation_prompt", [True, False])
    def test_equals_transformers(
        self, pair: Callable[[str], tuple[Tokenizer, Any]], name: str, add_generation_prompt: bool
    ) -> None:
        ours, theirs = pair(TEMPLATES[name])
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": None, "y": 1}}}
        conversations: Sequence[Sequence[Mapping[str, Any]]] = [
            MESSAGES,
            MESSAGES[1:2],
            [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call], "name": None}],
            [{"role": "assistant", "content": "c", "reasoning": "why", "thinking": None}],
        ]
        for messages in conversations:
            for variables in ({}, {"tools": [tool], "style": "<b>"}, {"bos_token": "B"}):
                options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **variables}
                rendered = ours.render_chat(messages, **options)
                assert rendered == theirs.apply_chat_template(messages, tokenize=False, **options)
                ids = theirs.apply_chat_template(messages, return_dict=False, **options)
                assert ours.encode(rendered, add_special_tokens=False) == ids

    @pytest.mark.parametrize("name", ["plain", "blocks", "macro and date"])
    @pytest.mark.parametrize("ending", ["Yes", "Yes. ", " a\n", [{"type": "text", "text": "part "}]])
    def test_continuing_equals_transformers(
        self, pair: Callable[[str], tuple[Tokenizer, Any]], name: str, ending: Any
    ) -> None:
        ours, theirs = pair(TEMPLATES[name])
        messages = [*MESSAGES[:2], {"role": "assistant", "content": ending}]
        if not isinstance(ending, str):
            messages[:2] = []
            ours, theirs = pair("{% for m in messages %}{{ m.content[0].text }}<end>{% endfor %}")
        expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        assert ours.render_chat(messages, continue_final_message=True) == expected
        assert messages[-1]["content"] == ending

    def test_null_fields_count_as_absent(self, pair: Callable[[str], tuple[Tokenizer, Any]]) -> None:
        ours, _ = pair("{% for m in messages %}{{ m | tojson }}{% endfor %}")
        part = {"type": "text", "text": "t", "image": None}
        call = {"id": None, "function": {"name": "f", "arguments": {"x": None}}}
        rendered = ours.render_chat([{"role": "user", "content": [part], "name": None, "tool_calls": [call]}])
        assert json.loads(rendered) == {
            "role": "user",
            "content": [{"type": "text", "text": "t"}],
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}],
        }

    def test_tool_template_is_taken_when_there_are_tools(self, folder: Path) -> None:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        ours = Tokenizer(backend, special_tokens={}, chat_templates={"default": "plain", "tool_use": "tools"})
        assert ours.render_chat(MESSAGES) == "plain"
        assert ours.render_chat(MESSAGES, tools=[{"type": "function"}]) == "tools"

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[0].content + none }}", "fails on these messages"),
            ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
            ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "must not set"),
            ("{{ messages.append(1) }}", "unsafe|not safely"),
        ],
    )
    def test_templates_that_fail(
        self, pair: Callable[[str], tuple[Tokenizer, Any]], template: str, message: str
    ) -> None:
        ours, _ = pair(template)
        with pytest.raises(ChatTemplateError, match=message):
            ours.render_chat(MESSAGES)

    @pytest.mark.parametrize("messages", [[], ["text"], [None], [{"role": "user"}]])
    def test_messages_that_do_not_fit(self, pair: Callable[[str], tuple[Tokenizer, Any]], messages: Any) -> None:
        ours, _ = pair("{{ 'x' + messages[0].content }}")
        with pytest.raises(ChatTemplateError):
            ours.render_chat(messages)

    def test_nothing_to_continue(self, pair: Callable[[str], tuple[Tokenizer, Any]]) -> None:
        ours, _ = pair("{{ messages[0].content | upper }}")
        for messages in ([{"role": "user"}], [{"role": "user", "content": "a"}]):
            with pytest.raises(ChatTemplateError, match="continue_final_message"):
                ours.render_chat(messages, continue_final_message=True)

    def test_no_template_and_a_malformed_one(self, folder: Path) -> None:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        ours = Tokenizer(backend, special_tokens={}, chat_templates={})
        assert ours.chat_template is None
        with pytest.raises(JobError, match="no chat template"):
            ours.render_chat(MESSAGES)
        with pytest.raises(JobError, match="malformed: line 1"):
            Tokenizer(backend, special_tokens={}, chat_templates={"default": "{% if %}"})
