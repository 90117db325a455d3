"""What FlashInfer Trace asks of its documents, as flashinfer-bench 0.1.2 documents it: docs/flashinfer-trace
and flashinfer_bench/data of github.com/flashinfer-ai/flashinfer-bench, in words of our own."""

from __future__ import annotations

import ast
import json
import struct
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

DTYPES = {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1"}
DTYPES |= {"int64", "int32", "int16", "int8", "bool"}
LANGUAGES = {"python", "triton", "cpp", "cuda", "tilelang"}
#: Which of correctness and performance are there by status.
NULLABLE = {"PASSED": (True, True), "INCORRECT_NUMERICAL": (True, False)}
FAILED = ("INCORRECT_SHAPE", "INCORRECT_DTYPE", "RUNTIME_ERROR", "COMPILE_ERROR", "TIMEOUT")
NULLABLE |= dict.fromkeys(FAILED, (False, False))


def check_fields(document: Any, required: dict[str, Any], optional: dict[str, Any] | None = None) -> None:
    """All required fields are there, of their types, and none that is unknown."""
    known = required | (optional or {})
    assert isinstance(document, dict)
    assert set(required) <= set(document) <= set(known), set(document) ^ set(required)
    for name, value in document.items():
        assert isinstance(value, known[name]) and not (known[name] is int and isinstance(value, bool)), name
        assert known[name] is not str or value, f"{name} is empty"


def check_definition(document: Any) -> None:
    required = {"name": str, "op_type": str, "axes": dict, "inputs": dict, "outputs": dict, "reference": str}
    check_fields(document, required, {"tags": list, "description": str, "constraints": list})
    for axis in document["axes"].values():
        assert axis["type"] in ("const", "var")
        check_fields(axis, {"type": str, **({"value": int} if axis["type"] == "const" else {})})
    assert not document["inputs"].keys() & document["outputs"].keys()
    for tensor in (*document["inputs"].values(), *document["outputs"].values()):
        check_fields(tensor, {"shape": list | None, "dtype": str}, {"description": str})
        assert tensor["dtype"] in DTYPES and set(tensor["shape"] or ()) <= document["axes"].keys()
    for constraint in document.get("constraints", ()):
        ast.parse(constraint, mode="eval")
    assert arguments_of(document["reference"]) == list(document["inputs"])


def arguments_of(source: str) -> list[str]:
    """The names of what a module's function ``run`` takes."""
    (run,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "run"
    )
    return [each.arg for each in run.args.args]


def check_solution(document: Any, definition: Any) -> None:
    required = {"name": str, "definition": str, "author": str, "spec": dict, "sources": list}
    check_fields(document, required, {"description": str})
    spec = document["spec"]
    optional = {"dependencies": list, "destination_passing_style": bool, "binding": str}
    check_fields(spec, {"language": str, "target_hardware": list, "entry_point": str}, optional)
    assert spec["language"] in LANGUAGES and spec["target_hardware"] and document["sources"]
    file, function = spec["entry_point"].split("::")
    sources = {}
    for each in document["sources"]:
        check_fields(each, {"path": str, "content": str})
        path = PurePosixPath(each["path"])
        assert not path.is_absolute() and ".." not in path.parts and each["path"] not in sources
        sources[each["path"]] = each["content"]
    assert function == "run" and document["definition"] == definition["name"]
    wanted = list(definition["inputs"])
    wanted += list(definition["outputs"]) if spec.get("destination_passing_style", True) else []
    assert arguments_of(sources[file]) == wanted


def check_workload(document: Any, definition: Any, root: Path) -> None:
    check_fields(document, {"uuid": str, "axes": dict, "inputs": dict})
    axes = definition["axes"]
    assert document["axes"].keys() == {name for name, axis in axes.items() if axis["type"] == "var"}
    assert all(type(value) is int and value >= 0 for value in document["axes"].values())
    lengths = {name: axis.get("value", document["axes"].get(name)) for name, axis in axes.items()}
    assert document["inputs"].keys() == definition["inputs"].keys()
    for name, told in document["inputs"].items():
        tensor = definition["inputs"][name]
        if told["type"] == "scalar":
            check_fields(told, {"type": str, "value": (int, float, bool)})
            assert tensor["shape"] is None
        elif told["type"] == "safetensors":
            check_fields(told, {"type": str, "path": str, "tensor_key": str})
            array = read_safetensors(root / told["path"])[told["tensor_key"]]
            assert array.dtype.name == tensor["dtype"]
            assert list(array.shape) == [lengths[axis] for axis in tensor["shape"]]
        else:
            check_fields(told, {"type": str})
            assert told["type"] == "random" and tensor["dtype"].startswith(("float", "bfloat"))


def check_trace(document: Any, definition: Any, solutions: set[str], root: Path) -> None:
    """A trace, or a workload by itself."""
    optional = {"solution": str | None, "evaluation": dict | None}
    check_fields(document, {"definition": str, "workload": dict}, optional)
    assert document["definition"] == definition["name"]
    check_workload(document["workload"], definition, root)
    evaluation = document.get("evaluation")
    assert (evaluation is None) == (document.get("solution") is None)
    if evaluation is None:
        return
    assert document["solution"] in solutions
    parts = {"correctness": dict | None, "performance": dict | None, "environment": dict}
    check_fields(evaluation, {"status": str, "log": str, "timestamp": str, **parts})
    check_fields(evaluation["environment"], {"hardware": str, "libs": dict})
    assert all(isinstance(each, str) for each in evaluation["environment"]["libs"].values())
    there = tuple(evaluation[name] is not None for name in ("correctness", "performance"))
    assert there == NULLABLE[evaluation["status"]]
    if there[0]:
        errors = {"max_relative_error": (float, str), "max_absolute_error": (float, str)}
        check_fields(evaluation["correctness"], errors, {"extra": dict})
        for name in errors:
            error = float(evaluation["correctness"][name])
            assert np.isnan(error) or error >= 0
    if there[1]:
        names = ("latency_ms", "reference_latency_ms", "speedup_factor")
        check_fields(evaluation["performance"], dict.fromkeys(names, float))
        assert all(evaluation["performance"][name] >= 0 for name in names)


def read_safetensors(path: Path) -> dict[str, Any]:
    """The arrays of a file in the safetensors format."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    assert (8 + length) % 8 == 0
    found, end = {}, 0
    for name, told in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        start, last = told["data_offsets"]
        assert start == end and told["dtype"] == "I32", "arrays lie one behind the other"
        found[name] = np.frombuffer(rest[start:last], "<i4").reshape(told["shape"])
        end = last
    assert end == len(rest)
    return found


def check_trace_set(root: Path) -> dict[str, int]:
    """All of a data set; how many of what there are."""
    definitions, solutions, counts = {}, {}, {}
    for path in root.glob("definitions/*/*.json"):
        document = json.loads(path.read_text())
        check_definition(document)
        assert (path.stem, path.parent.name) == (document["name"], document["op_type"])
        definitions[document["name"]] = document
    for path in root.glob("solutions/*/*/*/*.json"):
        document = json.loads(path.read_text())
        check_solution(document, definitions[document["definition"]])
        assert path.relative_to(root).parts[1:] == (
            document["author"],
            definitions[document["definition"]]["op_type"],
            document["definition"],
            f"{document['name']}.json",
        )
        assert document["name"] not in solutions, "names are of one solution in all the set"
        solutions[document["name"]] = document
    for kind, places in (("workloads", "*/*.jsonl"), ("traces", "*/*/*.jsonl")):
        counts[kind] = 0
        for path in (root / kind).glob(places):
            for line in path.read_text().splitlines():
                document = json.loads(line)
                check_trace(document, definitions[path.stem], set(solutions), root)
                assert (document["evaluation"] is None) == (kind == "workloads")
                counts[kind] += 1
    return {"definitions": len(definitions), "solutions": len(solutions), **counts}
