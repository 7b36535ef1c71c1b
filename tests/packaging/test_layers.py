"""The layer rule: imports point down, the pure layers know no torch, hazards have one home."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "shardwright"

MAY_IMPORT = {
    "app": {"checkpoint", "parallel", "planner", "runtime", "core"},
    "checkpoint": {"runtime", "core"},
    "parallel": {"runtime", "core"},
    "planner": {"core"},
    "runtime": {"core"},
    "core": set(),
}
PURE = ("core", "planner")

COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "allgather",
    "allreduce",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter_object_list",
    "send",
}
STREAM_WAITS = {"record_stream", "wait_stream"}


@dataclass(frozen=True)
class SourceFile:
    """A module of the package."""

    path: Path
    tree: ast.Module

    @property
    def layer(self) -> str:
        """First folder below the package; empty for the package itself."""
        parts = self.path.relative_to(SOURCE).parts
        return parts[0] if len(parts) > 1 else ""

    @property
    def name(self) -> str:
        return self.path.relative_to(SOURCE).as_posix()

    def imports(self) -> Iterator[tuple[str, int]]:
        """Yield what is imported, also inside functions, and where; not what only types need."""
        for node in _walk_without_type_checking(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                assert node.module, f"{self.name}:{node.lineno} is relative"
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", node.lineno

    def calls(self, names: set[str]) -> Iterator[str]:
        """Yield calls of methods or functions with one of some names."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                called = node.func
                found = getattr(called, "attr", getattr(called, "id", None))
                if found in names:
                    yield f"{self.name}:{node.lineno} {ast.unparse(called)}"


def _walk_without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield other
                yield from _walk_without_type_checking(other)
            continue
        yield node
        yield from _walk_without_type_checking(node)


def source_files() -> list[SourceFile]:
    return [
        SourceFile(path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))
        for path in sorted(SOURCE.rglob("*.py"))
    ]


FILES = source_files()


def layers_imported(file: SourceFile) -> Iterator[tuple[str, str]]:
    for name, line in file.imports():
        parts = name.split(".")
        if parts[0] == "shardwright" and len(parts) > 1 and parts[1] in MAY_IMPORT:
            yield parts[1], f"{file.name}:{line} imports {name}"


def test_the_package_was_found() -> None:
    assert {file.layer for file in FILES} >= {"", "app", "core", "runtime"}


def test_every_folder_is_a_known_layer() -> None:
    assert {file.layer for file in FILES} <= {"", *MAY_IMPORT}


def test_imports_point_down_only() -> None:
    upward = [
        where
        for file in FILES
        if file.layer
        for layer, where in layers_imported(file)
        if layer != file.layer and layer not in MAY_IMPORT[file.layer]
    ]
    assert upward == []


def test_only_the_application_imports_the_public_names() -> None:
    """`import shardwright as sw` reaches all layers, so that lower ones would point up by it."""
    through_the_top = [
        f"{file.name}:{line}"
        for file in FILES
        if file.layer not in ("", "app")
        for name, line in file.imports()
        if name == "shardwright"
        or (name.startswith("shardwright.") and name.split(".")[1] not in MAY_IMPORT)
    ]
    assert through_the_top == []


def test_pure_layers_import_no_torch() -> None:
    found = [
        f"{file.name}:{line} imports {name}"
        for file in FILES
        if file.layer in PURE
        for name, line in file.imports()
        if name.split(".")[0] in ("torch", "numpy", "safetensors")
    ]
    assert found == []


def test_pure_layers_work_where_torch_cannot_be_imported() -> None:
    modules = [
        ".".join(("shardwright", *file.path.relative_to(SOURCE).with_suffix("").parts))
        for file in FILES
        if file.layer in PURE and file.path.stem != "__main__"
    ]
    program = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name.removesuffix('.__init__'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *modules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_only_transports_and_the_mesh_communicate() -> None:
    found = [
        call
        for file in FILES
        if not file.name.startswith("runtime/transport/") and file.name != "runtime/mesh.py"
        for call in file.calls(COLLECTIVES)
        if _is_of_a_process_group(call)
    ]
    assert found == []


def _is_of_a_process_group(call: str) -> bool:
    """Leave out transports' and pipes' own methods and `Tensor.scatter`-like names."""
    owner = call.split(" ", 1)[1].rpartition(".")[0]
    last = owner.rpartition(".")[2]
    return last in ("dist", "distributed", "distributed_c10d") or "group" in last or owner == ""


@pytest.mark.parametrize("name", sorted(STREAM_WAITS))
def test_streams_wait_in_one_file_only(name: str) -> None:
    found = [
        call for file in FILES if file.name != "runtime/lanes.py" for call in file.calls({name})
    ]
    assert found == []


# --- the checks themselves -------------------------------------------------------------------


def parsed(text: str, name: str) -> SourceFile:
    return SourceFile(SOURCE / name, ast.parse(text))


def test_imports_inside_functions_count_and_those_for_types_do_not() -> None:
    file = parsed(
        "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    from c import d\n",
        "core/x.py",
    )
    assert [name for name, _ in file.imports()] == ["b", "c.d"]


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("dist.all_reduce(x)", True),
        ("torch.distributed.broadcast(x, 0)", True),
        ("all_reduce(x)", True),
        ("self._group.allreduce([x])", True),
        ("group.send([x], 0, 0)", True),
        ("self.pipe.send(x)", False),
        ("transport.reduce_scatter(x)", False),
    ],
)
def test_collectives_are_told_from_other_methods(text: str, is_found: bool) -> None:
    calls = list(parsed(text, "app/x.py").calls(COLLECTIVES))
    assert any(_is_of_a_process_group(call) for call in calls) is is_found
