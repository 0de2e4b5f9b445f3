"""How tokens are chosen: vLLM's names and defaults, validated once for job files, rows and the Python API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, LiteralString

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from batchrun.faults import describe_arguments

_GREEDY_BELOW = 1e-5  # temperatures by which logits cannot be divided; as in vLLM


def no_bool(kind: LiteralString) -> BeforeValidator:
    """Refuses true and false, which Python takes for numbers, as an error of pydantic's type ``kind``."""

    def check(value: Any) -> Any:
        if isinstance(value, bool):
            raise PydanticCustomError(kind, "true and false are no numbers")
        return value

    return BeforeValidator(check)


Int = Annotated[int, no_bool("int_type")]
Float = Annotated[float, no_bool("float_type")]


class SamplingParams(BaseModel):
    """Sampling parameters of one request.

    Names, defaults and meanings follow vLLM's ``SamplingParams``. Order of application: repetition, presence and
    frequency penalties, then ``min_tokens``, ``temperature``, ``min_p``, ``top_k``, ``top_p``. ``temperature: 0``
    is greedy. ``logprobs`` and ``prompt_logprobs`` are those of the model's raw distribution, before all of these.

    ``seed`` makes a request's randomness depend on nothing else: equal prompt, parameters and seed give equal text.

    Raises ValueError, in one line, for names that do not exist and bad values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Annotated[Float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[Float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[Int, Field(ge=-1)] = 0
    min_p: Annotated[Float, Field(ge=0.0, le=1.0)] = 0.0
    max_tokens: Annotated[Int, Field(ge=1)] = 16
    min_tokens: Annotated[Int, Field(ge=0)] = 0
    n: Int = 1
    seed: Int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[Annotated[Int, Field(ge=0)], ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: Annotated[Int, Field(ge=0, le=100)] | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0, le=100)] | None = None
    repetition_penalty: Annotated[Float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    presence_penalty: Annotated[Float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[Float, Field(ge=-2.0, le=2.0)] = 0.0
    skip_special_tokens: bool = True
    response_format: Any = None

    if not TYPE_CHECKING:  # which knows the fields as arguments

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ValueError(describe_arguments(error, values, type(self).model_fields)) from None

        __init__.__pydantic_base_init__ = True  # within a job, pydantic validates the fields without it

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_tuple(cls, value: Any) -> Any:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stop_not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("a stop string must not be empty")
        return value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _no_ids(cls, value: Any) -> Any:
        return () if value is None else value

    @field_validator("n")
    @classmethod
    def _one_sample(cls, value: int) -> int:
        if value != 1:
            raise ValueError("more than one sample per row is not supported yet; n must be 1")
        return value

    @field_validator("response_format")
    @classmethod
    def _no_grammar(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("structured output is not supported yet")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def override(self, changes: dict[str, Any]) -> SamplingParams:
        """These parameters with some replaced.

        Raises ``pydantic.ValidationError`` on an unknown name or a bad value.
        """
        return type(self).model_validate(self.model_dump() | changes) if changes else self
