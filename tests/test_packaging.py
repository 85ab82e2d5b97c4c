"""What a wheel holds, and which way imports run."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerofx

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = {"zerofx": ROOT / "zerofx", "zerofx.passes": ROOT / "passes", "zerofx.kernels": ROOT / "kernels"}


def sources(package: str) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of each module of a package; ``zerofx`` leaves out what its two symlinks hold."""
    top = PACKAGES[package]
    for folder, _, files in os.walk(top):  # does not follow symlinks below top
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix == ".py":
                parts = path.relative_to(top).with_suffix("").parts
                yield ".".join((package, *parts)), path


def imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str, str]]:
    """(line, dotted name, name it is bound to) of each import; ``module`` resolves the relative ones.

    ``from a.b import c`` is ``a.b.c``, whether ``c`` is a module or not. A package itself is ``a.__init__``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            prefix = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                yield node.lineno, f"{prefix}.{alias.name}", alias.asname or alias.name


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def strangers(text: str, module: str, allowed: tuple[str, ...]) -> list[str]:
    """The imports of zerofx's own modules that are not allowed."""
    found = imports(ast.parse(text), module)
    return [
        f"{module}:{line}: {name}" for line, name, _ in found if within(name, "zerofx") and not within(name, *allowed)
    ]


def private_part(name: str) -> str | None:
    """``torch._C`` of ``torch._C._distributed_c10d``: the name as far as its first private component."""
    parts = name.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"]:
        return None
    for i, part in enumerate(parts):
        if part.startswith("_") and not part.endswith("__"):
            return ".".join(parts[: i + 1])
    return None


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is a class or a function
        return False


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return value and f"{value}.{node.attr}"
    return None


def private_torch(text: str, module: str) -> list[str]:
    """Private torch names that are imported, and private torch modules reached as attributes.

    Private functions reached as attributes (``torch._foreach_mul_``) are operators: they may be used.
    """
    tree = ast.parse(text)
    found: set[tuple[int, str]] = set()
    bound: dict[str, str] = {}
    for line, name, binding in imports(tree, module):
        bound[binding] = binding if name.partition(".")[0] == binding else name
        if private := private_part(name):
            found.add((line, private))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            head, _, rest = name.partition(".")
            private = private_part(f"{bound.get(head, head)}.{rest}")
            if private and is_module(private):
                found.add((node.lineno, private))
    return [f"{module}:{line}: {name}" for line, name in sorted(found)]


def check(package: str, allowed: tuple[str, ...]) -> list[str]:
    return [hit for module, path in sources(package) for hit in strangers(path.read_text(), module, allowed)]


# ---------------------------------------------------------------------------------------------- imports


def test_passes_import_only_layouts_codes_and_passes_of_zerofx() -> None:
    known = ("zerofx.model.layout", "zerofx.model.wire", "zerofx.kernels.code", "zerofx.kernels.wire")
    assert not check("zerofx.passes", (*known, "zerofx.passes", "zerofx._torch"))


def test_the_proofs_import_no_pass() -> None:
    """`verify` would believe what it is to prove."""
    passes = {pass_.__module__ for pass_ in (*zerofx.passes.PIPELINE, *zerofx.passes.REPLICATED)}
    found = {other for module, others in arrows().items() if within(module, "zerofx.passes.proof") for other in others}
    assert not found & passes


def test_passes_need_nothing_but_torch_and_the_standard_library() -> None:
    known = {*sys.stdlib_module_names, "torch", "zerofx"}
    assert not [
        f"{module}:{line}: {name}"
        for module, path in sources("zerofx.passes")
        for line, name, _ in imports(ast.parse(path.read_text()), module)
        if name.partition(".")[0] not in known
    ]


def test_kernels_import_nothing_else_of_zerofx() -> None:
    assert not check("zerofx.kernels", ("zerofx.kernels",))


def test_what_passes_import_of_zerofx_imports_nothing_else_of_it() -> None:
    hits = check("zerofx", ("zerofx.model.layout", "zerofx._torch"))
    assert not [hit for hit in hits if hit.startswith(("zerofx.model.layout:", "zerofx._torch."))]


@pytest.mark.parametrize("package", ["zerofx", "zerofx.passes"])
def test_private_torch_modules_are_named_in_one_folder_alone(package: str) -> None:
    assert not [
        hit
        for module, path in sources(package)
        if not within(module, "zerofx._torch")
        for hit in private_torch(path.read_text(), module)
    ]


@pytest.mark.parametrize(
    "line",
    [
        "import zerofx",
        "import zerofx.compiler.runners",
        "from zerofx.compiler import runners",
        "from zerofx.compiler.runners import Runtime",
        "from ..compiler import runners",
        "from ..compiler.runners import Runtime",
        "def f():\n    from ..runtime.state.group import Group",
    ],
)
def test_an_import_of_the_runtime_by_a_pass_is_found(line: str) -> None:
    allowed = ("zerofx.model.layout", "zerofx.passes", "zerofx._torch")
    assert strangers(line, "zerofx.passes.gather", allowed)


@pytest.mark.parametrize(
    "line",
    [
        "import torch.fx",
        "from zerofx.model import layout",
        "from ..model.layout import GroupLayout",
        "from .. import _torch",
        "from . import edit",
        "from .edit import insert",
    ],
)
def test_an_import_that_a_pass_may_make_is_let_through(line: str) -> None:
    allowed = ("zerofx.model.layout", "zerofx.passes", "zerofx._torch")
    assert not strangers(line, "zerofx.passes.gather", allowed)


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "import torch._inductor.config as config",
        "from torch import _dynamo",
        "from torch._functorch import config",
        "from torch.utils import _pytree as pytree",
        "import torch\nwith torch._C.DisableTorchFunctionSubclass(): pass",
        "import torch as t\nt._inductor.config.max_autotune",
        "import torch.distributed as dist\ndist._functional_collectives.wait_tensor",
        "from torch import distributed\ndistributed._functional_collectives.wait_tensor",
    ],
)
def test_a_private_torch_module_is_found(text: str) -> None:
    assert private_torch(text, "zerofx.runtime.state.group")


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.ops._c10d_functional.wait_tensor.default",
        "import torch\ntorch._foreach_mul_([], 1)",
        "import torch\ntorch.__version__",
        "from __future__ import annotations",
        "import torch.fx\nx = torch.fx.Node\nx._args",
        "from zerofx import _torch\n_torch.no_cache",
    ],
)
def test_a_public_torch_name_is_let_through(text: str) -> None:
    assert not private_torch(text, "zerofx.runtime.state.group")


# ---------------------------------------------------------------------------------------------- rooms

ROOMS = (
    "zerofx._torch",
    "zerofx.kernels",
    "zerofx.model",
    "zerofx.passes",
    "zerofx.runtime.ranks",
    "zerofx.runtime.state",
    "zerofx.runtime.eager",
    "zerofx.runtime.optim",
    "zerofx.simulate",
    "zerofx.checkpoint",
    "zerofx.compiler",
    "zerofx.inspect",
    "zerofx.features",
    "zerofx",
    "zerofx.integrations",
)
"""The rooms, from the ground up: a file imports from its own room and from those before it."""

MODULES = {
    module.removesuffix(".__init__"): (module, path) for package in PACKAGES for module, path in sources(package)
}


def module_of(name: str) -> str | None:
    """The module of ours that an import of ``name`` reaches: itself, or that which has the name in it."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def arrows() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports, in functions and under TYPE_CHECKING too."""
    found: dict[str, set[str]] = {}
    for module, (dotted_name, path) in MODULES.items():
        names = (name for _, name, _ in imports(ast.parse(path.read_text()), dotted_name) if within(name, "zerofx"))
        found[module] = {other for name in names if (other := module_of(name)) is not None} - {module}
    return found


def room_of(module: str) -> int:
    return max((i for i, room in enumerate(ROOMS) if within(module, room)), key=lambda i: len(ROOMS[i]))


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; [] where there is none."""
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> list[str]:
        if module in way:
            return way[way.index(module) :]
        if module in done:
            return []
        for other in sorted(graph.get(module, ())):
            if found := visit(other, [*way, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, []))), [])


def test_imports_run_down_from_room_to_room() -> None:
    assert not [
        f"{module} imports {other}"
        for module, others in arrows().items()
        for other in sorted(others)
        if room_of(other) > room_of(module) and not within(other, "zerofx.features")  # tests/test_features.py
    ]


def test_no_import_goes_in_a_circle() -> None:
    assert circle(arrows()) == []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_the_top_of_the_package_is_twelve_entries() -> None:
    entries = {path.name for path in (ROOT / "zerofx").iterdir()} - {"__init__.py", "__pycache__", "py.typed"}
    assert len(entries) <= 12, sorted(entries)


def test_what_others_packages_are_needed_for_is_imported_by_nobody_but_users() -> None:
    others = {module for module in MODULES if not within(module, "zerofx.integrations")}
    graph = arrows()
    assert not [module for module in others if any(within(m, "zerofx.integrations") for m in graph[module])]
    code = "import sys, zerofx; print({'transformers', 'accelerate', 'lightning', 'peft'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("package", list(PACKAGES))
def test_a_file_is_read_in_one_sitting_and_a_function_at_a_glance(package: str) -> None:
    long = []
    for module, path in sources(package):
        text = path.read_text()
        if len(text.splitlines()) > 500:
            long.append(module)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                doc = ast.get_docstring(node, clean=False) or ""
                if node.end_lineno - node.lineno + 1 - len(doc.splitlines()) > 60:  # type: ignore[operator]
                    long.append(f"{module}.{node.name}")
    assert not long


@pytest.mark.parametrize("room", [room for room in ROOMS if room in MODULES and MODULES[room][1].name == "__init__.py"])
def test_a_room_names_every_file_that_lives_there(room: str) -> None:
    folder = MODULES[room][1].parent
    names = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    text = MODULES[room][1].read_text()
    assert not [name for name in names if name not in text]


# ---------------------------------------------------------------------------------------------- wheel and sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both, built offline by setuptools from a copy, so that no build/ of an earlier day gets in."""
    pytest.importorskip("setuptools", minversion="77")
    tmp = tmp_path_factory.mktemp("wheel")
    source = tmp / "source"
    source.mkdir()
    for item in ("zerofx", "passes", "kernels"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / item, source / item, symlinks=True, ignore=ignore)
    for file in ROOT.iterdir():
        if file.name in ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "MANIFEST.in"):
            shutil.copy(file, source)
    build = "import sys, setuptools.build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
    done = subprocess.run([sys.executable, "-c", build, str(tmp)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp


@pytest.fixture(scope="module")
def wheel(built: Path) -> Iterator[zipfile.ZipFile]:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.mark.parametrize("package", list(PACKAGES))
def test_wheel_holds_real_files_of_every_module(wheel: zipfile.ZipFile, package: str) -> None:
    for module, path in sources(package):
        name = f"{module.replace('.', '/')}.py"
        assert wheel.read(name) == path.read_bytes(), name


def test_wheel_holds_only_zerofx_at_top_level(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"zerofx"}


def test_wheel_is_typed(wheel: zipfile.ZipFile) -> None:
    assert {"zerofx/py.typed", "zerofx/inspect/report.html"} <= set(wheel.namelist())


def test_wheel_registers_the_dynamo_backend(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(name).decode())
    assert dict(entry_points["torch_dynamo_backends"]) == {"zerofx": "zerofx.compiler.backend:zerofx_backend"}


def test_sdist_holds_what_the_wheel_was_built_from(built: Path, wheel: zipfile.ZipFile) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    modules = {name for name in wheel.namelist() if name.startswith("zerofx/")}
    assert modules <= {name for name, member in files.items() if member.isreg()}  # no symlinks
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff"} <= set(files)


@pytest.mark.parametrize("file, pattern", [("CHANGELOG.md", r"^## (\S+)"), ("CITATION.cff", r"^version: (\S+)")])
def test_version_is_the_same_everywhere(file: str, pattern: str, built: Path) -> None:
    version = re.search(pattern, (ROOT / file).read_text(), re.M)
    assert version and version[1] == zerofx.__version__
    assert {path.name for path in built.glob("zerofx-*")} == {
        f"zerofx-{version[1]}-py3-none-any.whl",
        f"zerofx-{version[1]}.tar.gz",
    }


def used_names(text: str) -> Iterator[str]:
    """Every name that code reads, calls, imports, or has as a string (``getattr``, ``__all__``)."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def unused(text: str, used: set[str]) -> list[str]:
    """The functions and classes of a file that nobody uses. A method may be there for its base class."""
    tree = ast.parse(text)
    inherited = {id(method) for of in ast.walk(tree) if isinstance(of, ast.ClassDef) and of.bases for method in of.body}
    return [
        f"line {node.lineno}: {node.name}"
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and id(node) not in inherited
        and not node.name.startswith("__")
        and node.name not in used
    ]


def test_nothing_is_defined_for_tests_alone() -> None:
    """What only a test calls is no part of zerofx, and belongs to the test. Docs may offer what nobody here calls."""
    files = {path: path.read_text() for package in PACKAGES for _, path in sources(package)}
    tools = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("tests/**/__main__.py")]
    used = {name for text in (*files.values(), *(path.read_text() for path in tools)) for name in used_names(text)}
    used |= {name for page in ROOT.glob("docs/*.md") for name in re.findall(r"\w+", page.read_text())}
    found = {str(path.relative_to(ROOT)): names for path, text in files.items() if (names := unused(text, used))}
    assert not found
    assert unused("def f(): ...\nclass A(B):\n    def g(self): ...\n", {"A"}) == ["line 1: f"]
