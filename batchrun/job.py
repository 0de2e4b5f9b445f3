"""The job file: a YAML document validated into a :class:`JobSpec`, every error naming file, line and field.

What can change a result stands under ``model``, ``prompt`` and ``sampling``; nothing under ``engine`` does.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from batchrun.errors import JobError, without_credentials
from batchrun.faults import FieldPath, describe, dotted, unknown_name
from batchrun.sampling import Float, Int, SamplingParams, no_bool
from batchrun.text import parse_slurm_time


def expand_path(path: str) -> str:
    """``path`` with ``~``, ``$NAME`` and ``${NAME}`` replaced; ``$$`` is a dollar sign. ValueError: NAME is not set."""

    def value(match: re.Match[str]) -> str:
        name = match[1].strip("{}")
        if name != "$" and name not in os.environ:
            raise ValueError(f"environment variable {name} is not set (write $$ for a dollar sign)")
        return "$" if name == "$" else os.environ[name]

    return os.path.expanduser(re.sub(r"\$(\$|\w+|\{\w+\})", value, path))  # noqa: PTH111 - not always a local path


def _check_template(template: str) -> str:
    from batchrun.data.template import RowTemplate

    try:
        RowTemplate(template, "template")
    except JobError as error:
        raise ValueError(str(error)) from None
    return template


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line of printable characters")
    return text


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_memory(text: str) -> str:
    if not re.fullmatch(r"\d+[KMGT]?", text, re.IGNORECASE):
        raise ValueError(f"must be a size as Slurm writes it, such as 64G, not {text!r}")
    return text


def _check_time(text: str) -> str:
    parse_slurm_time(text)
    return text


def _check_log_directory(path: str) -> str:
    if "\\" in path:
        raise ValueError("must have no backslash, by which Slurm would take its name literally")
    return path


def _check_directive(text: str) -> str:
    option = re.match(r"--([a-z][a-z-]*)(?=[= ]|$)|-([a-zA-Z])", text)
    if option is None:
        raise ValueError(f"must be an option of sbatch such as --constraint=a100, not {text!r}")
    if key := _OWN_DIRECTIVES.get(option[1] or option[2]):
        raise ValueError(f"{option[0]} is batchrun's to set; use slurm.{key}")
    return text


def _no_as_off(value: Any) -> Any:
    return "off" if value is False else value  # what ``off`` is in YAML 1.1


def _off_as_method(value: Any) -> Any:
    return {"method": "off"} if value in (None, False, "off") else value


Auto = Literal["auto"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "auto", "dequantize", "int8", "int4", "fp8"]
KVCacheDType = Literal["auto", "bf16", "fp8", "int8", "int4"]
PathText = Annotated[str, Field(min_length=1), AfterValidator(expand_path)]
Template = Annotated[str, AfterValidator(_check_template)]
OneLine = Annotated[str, Field(min_length=1), AfterValidator(_one_line)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSpec(_Section):
    """Which model, and every choice about it that changes what it answers."""

    name_or_path: PathText
    revision: str | None = None
    dtype: DType = "auto"
    quantization: Quantization = "none"  # of the linear layers, embedding and output projection left out
    kv_cache_dtype: KVCacheDType = "auto"  # the model's dtype
    reproducible: bool = False
    max_model_len: Annotated[Int, Field(ge=1)] | Auto = "auto"


class InputSpec(_Section):
    """Where rows come from."""

    path: PathText | Annotated[tuple[PathText, ...], Field(min_length=1)]
    format: Literal["auto", "jsonl", "parquet", "datasets", "openai-batch"] = "auto"
    id_column: Annotated[str | None, Field(validate_default=True)] = None  # of openai-batch: custom_id
    columns: tuple[str, ...] | None = None
    where: Any = None  # pyarrow-style filter in disjunctive normal form: [[column, op, value], ...] or a list of those
    split_rows: Annotated[Int, Field(ge=1, le=50_000)] = 50_000
    storage_options: dict[str, Any] = {}
    dataset_options: dict[str, Any] = {}  # keywords of datasets.load_dataset: name, split, data_files, ...

    @field_validator("id_column")
    @classmethod
    def _of_batch(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("format") != BATCH_FORMAT:
            return value
        if value not in (None, BATCH_ID):
            raise ValueError(f"is {BATCH_ID} with input.format: {BATCH_FORMAT}")
        return BATCH_ID

    @field_validator("columns")
    @classmethod
    def _whole_lines(cls, value: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        if value is not None and info.data.get("format") == BATCH_FORMAT:
            raise ValueError(f"lines of {BATCH_FORMAT} are read whole; leave it out")
        return value

    @field_validator("dataset_options")
    @classmethod
    def _of_datasets(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if value and info.data.get("format", "datasets") != "datasets":
            raise ValueError("goes with input.format: datasets alone")
        return value


class Message(_Section):
    role: str
    content: Template


RERUN_KINDS = ("failed", "truncated", "all")  # of done rows that can be run again
BATCH_FORMAT: Final = "openai-batch"
BATCH_ID = "custom_id"  # the column that labels its lines
PROMPT_FORMS = ("template", "messages", "messages_column", "token_ids_column")


class PromptSpec(_Section):
    """How a row becomes token ids. One of the four forms is given, or none where each row holds a request."""

    template: Template | None = None
    messages: Annotated[tuple[Message, ...], Field(min_length=1)] | None = None
    messages_column: str | None = None
    token_ids_column: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    too_long: Literal["error", "truncate_left", "truncate_right"] = "error"

    @model_validator(mode="after")
    def _one_form(self) -> PromptSpec:
        if len(self.forms) > 1:
            raise ValueError(f"needs exactly one of {', '.join(PROMPT_FORMS)}, not {' and '.join(self.forms)}")
        return self

    @property
    def forms(self) -> list[str]:
        """Which of :data:`PROMPT_FORMS` are given."""
        return [form for form in PROMPT_FORMS if getattr(self, form) is not None]


class SamplingSpec(SamplingParams):
    """Sampling of the whole job; ``from_column`` names a column that holds an object of per-row overrides."""

    seed: Int | None = 0
    from_column: str | None = None


class OutputSpec(_Section):
    """Where results go."""

    path: PathText
    format: Literal["parquet", "jsonl", "openai-batch"] = "parquet"
    columns: dict[str, Annotated[str, Field(min_length=1)]] = {}  # result column -> name in the output
    keep_columns: bool | tuple[str, ...] = True  # input columns that are carried through
    checkpoint_seconds: Annotated[Float, Field(gt=0)] = 30.0
    storage_options: dict[str, Any] = {}


class SpeculativeSpec(_Section):
    """How to guess the tokens that follow, several of which one step then verifies. Moves time, never results."""

    method: Annotated[Literal["auto", "ngram", "suffix", "draft_model", "off"], BeforeValidator(_no_as_off)] = (
        "auto"  # draft_model where there is a model, else suffix
    )
    model: Annotated[PathText | None, Field(validate_default=True)] = None  # the draft model
    quantization: Literal["none", "dequantize", "int8", "int4", "fp8"] = "none"  # of the draft model
    num_speculative_tokens: Annotated[Int, Field(ge=1, le=64)] | Auto = "auto"  # most of one sequence in a step

    @field_validator("model")
    @classmethod
    def _of_method(cls, value: str | None, info: ValidationInfo) -> str | None:
        method = info.data.get("method")
        if value is None and method == "draft_model":
            raise ValueError("method draft_model needs model: a smaller one with the same tokenizer")
        if value is not None and method in ("ngram", "suffix"):
            raise ValueError(f"goes with method: draft_model or auto, not {method}; null takes it out")
        return value

    @field_validator("quantization")
    @classmethod
    def _of_model(cls, value: str, info: ValidationInfo) -> str:
        if value != "none" and info.data.get("model", "") is None:
            raise ValueError("is the draft model's, and no model is given")
        return value

    @property
    def drafter(self) -> Literal["ngram", "suffix", "draft_model"] | None:
        """What guesses; None: nothing does."""
        if self.method == "auto":
            return "suffix" if self.model is None else "draft_model"
        return None if self.method == "off" else self.method


class EngineSpec(_Section):
    """How the engine uses the machine. Nothing here changes what a result means."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_num_seqs: Annotated[Int, Field(ge=1)] | Auto = "auto"
    max_num_batched_tokens: Annotated[Int, Field(ge=1)] | Auto = "auto"
    kv_cache_memory: Annotated[ByteSize, no_bool("byte_size"), Field(ge=1)] | Auto = (
        "auto"  # bytes, or text such as 512MiB
    )
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = 0.9
    block_size: Annotated[Int, Field(ge=2, multiple_of=2)] = 32
    enable_prefix_caching: bool = True
    num_threads: Annotated[Int, Field(ge=1)] | Auto = "auto"
    speculative_config: Annotated[SpeculativeSpec, BeforeValidator(_off_as_method)] = SpeculativeSpec()


class ErrorsSpec(_Section):
    """What row errors do to the job."""

    on_error: Literal["record", "fail"] = "record"
    error_threshold: Annotated[Float, Field(ge=0, le=1)] | None = None  # fraction of rows; null: no limit


_OWN_DIRECTIVES = {  # option of sbatch -> the key of SlurmSpec that decides it
    "array": "array",
    "a": "array",
    "error": "logs",
    "e": "logs",
    "no-requeue": "requeue",
    "open-mode": "logs",
    "output": "logs",
    "o": "logs",
    "requeue": "requeue",
    "signal": "signal_seconds",
}


class SlurmSpec(_Section):
    """What ``submit --slurm`` asks of Slurm. Nothing here changes what a result means."""

    partition: OneLine | None = None
    account: OneLine | None = None
    qos: OneLine | None = None
    gpus: Annotated[Int, Field(ge=1)] | None = None  # of each task, as are cpus and mem
    cpus: Annotated[Int, Field(ge=1)] | None = None
    mem: Annotated[OneLine, BeforeValidator(_number_as_text), AfterValidator(_check_memory)] | None = None
    time: Annotated[OneLine, BeforeValidator(_number_as_text), AfterValidator(_check_time)] | None = None
    array: Annotated[Int, Field(ge=1)] = 1  # tasks
    max_running: Annotated[Int, Field(ge=1)] | None = None
    requeue: bool = True
    signal_seconds: Annotated[Int, Field(ge=1, le=65535, validate_default=True)] = 120  # before the time limit
    setup: str = ""  # shell commands that each task begins with
    directives: tuple[Annotated[OneLine, AfterValidator(_check_directive)], ...] = ()
    logs: Annotated[PathText, AfterValidator(_one_line), AfterValidator(_check_log_directory)] | None = None

    @field_validator("signal_seconds")
    @classmethod
    def _within_time(cls, value: int, info: ValidationInfo) -> int:
        limit = info.data.get("time")
        if limit is not None and value >= parse_slurm_time(limit):
            raise ValueError(f"signal_seconds is {value}, and time only {parse_slurm_time(limit)} seconds")
        return value


_NO_PROMPT = PromptSpec()


class JobSpec(_Section):
    """One job: rows in, a model, committed results out."""

    name: str = "job"
    model: ModelSpec
    input: InputSpec
    prompt: PromptSpec = Field(default_factory=lambda: _NO_PROMPT, validate_default=True)
    sampling: SamplingSpec = SamplingSpec()
    output: OutputSpec
    engine: EngineSpec = EngineSpec()
    errors: ErrorsSpec = ErrorsSpec()
    slurm: SlurmSpec = SlurmSpec()
    _places: _Places | None = PrivateAttr(default=None)  # of a job that was made in Python there are none

    @field_validator("prompt")
    @classmethod
    def _prompts_known(cls, value: PromptSpec, info: ValidationInfo) -> PromptSpec:
        """Prompts come from the job, or from the lines of an OpenAI batch file, and never from both."""
        if "input" not in info.data:  # it has faults of its own
            return value
        if info.data["input"].format == BATCH_FORMAT:
            if value.forms:
                raise ValueError(f"lines of {BATCH_FORMAT} hold their own prompts; leave {value.forms[0]} out")
        elif value is _NO_PROMPT:
            raise PydanticCustomError("missing", "missing")
        elif not value.forms:
            raise ValueError(f"needs exactly one of {', '.join(PROMPT_FORMS)}, and none is given")
        return value

    @field_validator("sampling")
    @classmethod
    def _sampling_known(cls, value: SamplingSpec, info: ValidationInfo) -> SamplingSpec:
        if value.from_column is not None and "input" in info.data and info.data["input"].format == BATCH_FORMAT:
            raise ValueError(f"lines of {BATCH_FORMAT} hold their own parameters; leave from_column out")
        return value

    def located(self, faults: Iterable[str]) -> list[str]:
        """``faults``, each beginning with the field that it is about (``input.path: ...``), as lines for a user.

        Before the field stands where it was given, as far as that is known, and the lines are in that order.
        """
        if self._places is None:
            return list(faults)
        return self._places.lines((_field(name), text) for name, _, text in (fault.partition(": ") for fault in faults))

    def configuration(self, *, revision: str, dtype: str, max_model_len: int, numerics: str) -> dict[str, Any]:
        """What the results depend on, as plain JSON data: two runs may share an output only where these are equal.

        The caller supplies what the job file leaves open: the ``revision`` that identifies the model's files, its
        ``dtype``, its context, and the name of the ``numerics`` that it runs with. Paths, the model's among them,
        credentials, limits and everything under ``engine``, ``errors`` and ``slurm`` are left out.
        """
        model = {
            "revision": revision,
            "dtype": dtype,
            "quantization": self.model.quantization,
            "kv_cache_dtype": self.model.kv_cache_dtype,
            "max_model_len": max_model_len,
            "reproducible": self.model.reproducible,
            "numerics": numerics,
        }
        return {
            "model": model,
            "input": self.input.model_dump(mode="json", exclude=_NOT_IN_CONFIGURATION),
            "prompt": self.prompt.model_dump(mode="json"),
            "sampling": self.sampling.model_dump(mode="json"),
            "output": self.output.model_dump(mode="json", include={"format", "columns", "keep_columns"}),
        }


_NOT_IN_CONFIGURATION: Any = {  # of the input: where it lies, and what opens it
    "path": True,
    "storage_options": True,
    "dataset_options": {"token", "storage_options", "download_config", "cache_dir"},
}
_SECRET_KEYS = {"storage_options", "token", "download_config"}
_NOT_YET = {"tensor_parallel_size", "trust_remote_code"}


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The job of a YAML file, with ``a.b=value`` overrides (the value is YAML) applied in order.

    Raises JobError with one line for each fault: ``jobs/x.yaml:7: model.dtpye: unknown key; did you mean dtype?``.
    Of an override the name is shown and never the value, which may be secret.
    """
    document = _Document(str(path))
    data, fields = document.data, []
    for override in overrides:
        data, field = _override(data, override)
        fields.append(field)
    places = _Places(document, tuple(fields))
    try:
        job = JobSpec.model_validate(data)
    except ValidationError as error:
        faults = sorted(describe(error, data, _unknown_key).items(), key=lambda fault: dotted(fault[0]))
        raise JobError("\n".join(places.lines(faults))) from None
    job._places = places
    return job


def output_of(target: str, overrides: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Path or URL and storage options of an output, named by a job file or by itself."""
    if not Path(target).is_file():
        return target, {}
    output = load_job(target, overrides).output
    return output.path, output.storage_options


def secret_overrides(overrides: Sequence[str]) -> list[str]:
    """The names of those overrides that give what is never to be written down: storage options, tokens, signed URLs."""
    found = []
    for override in overrides:
        given, field = _override({}, override)
        if _has_secret(given):
            found.append(dotted(field))
    return found


def _has_secret(value: Any) -> bool:
    if isinstance(value, dict):
        return any(key in _SECRET_KEYS or _has_secret(item) for key, item in value.items())
    if isinstance(value, list):
        return any(map(_has_secret, value))
    return isinstance(value, str) and without_credentials(value) != value


@dataclass(frozen=True)
class _Places:
    """Where the fields of a job were given: the lines of its file, and the overrides in their order."""

    document: _Document
    overrides: tuple[FieldPath, ...]

    def lines(self, faults: Iterable[tuple[FieldPath, str]]) -> list[str]:
        """A line for each fault; those of the file come first, in its order, and those of a line as given."""
        found: list[tuple[int, int, str]] = []  # (0, line of the file) or (1, number of the override)
        for field, message in faults:
            setter = self._setter(field)
            if setter is None:
                line = self.document.line(field)
                found.append((0, line, f"{self.document.path}:{line}: {dotted(field)}: {message}"))
            else:
                name = dotted(self.overrides[setter])
                text = message if self.overrides[setter] == field else f"{dotted(field)}: {message}"
                found.append((1, setter, f"--set {name}: {text}"))
        return [text for *_, text in sorted(found, key=lambda fault: fault[:2])]

    def _setter(self, field: FieldPath) -> int | None:
        """The last override that set ``field`` or something around it, or was the first to give anything within it."""
        is_new = not self.document.has(field)
        setters = [
            number
            for number, place in enumerate(self.overrides)
            if field[: len(place)] == place or (is_new and place[: len(field)] == field)
        ]
        return setters[-1] if setters else None


class _Document:
    """A YAML file as plain data, with the line of each field."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise JobError(f"{path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise JobError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
        self.root, self.data, faults = _parse(text)
        if self.root is None or not isinstance(self.data, dict):
            faults = faults or [(1, "a job file is a mapping with model, input, prompt and output")]
        if faults:
            raise JobError("\n".join(f"{path}:{line}: {message}" for line, message in faults))

    def line(self, field: FieldPath) -> int:
        """The line, from 1, of the deepest part of ``field`` that the file has."""
        return [1, *self._lines(field)][-1]

    def has(self, field: FieldPath) -> bool:
        return len(list(self._lines(field))) == len(field)

    def _lines(self, field: FieldPath) -> Iterator[int]:
        """The line of each part of ``field``, as far as the file has them."""
        node = self.root
        for key in field:
            if isinstance(node, MappingNode):
                found = next(((k, v) for k, v in node.value if k.value == key), None)
                if found is None:
                    return
                yield found[0].start_mark.line + 1
                node = found[1]
            elif isinstance(node, SequenceNode) and isinstance(key, int) and key < len(node.value):
                node = node.value[key]
                yield node.start_mark.line + 1
            else:
                return


def _parse(text: str) -> tuple[Node | None, Any, list[tuple[int, str]]]:
    """The node tree and plain data of a YAML document, and its faults as (line, message)."""
    yaml = YAML(typ="safe", pure=True)
    faults: list[tuple[int, str]] = []
    try:
        root = yaml.compose(text)
        data = None if root is None else _construct(yaml, root, (), (), faults)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return None, None, [(mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}")]
    except (YAMLError, ValueError) as error:
        return None, None, [(1, f"not YAML: {str(error).splitlines()[0]}")]
    except RecursionError:
        return None, None, [(1, "nested too deeply")]
    return root, data, faults


def _construct(
    yaml: YAML, node: Node, field: FieldPath, parents: tuple[int, ...], faults: list[tuple[int, str]]
) -> Any:
    """Plain data of ``node``. Repeated keys, keys that are no text and nodes inside themselves become faults."""
    line = node.start_mark.line + 1
    if id(node) in parents:
        faults.append((line, f"{dotted(field)}: contains itself"))
        return None
    parents = (*parents, id(node))
    if isinstance(node, SequenceNode):
        return [_construct(yaml, item, (*field, i), parents, faults) for i, item in enumerate(node.value)]
    if not isinstance(node, MappingNode):
        return yaml.constructor.construct_object(node)
    yaml.constructor.flatten_mapping(node)  # merge keys: <<
    data: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = yaml.constructor.construct_object(key_node) if isinstance(key_node, ScalarNode) else None
        if not isinstance(key, str):
            faults.append((key_node.start_mark.line + 1, f"{dotted(field)}: a key has to be text; quote it"))
        elif key in data:
            faults.append((key_node.start_mark.line + 1, f"{dotted((*field, key))}: given twice"))
        else:
            data[key] = _construct(yaml, value_node, (*field, key), parents, faults)
    return data


def _override(data: Any, override: str) -> tuple[Any, FieldPath]:
    """``data`` with ``a.b=value`` applied, and the field it names. Nothing is changed in place."""
    name, equals, text = override.partition("=")
    if not equals or not all(name.split(".")):
        shown = re.split(r"[^\w.]", name)[0]  # what follows may be a value
        raise JobError(f"--set {shown}: has to read section.key=value")
    value: Any = text
    if not text.startswith(("{{", "{%")):  # a Jinja template, not a YAML mapping
        _, value, faults = _parse(text)
        if faults:
            raise JobError(f"--set {name}: {faults[0][1]}")
    field = _field(name)
    try:
        return _replaced(data, field, value), field
    except (TypeError, IndexError):
        raise JobError(f"--set {name}: is not within a mapping or a list of the job") from None


def _replaced(data: Any, field: FieldPath, value: Any) -> Any:
    if not field:
        return value
    key, rest = field[0], field[1:]
    if isinstance(data, list) and isinstance(key, int):
        return [*data[:key], _replaced(data[key], rest, value), *data[key + 1 :]]
    if data is None or isinstance(data, dict):
        data = data or {}
        return data | {str(key): _replaced(data.get(str(key)), rest, value)}
    raise TypeError


def _unknown_key(field: FieldPath) -> str:
    name = str(field[-1])
    if name in _NOT_YET:
        return "not supported yet"
    sections = {key: _keys(info.annotation) for key, info in JobSpec.model_fields.items()}
    here = list(Message.model_fields) if isinstance(field[-2:][0], int) else _keys(_type_at(field[:-1]))
    homes = [section for section, keys in sections.items() if name in keys]
    if homes and not difflib.get_close_matches(name, here, n=1):
        return f"unknown key here; it belongs under {' or '.join(homes)}"
    return unknown_name("key", name, here)


def _type_at(field: FieldPath) -> Any:
    """The type of what the job has at ``field``."""
    found: Any = JobSpec
    for name in field:
        found = found.model_fields[name].annotation
    return found


def _keys(section: Any) -> list[str]:
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []


def _field(name: str) -> FieldPath:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))
