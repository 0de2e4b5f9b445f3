"""The types of kept columns: the one that holds a column's values exactly, and the one that holds several parts'.

Columns of Parquet inputs keep their Arrow types. A column of JSON values gets the type that Arrow infers if that
holds every value exactly; otherwise (mixed types, objects with differing keys, numbers that no 64-bit type holds) it
becomes JSON text: each value as JSON, strings too, null staying null, the field's metadata being :data:`JSON_TEXT`.
Where types differ between tables, they are widened if every value stays exact (integers and floats to float64, null
to anything, missing columns to null), and become JSON text if not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.json_text import dump_json
from batchrun.data.source import python_values

JSON_TEXT = {b"batchrun": b"json"}  # metadata of a field whose strings are JSON

_MAX_NESTING = 20  # levels; deeper values become JSON text
_NATURAL_LEAVES = (pa.null(), pa.bool_(), pa.int64(), pa.float64(), pa.string())


class LossyColumnError(Exception):
    """A column's values do not fit the type that was meant to unite them."""

    def __init__(self, column: str) -> None:
        super().__init__(f"column {column!r} has no common type that holds every value")
        self.column = column


def typed_column(field: pa.Field, values: Any) -> tuple[pa.Field, Any]:
    """A typed input column; nullable, for rows that cannot be read, and as JSON text if Parquet lacks its type."""
    if not _parquet_has(field.type):
        return _json_field(field.name), json_text(python_values(values))
    metadata = {key: value for key, value in (field.metadata or {}).items() if key != b"PARQUET:field_id"}
    return pa.field(field.name, field.type, nullable=True, metadata=metadata or None), values


def natural_column(name: str, values: list[Any]) -> tuple[pa.Field, Any]:
    """A JSON column in the type that holds every value exactly, or as JSON text."""
    array = _natural_array(values)
    if array is not None:
        return pa.field(name, array.type), array
    return _json_field(name), json_text(values)


def _natural_array(values: list[Any]) -> pa.Array | None:
    kinds = {type(value) for value in values} - {type(None)}
    with suppress(pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
        match sorted(kind.__name__ for kind in kinds):
            case []:
                return pa.nulls(len(values))
            case ["str"]:
                return pa.array(values, pa.string())
            case ["int"]:
                return pa.array(values, pa.int64())
            case ["bool"]:
                return pa.array(values, pa.bool_())
            case ["float"]:
                return pa.array(values, pa.float64())
            case ["float", "int"]:
                exact = all(value is None or float(value) == value for value in values)
                return pa.array(values, pa.float64()) if exact else None
            case ["list"] | ["dict"]:
                return _nested_array(values)
    return None


def _nested_array(values: list[Any]) -> pa.Array | None:
    array = pa.array(values)
    if not _is_natural(array.type, _MAX_NESTING) or not _parquet_has(array.type):
        return None
    held = array.to_pylist()
    # Arrow takes true for 1.0 among floats, and Python calls them equal.
    exact = all(map(_is_same, held, values)) if "double" in str(array.type) else held == values
    return array if exact else None


def _is_natural(kind: pa.DataType, levels: int) -> bool:
    """Whether the type has a JSON type at every leaf and is not nested too deep."""
    if pa.types.is_list(kind):
        return levels > 0 and _is_natural(kind.value_type, levels - 1)
    if pa.types.is_struct(kind):
        return levels > 0 and all(_is_natural(field.type, levels - 1) for field in kind)
    return kind in _NATURAL_LEAVES


def _is_same(held: Any, value: Any) -> bool:
    """Whether the value that Arrow holds is the JSON value: equal keys, numbers of equal value, booleans no numbers."""
    if isinstance(value, dict):
        same_keys = isinstance(held, dict) and held.keys() == value.keys()
        return same_keys and all(_is_same(held[key], value[key]) for key in value)
    if isinstance(value, list):
        return isinstance(held, list) and len(held) == len(value) and all(map(_is_same, held, value))
    return isinstance(held, bool) == isinstance(value, bool) and bool(held == value)


@lru_cache(maxsize=1024)
def _parquet_has(kind: pa.DataType) -> bool:
    try:
        pq.ParquetWriter(BytesIO(), pa.schema([("x", kind)])).close()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False
    return True


def unify(schemas: Sequence[pa.Schema], last: Collection[str], *, structs_grow: bool) -> pa.Schema:
    """The one schema that tables of all these can take: columns by first appearance, then those named in ``last``.

    ``structs_grow`` lets objects gain the keys of others, as null. That is right for typed sources, where a struct's
    fields are part of its type, and would change the values of JSON.
    """
    fields: dict[str, pa.Field] = {}
    for schema in schemas:
        for field in schema:
            known = fields.get(field.name)
            fields[field.name] = field if known is None else _merge(known, field, structs_grow)
    trailing = [fields.pop(name) for name in last if name in fields]
    return pa.schema([*fields.values(), *trailing])


def as_json_text(schema: pa.Schema, column: str) -> pa.Schema:
    """The schema with one column as JSON text."""
    return schema.set(schema.get_field_index(column), _json_field(column))


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table in that schema: missing columns null, types widened, JSON text where the schema says so.

    Raises LossyColumnError if a value would change.
    """
    arrays = []
    for field in schema:
        place = table.schema.get_field_index(field.name)
        if place < 0:
            arrays.append(pa.nulls(len(table), field.type))
        elif is_json_text(field) and not is_json_text(table.schema.field(place)):
            arrays.append(json_text(python_values(table.column(place))))
        else:
            arrays.append(_widened(table.column(place), field))
    return pa.Table.from_arrays(arrays, schema=schema)


def json_text(values: list[Any]) -> pa.Array:
    """Each value as JSON, null staying null."""
    return pa.array([None if value is None else dump_json(value) for value in values], pa.string())


def is_json_text(field: pa.Field) -> bool:
    """Whether the field's strings are JSON, each standing for a value."""
    return bool(field.metadata) and JSON_TEXT.items() <= field.metadata.items()


def _widened(column: Any, field: pa.Field) -> Any:
    if column.type == field.type:
        return column
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        raise LossyColumnError(field.name) from None


def _json_field(name: str) -> pa.Field:
    return pa.field(name, pa.string(), metadata=JSON_TEXT)


def _merge(one: pa.Field, other: pa.Field, structs_grow: bool) -> pa.Field:
    if is_json_text(one) or is_json_text(other):
        return _json_field(one.name)
    kind = _merged_type(one.type, other.type, structs_grow)
    if kind is None:
        return _json_field(one.name)
    return (other if pa.types.is_null(one.type) else one).with_type(kind)


def _merged_type(one: pa.DataType, other: pa.DataType, structs_grow: bool) -> pa.DataType | None:
    """The narrowest type that can hold values of both, or None. Whether each value fits is seen when it is cast."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_dictionary(one) or pa.types.is_dictionary(other):
        return _merged_type(_decoded(one), _decoded(other), structs_grow)
    if _is_list(one) and _is_list(other):
        item = _merged_type(one.value_type, other.value_type, structs_grow)
        either_large = pa.types.is_large_list(one) or pa.types.is_large_list(other)
        return item and (pa.large_list(item) if either_large else pa.list_(item))
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return _merged_struct(one, other, structs_grow)
    if pa.types.is_decimal(one) != pa.types.is_decimal(other) and (
        pa.types.is_floating(one) or pa.types.is_floating(other)
    ):
        return None
    try:
        pair = [pa.schema([("x", kind)]) for kind in (one, other)]
        return pa.unify_schemas(pair, promote_options="permissive").field("x").type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


def _merged_struct(one: pa.DataType, other: pa.DataType, structs_grow: bool) -> pa.DataType | None:
    fields = {field.name: field for field in one}
    theirs = {field.name: field for field in other}
    if fields.keys() != theirs.keys() and not structs_grow:
        return None
    for name, field in theirs.items():
        kind = _merged_type(fields[name].type, field.type, structs_grow) if name in fields else field.type
        if kind is None:
            return None
        fields[name] = pa.field(name, kind)
    return pa.struct(list(fields.values()))


def _decoded(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
