"""From rows to token ids: templates, messages, token ids, sampling of the row's own, and length."""

from __future__ import annotations

import datetime
import json
import shutil
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.data.prompt import PromptBuilder, prefix_order
from batchrun.data.rows import PreparedRow, Row
from batchrun.data.template import RowTemplate
from batchrun.errors import JobError
from batchrun.job import PromptSpec, SamplingSpec
from batchrun.model_files import resolve
from batchrun.tokenization.tokenizer import Tokenizer
from tests.models import save_tokenizer

Make = Callable[..., PromptBuilder]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(resolve(str(tiny_model)))


@pytest.fixture(scope="module")
def load(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """A tokenizer with another chat template, or one that adds BOS."""

    def load(**options: Any) -> Tokenizer:
        path = tmp_path_factory.mktemp("tokenizer") / "model"
        shutil.copytree(tiny_model, path)
        save_tokenizer(path, **options)
        return Tokenizer.load(resolve(str(path)))

    return load


def build(tokenizer: Tokenizer, data: dict[str, Any], *, max_model_len: int = 512, **spec: Any) -> PreparedRow:
    sampling = spec.pop("sampling", SamplingSpec())
    builder = PromptBuilder(PromptSpec(**spec), sampling, tokenizer, max_model_len)
    (prepared,) = builder.build([Row(1, data)])
    assert (prepared.error is None) == bool(prepared.token_ids)
    return prepared


def text_of(tokenizer: Tokenizer, data: dict[str, Any], **spec: Any) -> str:
    prepared = build(tokenizer, data, **spec)
    assert prepared.error is None, prepared.error
    return tokenizer.decode(prepared.token_ids, skip_special_tokens=False)


# Templates


@pytest.mark.parametrize(
    ("template", "data", "text"),
    [
        ("{{ a }}", {"a": "x  y"}, "x  y"),
        ("{{ a }}\n", {"a": 42}, "42\n"),
        ("{{ a }}", {"a": Decimal("1e400")}, "1E+400"),
        ("{{ a }} {{ b }}", {"a": 1.5, "b": True}, "1.5 true"),
        ("x {{ a }}", {"a": [1, None, {"k": "é"}]}, 'x [1, null, {"k": "é"}]'),
        ('{{ row["odd name"] }}', {"odd name": "x"}, "x"),
        ("{{ row['a'] }}{{ row.a }}", {"a": "x"}, "xx"),
        ("{{ row | tojson }}", {"a": "<b>", "n": None}, '{"a": "<b>", "n": null}'),
        ("{{ a | tojson(indent=1) }}", {"a": [1]}, "[\n 1\n]"),
        ("{{ a }}", {"a": "日本".encode()}, "日本"),
        ("{{ row.a[:3] }}", {"a": b"abcdef"}, "abc"),
        ("{{ a }}", {"a": "nul \0 kept"}, "nul \0 kept"),
        ("{{ a }}!", {"a": datetime.date(2024, 1, 2)}, "2024-01-02!"),
        ("{% if a %}yes{% else %}no{% endif %}", {"a": None}, "no"),
        ("{% if a is none %}null{% endif %}", {"a": None}, "null"),
        ("{% if a == none %}null{% endif %}", {"a": None}, "null"),
        ("{{ a | default('none given') }}{{ b | default('!') }}", {"a": None}, "none given!"),
        ("{{ a or 'x' }}", {"a": None}, "x"),
        ("x{{ a | tojson }}", {"a": None}, "xnull"),
        ("{% for x in a %}{{ loop.index }}{{ x }} {% endfor %}", {"a": ["p", "q"]}, "1p 2q "),
        ("{{ range }}", {"range": "a column"}, "a column"),
        ("{% for i in range(2) %}{{ i * 'x' + a }}{% endfor %}{{ 2 ** 3 * 2 + 1 }}", {"a": "-"}, "-x-17"),
        ("{{ lipsum }}", {"lipsum": "a column"}, "a column"),
    ],
)
def test_templates_render(tokenizer: Tokenizer, template: str, data: dict[str, Any], text: str) -> None:
    assert text_of(tokenizer, data, template=template) == text


@pytest.mark.parametrize(
    ("template", "data", "error"),
    [
        ("{{ a }}", {}, "missing_value: prompt.template: 'a' is missing"),
        ("{{ a }}", {"a": None}, "missing_value: prompt.template: 'a' is null"),
        ("{{ a | upper }}", {"a": None}, "missing_value: prompt.template: 'a' is null"),
        ("{{ a[:3] }}", {"a": None}, "missing_value: prompt.template: 'a' is null"),
        ("{{ a.b }}", {"a": None}, "missing_value: prompt.template: 'a' is null"),
        ("{{ a ~ 'x' }}", {"a": None}, "missing_value: prompt.template: 'a' is null"),
        ("{{ a + 'x' }}", {"a": None}, "missing_value: prompt.template: 'a' is null"),
        ("{% for x in a %}{% endfor %}", {"a": None}, "missing_value: prompt.template: 'a' is null"),
        ("{{ a.b | trim }}", {"a": {"b": None}}, "missing_value: prompt.template: 'b' is null"),
        ("{{ a.b }}", {"a": {}}, "missing_value: prompt.template: 'b' is missing"),
        ('{{ row["odd name"] }}', {}, "missing_value: prompt.template: 'odd name' is missing"),
        ("x{{ none }}", {}, "missing_value: prompt.template: an expression gives null"),
        ("{{ a }}", {"a": [1]}, "bad_prompt: prompt.template: the prompt is a list, not text"),
        (" {{ a }}\n", {"a": {"b": 1}}, "bad_prompt: prompt.template: the prompt is an object, not text"),
        ("{{ a }}", {"a": True}, "bad_prompt: prompt.template: the prompt is a boolean, not text"),
        ("{{ a }}", {"a": b"x\xff"}, "bad_prompt: prompt.template: 'a' is not UTF-8 at byte 2: invalid start byte"),
        ("{{ a | upper }}", {"a": b"\xff"}, "bad_prompt: prompt.template: 'a' is not UTF-8 at byte 1"),
        ("{{ a }}", {"a": ""}, "bad_prompt: the prompt is empty"),
        ("{{ 1 // a }}", {"a": 0}, "bad_prompt: prompt.template: "),
        ("{{ a.__class__.__mro__ }}", {"a": "x"}, "bad_prompt: prompt.template: access to attribute '__class__'"),
        ("{% for i in range(10**9) %}x{% endfor %}", {}, "bad_prompt: prompt.template: range gives more than"),
        ("x{{ a.upper }}", {"a": "x"}, "bad_prompt: prompt.template: an expression gives a builtin"),
        ("x{{ a | map('upper') }}", {"a": ["x"]}, "bad_prompt: prompt.template: an expression gives a generator"),
        ("{{ range }}", {}, "bad_prompt: prompt.template: an expression gives a function"),
        ("{{ a.append(1) }}", {"a": []}, "bad_prompt: prompt.template: "),
        ("{{ 'a' * 1000000000 }}", {}, "bad_prompt: prompt.template: * makes too large a value"),
        (
            "{% set x = namespace(v='ab') %}{% for i in range(30) %}{% set x.v = x.v ~ x.v %}{% endfor %}{{ x.v }}",
            {},
            "bad_prompt: prompt.template: + makes too large a value",
        ),
        ("{{ '%999999999d' % 1 }}", {}, "bad_prompt: prompt.template: % makes too large a value"),
        ("{{ 2 ** (10 ** 12) }}", {}, "bad_prompt: prompt.template: ** makes too large a value"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            {},
            "bad_prompt: prompt.template: range gives more than 1,048,576 numbers in all",
        ),
        (
            "{% for i in range(99999) %}{{ a * 9999 }}{% endfor %}",
            {"a": "xx"},
            "bad_prompt: prompt.template: gives more than 67,108,864 characters",
        ),
    ],
)
def test_what_has_no_text_is_a_row_error(tokenizer: Tokenizer, template: str, data: dict[str, Any], error: str) -> None:
    assert str(build(tokenizer, data, template=template).error).startswith(error)


@pytest.mark.parametrize(
    ("template", "required"),
    [
        ("{{ a }} {{ row.b }} {{ row['odd name'] }}", {"a", "b", "odd name"}),
        ("{{ a | default('x') }} {{ row.b | d }} {{ row['c'] | default('none') }}", set()),
        ("{{ row.get('a') }} {{ row.items() | list }} {{ row[a] }}", {"a"}),
        (
            "{% if a is defined %}{{ a }}{% endif %} {% if row.b is not defined %}-{% else %}{{ row.b }}{% endif %}",
            set(),
        ),
        ("{% if 'a' in row %}{{ a }}{% endif %} {{ '-' if 'b' not in row else row.b }}", set()),
        ("{{ a | upper | default('x') }} {{ a if a else '-' }}", {"a"}),
        ("{% for row in rows %}{{ row.name }}{% endfor %} {% set b = 1 %}{{ b }} {{ range(2) | list }}", {"rows"}),
        ("{{ 'a' | center(10 ** 12) }}", set()),
    ],
)
def test_columns_that_a_template_needs(template: str, required: set[str]) -> None:
    assert RowTemplate(template, "prompt.template").required == required


def test_one_bad_row_leaves_the_others_alone(tokenizer: Tokenizer) -> None:
    builder = PromptBuilder(PromptSpec(template="{{ a }}"), SamplingSpec(), tokenizer, 100)
    rows = [
        Row(3, {"a": "x"}),
        Row(4, None, "unreadable_row: why"),
        Row(5, {}),
        Row(9, {"a": "y" * 200}),
        Row(7, {"a": "z"}),
    ]
    prepared = builder.build(rows)
    assert [item.row for item in prepared] == [3, 4, 5, 9, 7]
    assert [item.error for item in prepared] == [
        None,
        "unreadable_row: why",
        "missing_value: prompt.template: 'a' is missing",
        "prompt_too_long: 200 tokens; the limit is 99",
        None,
    ]
    assert [tokenizer.decode(item.token_ids) for item in prepared] == ["x", "", "", "", "z"]
    assert prepared[0].params is prepared[4].params


def test_a_syntax_error_names_field_and_line(tokenizer: Tokenizer) -> None:
    spec = PromptSpec.model_construct(template="ok\n{{ a")
    with pytest.raises(JobError, match=r"prompt\.template: line 2: "):
        PromptBuilder(spec, SamplingSpec(), tokenizer, 100)


def test_beginning_of_text_comes_once(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(add_bos=True)
    bos = tokenizer.bos_token_id
    for template in ("{{ a }}", "<|bos|>{{ a }}"):
        ids = build(tokenizer, {"a": "hi"}, template=template).token_ids
        assert ids.count(bos) == 1
        assert ids[0] == bos
    chat = load(add_bos=True, chat_template="{{ bos_token }}{{ messages[0].content }}")
    ids = build(chat, {"m": [{"role": "user", "content": "hi"}]}, messages_column="m").token_ids
    assert ids == [bos, *chat.encode("hi", add_special_tokens=False)]


# Messages


MESSAGES = [{"role": "system", "content": "Be {{ a }}."}, {"role": "user", "content": "{{ b }}"}]


def test_messages_go_through_the_chat_template(tokenizer: Tokenizer) -> None:
    text = text_of(tokenizer, {"a": "brief", "b": "hi"}, messages=MESSAGES)
    assert text == "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"
    text = text_of(tokenizer, {"a": "x", "b": "y"}, messages=MESSAGES, add_generation_prompt=False)
    assert text == "<|system|>Be x.<|end|><|user|>y<|end|>"
    text = text_of(tokenizer, {"a": "x", "b": "y"}, messages=MESSAGES, continue_final_message=True)
    assert text == "<|system|>Be x.<|end|><|user|>y"


@pytest.mark.parametrize(
    ("data", "error"), [({"a": 1}, "missing"), ({"a": 1, "b": None}, "null"), ({"a": 1, "b": []}, "list")]
)
def test_a_message_without_text_is_a_row_error(tokenizer: Tokenizer, data: dict[str, Any], error: str) -> None:
    found = str(build(tokenizer, data, messages=MESSAGES).error)
    assert "prompt.messages.1.content" in found
    assert error in found


def test_the_template_gets_its_keywords(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(chat_template="{{ messages[0].content }}{% if thinking %} think{% endif %}")
    data = {"m": [{"role": "user", "content": "x"}]}
    assert text_of(tokenizer, data, messages_column="m", chat_template_kwargs={"thinking": True}) == "x think"


USER = {"role": "user", "content": "hi"}
CALL = {"id": "0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([USER], "<|user|>hi<|end|>"),
        (json.dumps([USER]), "<|user|>hi<|end|>"),
        (json.dumps([USER]).encode(), "<|user|>hi<|end|>"),
        ([USER | {"name": None, "tool_calls": None}], "<|user|>hi<|end|>"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "<|user|>a\nb<|end|>",
        ),
        ([{"role": "user", "content": ""}], "<|user|><|end|>"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "<|user|>hi<|end|><|assistant|><|end|>"),
        ([{"role": "wizard", "content": "x"}], "<|wizard|>x<|end|>"),
    ],
)
def test_messages_of_a_column(tokenizer: Tokenizer, messages: Any, text: str) -> None:
    assert text_of(tokenizer, {"m": messages}, messages_column="m") == text + "<|assistant|>"


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (None, "missing_value: 'm' is null"),
        ([], "bad_prompt: messages have to be a list"),
        ("not a list", "bad_prompt: messages: not JSON"),
        (b"\xff", "bad_prompt: messages: "),
        ('{"role": "user"}', "bad_prompt: messages have to be a list"),
        (["hi"], "bad_prompt: message 0 is not an object"),
        ([USER, {"content": "x"}], "bad_prompt: message 1 has no role"),
        ([{"role": 1, "content": "x"}], "bad_prompt: message 0 has no role"),
        ([{"role": "user"}], "bad_prompt: message 0: content has to be text"),
        ([{"role": "user", "content": None}], "bad_prompt: message 0: content has to be text"),
        ([{"role": "user", "content": 7}], "bad_prompt: message 0: content has to be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "bad_prompt: message 0: a content part"),
        ([{"role": "user", "content": ["x"]}], "bad_prompt: message 0: a content part"),
    ],
)
def test_messages_of_the_wrong_shape_are_row_errors(tokenizer: Tokenizer, messages: Any, error: str) -> None:
    assert str(build(tokenizer, {"m": messages}, messages_column="m").error).startswith(error)


def test_null_fields_do_not_reach_the_template(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(chat_template="{{ messages[0] | tojson }}")
    call = {"function": {"name": "f", "arguments": {"x": None, "y": 1}}, "id": None}
    data = {"m": [{"role": "assistant", "content": None, "name": None, "tool_calls": [call]}]}
    assert json.loads(text_of(tokenizer, data, messages_column="m")) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"y": 1}}}],
    }


def test_what_the_template_refuses_is_quoted(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(
        chat_template="{% if messages|length == 2 %}{{ raise_exception('System role not supported') }}{% endif %}x"
    )
    error = build(tokenizer, {"a": "x", "b": "y"}, messages=MESSAGES).error
    assert str(error).startswith("bad_prompt: ")
    assert "System role not supported" in str(error)


def test_messages_need_a_chat_template(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(chat_template=None)
    for spec in (PromptSpec(messages=MESSAGES), PromptSpec(messages_column="m")):
        with pytest.raises(JobError, match="no chat template"):
            PromptBuilder(spec, SamplingSpec(), tokenizer, 100)


# Token ids


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([5, 0, 261], None),
        (None, "missing_value: 'ids' is null"),
        ([], "bad_prompt: the prompt is empty"),
        ([1, 9999], "bad_prompt: token id 9999: the tokenizer's go from 0 to 261"),
        ([-1], "bad_prompt: token id -1"),
        ([1.0], "bad_prompt: token ids have to be a list"),
        ([True], "bad_prompt: token ids have to be a list"),
        ("1 2", "bad_prompt: token ids have to be a list"),
        ([1] * 512, "prompt_too_long: 512 tokens; the limit is 511"),
    ],
)
def test_token_ids_of_a_column(tokenizer: Tokenizer, ids: Any, error: str | None) -> None:
    prepared = build(tokenizer, {"ids": ids}, token_ids_column="ids")
    if error is None:
        assert prepared.token_ids == ids
    else:
        assert str(prepared.error).startswith(error)


# Sampling


def test_a_row_may_have_its_own_sampling(tokenizer: Tokenizer) -> None:
    sampling = SamplingSpec(temperature=0.5, max_tokens=7, seed=3, from_column="params")
    for value in ({"max_tokens": 9, "seed": None}, '{"max_tokens": 9}'):
        prepared = build(tokenizer, {"a": "x", "params": value}, template="{{ a }}", sampling=sampling)
        assert prepared.params is not None
        assert (prepared.params.max_tokens, prepared.params.temperature, prepared.params.seed) == (9, 0.5, 3)
        assert not prepared.own_seed
    seeded = build(tokenizer, {"a": "x", "params": {"seed": 0}}, template="{{ a }}", sampling=sampling)
    assert seeded.own_seed
    for data in ({"a": "x"}, {"a": "x", "params": None}, {"a": "x", "params": {}}):
        plain = build(tokenizer, data, template="{{ a }}", sampling=sampling)
        assert plain.params is not None
        assert plain.params.max_tokens == 7
        assert not plain.own_seed


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"max_tokenz": 1}, "bad_sampling: max_tokenz: unknown parameter; did you mean max_tokens?"),
        ({"from_column": "x"}, "bad_sampling: from_column: unknown parameter; known are temperature, "),
        ({"temperature": -1}, "bad_sampling: temperature: must be at least 0.0, not -1"),
        ({"temperature": "hot"}, "bad_sampling: temperature: "),
        ({"max_tokens": True}, "bad_sampling: max_tokens: "),
        ({"n": 2}, "bad_sampling: n: more than one sample"),
        ({"min_tokens": 99}, "bad_sampling: min_tokens (99) is above max_tokens (16)"),
        ([1], "bad_sampling: column 'params' has to hold an object"),
        ("{", "bad_sampling: column 'params': not JSON"),
        (3, "bad_sampling: column 'params' has to hold an object"),
    ],
)
def test_bad_sampling_is_a_row_error(tokenizer: Tokenizer, value: Any, error: str) -> None:
    sampling = SamplingSpec(from_column="params")
    prepared = build(tokenizer, {"a": "x", "params": value}, template="{{ a }}", sampling=sampling)
    assert str(prepared.error).startswith(error)


# Length


def test_a_prompt_may_have_all_but_one_token_of_the_context(tokenizer: Tokenizer) -> None:
    assert build(tokenizer, {"a": "x" * 99}, template="{{ a }}", max_model_len=100).error is None
    error = build(tokenizer, {"a": "x" * 100}, template="{{ a }}", max_model_len=100).error
    assert error == "prompt_too_long: 100 tokens; the limit is 99"


@pytest.mark.parametrize("characters", [150, 500_000])
def test_a_prompt_can_be_cut_instead(load: Callable[..., Tokenizer], characters: int) -> None:
    tokenizer = load(add_bos=True)
    data = {"a": "a" + "x" * characters + "z"}

    def cut(side: str, max_tokens: int) -> str:
        return text_of(
            tokenizer,
            data,
            template="{{ a }}",
            too_long=f"truncate_{side}",
            max_model_len=100,
            sampling=SamplingSpec(max_tokens=max_tokens),
        )

    assert cut("right", 10) == "<|bos|>a" + "x" * 88
    assert cut("left", 10) == "<|bos|>" + "x" * 88 + "z"
    assert cut("left", 1000) == "<|bos|>" + "x" * 48 + "z"


def test_a_huge_prompt_is_measured_without_encoding_it(tokenizer: Tokenizer) -> None:
    begun = time.monotonic()
    error = build(tokenizer, {"a": "x " * 5_000_000}, template="{{ a }}").error
    assert error == "prompt_too_long: about 10000000 tokens; the limit is 511"
    assert time.monotonic() - begun < 5


def test_a_long_text_of_few_tokens_fits(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load()
    text = "<|end|>" * 30_000
    ids = build(tokenizer, {"a": text}, template="{{ a }}", max_model_len=40_000).token_ids
    assert len(ids) == 30_000
    short = build(tokenizer, {"a": "<|end|>" * 29_000}, template="{{ a }}", max_model_len=29_001)
    assert len(short.token_ids) == 29_000


# Order


@given(st.lists(st.lists(st.integers(0, 300), max_size=6), max_size=20))
def test_prefix_order_is_the_order_of_token_ids(prompts: list[list[int]]) -> None:
    rows = [PreparedRow(number, ids) for number, ids in enumerate(prompts)]
    ordered = prefix_order(rows)
    assert [(row.token_ids, row.row) for row in ordered] == sorted((row.token_ids, row.row) for row in rows)
