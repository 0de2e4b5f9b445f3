"""The job file: a YAML document validated into a :class:`JobSpec`.

What can change a result stands under ``model``, ``prompt`` and ``sampling``; nothing under ``engine`` does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from batchrun.sampling import SamplingParams

Auto = Literal["auto"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSpec(_Section):
    """Which model, and every choice about it that changes what it answers."""

    name_or_path: str
    revision: str | None = None
    dtype: DType = "auto"
    reproducible: bool = False
    max_model_len: Annotated[int, Field(ge=1)] | Auto = "auto"
    trust_remote_code: bool = False


class InputSpec(_Section):
    """Where rows come from."""

    path: str | tuple[str, ...]
    format: Literal["auto", "jsonl", "parquet", "datasets"] = "auto"
    id_column: str | None = None
    columns: tuple[str, ...] | None = None
    where: Any = None  # pyarrow-style filter in disjunctive normal form: [[column, op, value], ...] or a list of those
    split_rows: Annotated[int, Field(ge=1, le=50_000)] = 50_000
    storage_options: dict[str, Any] = {}
    dataset_options: dict[str, Any] = {}  # keywords of datasets.load_dataset: name, split, data_files, ...


class Message(_Section):
    role: str
    content: str


class PromptSpec(_Section):
    """How a row becomes token ids. Exactly one of the four forms is given."""

    template: str | None = None
    messages: tuple[Message, ...] | None = None
    messages_column: str | None = None
    token_ids_column: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    too_long: Literal["error", "truncate_left", "truncate_right"] = "error"


class SamplingSpec(SamplingParams):
    """Sampling of the whole job; ``from_column`` names a column that holds an object of per-row overrides."""

    seed: int | None = 0
    from_column: str | None = None


class OutputSpec(_Section):
    """Where results go."""

    path: str
    format: Literal["parquet", "jsonl"] = "parquet"
    columns: dict[str, str] = {}  # result column -> name in the output
    keep_columns: bool | tuple[str, ...] = True  # input columns that are carried through
    checkpoint_seconds: Annotated[float, Field(gt=0)] = 30.0
    storage_options: dict[str, Any] = {}


class EngineSpec(_Section):
    """How the engine uses the machine. Nothing here changes what a result means."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_num_seqs: Annotated[int, Field(ge=1)] | Auto = "auto"
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | Auto = "auto"
    kv_cache_memory: Annotated[int, Field(ge=1)] | str = "auto"  # bytes, or text such as 512MiB
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    block_size: Annotated[int, Field(ge=1)] = 32
    enable_prefix_caching: bool = True
    num_threads: Annotated[int, Field(ge=1)] | Auto = "auto"


class ErrorsSpec(_Section):
    """What row errors do to the job."""

    on_error: Literal["record", "fail"] = "record"
    error_threshold: Annotated[float, Field(ge=0, le=1)] | None = None  # fraction of rows; null: no limit


class JobSpec(_Section):
    """One job: rows in, a model, committed results out."""

    name: str = "job"
    model: ModelSpec
    input: InputSpec
    prompt: PromptSpec
    sampling: SamplingSpec = SamplingSpec()
    output: OutputSpec
    engine: EngineSpec = EngineSpec()
    errors: ErrorsSpec = ErrorsSpec()
