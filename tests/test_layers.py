"""Who may import whom: read from the sources, and from what a process has really loaded."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchrun
from tests.jobs import write_job

PACKAGE = Path(batchrun.__file__).parent
KERNELS = PACKAGE.parent / "kernels"
HEAVY = {"torch", "transformers", "triton"}

TORCH_FREE = (
    "batchrun.tokenization.chat_template",
    "batchrun.bench",
    "batchrun.bench.gpu",
    "batchrun.cli",
    "batchrun.data.feed",
    "batchrun.data.feed_worker",
    "batchrun.data.openai_batch",
    "batchrun.data.prompt",
    "batchrun.data.reader",
    "batchrun.data.scope",
    "batchrun.data.sink",
    "batchrun.data.source",
    "batchrun.data.writer",
    "batchrun.engine.blocks",
    "batchrun.engine.limits",
    "batchrun.engine.memory",
    "batchrun.engine.request",
    "batchrun.engine.scheduler",
    "batchrun.engine.speculation.controller",
    "batchrun.engine.speculation.draft_files",
    "batchrun.engine.speculation.drafter",
    "batchrun.engine.speculation.ngram",
    "batchrun.engine.speculation.speculator",
    "batchrun.engine.speculation.stats",
    "batchrun.engine.speculation.suffix",
    "batchrun.engine.step_times",
    "batchrun.errors",
    "batchrun.estimate",
    "batchrun.faults",
    "batchrun.job",
    "batchrun.kernels.machine",
    "batchrun.launch.schedule",
    "batchrun.model_files",
    "batchrun.models.families",
    "batchrun.observe.progress",
    "batchrun.observe.report",
    "batchrun.observe.results",
    "batchrun.observe.status",
    "batchrun.plan",
    "batchrun.preflight",
    "batchrun.probe",
    "batchrun.quality",
    "batchrun.sampling",
    "batchrun.signals",
    "batchrun.launch.slurm",
    "batchrun.launch.supervisor",
    "batchrun.streams",
    "batchrun.text",
    "batchrun.tokenization.tokenizer",
)

# Importer -> what it may never import, whether at the top or inside a function.
FORBIDDEN = {
    "batchrun.errors": ("batchrun",),
    "batchrun.text": ("batchrun",),
    "batchrun.faults": ("batchrun",),
    "batchrun.sampling": ("batchrun.data", "batchrun.engine", "batchrun.errors", "batchrun.job"),
    "batchrun.data": ("batchrun.engine", "batchrun.models", "batchrun.ops", "batchrun.runner", "batchrun.kernels"),
    "batchrun.engine.scheduler": ("batchrun.models", "batchrun.ops", "batchrun.kernels"),
    "batchrun.engine.blocks": ("batchrun.models", "batchrun.ops", "batchrun.kernels"),
    "batchrun.engine": (
        "batchrun.runner",
        "batchrun.plan",
        "batchrun.estimate",
        "batchrun.preflight",
        "batchrun.kernels.cpu",
    ),
    "batchrun.estimate": ("batchrun.plan", "batchrun.runner"),
    "batchrun.probe": ("batchrun",),
    "batchrun.models": ("batchrun.data", "batchrun.engine.engine", "batchrun.engine.executor", "batchrun.kernels"),
    "batchrun.ops": ("batchrun.data", "batchrun.models", "batchrun.engine.engine", "batchrun.engine.executor"),
    "batchrun.weights": (
        "batchrun.data",
        "batchrun.engine",
        "batchrun.models",
        "batchrun.ops",
        "batchrun.quantizing",
    ),
    "batchrun.quantizing": (
        "batchrun.runner",
        "batchrun.engine.engine",
        "batchrun.engine.executor",
        "batchrun.kernels",
    ),
    "batchrun.launch": (
        "batchrun.engine.engine",
        "batchrun.kernels.cpu",
        "batchrun.models",
        "batchrun.ops",
        "batchrun.runner",
    ),
    "batchrun.observe": ("batchrun.engine.engine", "batchrun.engine.executor", "batchrun.runner"),
}
KERNEL_IMPORTS = {"torch", "triton", "numpy"}


def modules() -> dict[str, Path]:
    found = {}
    for root, name in ((PACKAGE, "batchrun"), (KERNELS, "batchrun.kernels")):
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join([name, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imports(module: str, *, everywhere: bool) -> Iterator[str]:
    """Names that a module imports: at the top alone (what importing it loads), or ``everywhere`` in it."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    nodes: list[ast.AST] = list(ast.walk(tree)) if everywhere else list(_at_top(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in MODULES)


def _at_top(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _at_top(child)


def loaded_by(module: str) -> set[str]:
    """Every name that importing ``module`` imports, through batchrun's own modules."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in MODULES:
            waiting += [*imports(name, everywhere=False), *([name.rpartition(".")[0]] if "." in name else [])]
    return seen


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_it_loads_no_torch(module: str) -> None:
    heavy = {name for name in loaded_by(module) if name.partition(".")[0] in HEAVY}
    assert not heavy


@pytest.mark.parametrize(("layer", "forbidden"), FORBIDDEN.items())
def test_a_layer_imports_nothing_above_it(layer: str, forbidden: tuple[str, ...]) -> None:
    for module in MODULES:
        if module == layer or module.startswith(f"{layer}."):
            wrong = {n for n in imports(module, everywhere=True) if n.startswith(forbidden)}
            assert not wrong, f"{module} imports {wrong}"


def test_kernels_import_torch_and_triton_alone() -> None:
    for module in MODULES:
        if module.startswith("batchrun.kernels"):
            for name in imports(module, everywhere=True):
                top = name.partition(".")[0]
                own = name.startswith("batchrun.kernels")
                assert own or top in KERNEL_IMPORTS or top in sys.stdlib_module_names, f"{module} imports {name}"


def run(*arguments: str, code: str = "") -> set[str]:
    """The top-level packages that a child process has loaded once a batchrun command has run."""
    child = (
        "import json, sys\n"
        f"{code}\n"
        "from batchrun.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "sys.stderr.write(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run([sys.executable, "-c", child, *arguments], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_help_loads_next_to_nothing() -> None:
    loaded = run("--help")
    assert not loaded & (HEAVY | {"numpy", "pyarrow", "pydantic", "tokenizers", "fsspec", "jinja2"})


def test_commands_that_need_no_model_never_load_torch(tmp_path: Path, tiny_model: Path) -> None:
    job = str(write_job(tmp_path, tiny_model, [{"id": i, "text": f"row {i}"} for i in range(5)]))
    for arguments in (
        ["validate", job],
        ["plan", job],
        ["submit", job, "--dry-run"],
        ["submit", job, "--set", "model.dtpye=x"],
        ["submit", job, "--slurm", "--dry-run"],
        ["status", job],
        ["results", job],
        ["schedule", job, "--cron", "0 2 * * *"],
        ["cancel", job],
        ["logs", job],
    ):
        assert not run(*arguments) & HEAVY, arguments


def test_public_names_load_lazily() -> None:
    loaded = run("--version", code="import batchrun; batchrun.SamplingParams, batchrun.JobSpec, batchrun.load_job")
    assert not loaded & HEAVY
    assert set(batchrun.__all__) <= set(dir(batchrun))
    with pytest.raises(AttributeError, match="no attribute 'Enginee'"):
        batchrun.Enginee  # noqa: B018


def test_help_answers_at_once() -> None:
    script = Path(sys.executable).with_name("batchrun")
    times = []
    for _ in range(5):
        before = os.times()
        subprocess.run([str(script), "--help"], capture_output=True, check=True)
        after = os.times()  # what the processor did: how long it took depends on who else runs
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < 0.3, times
