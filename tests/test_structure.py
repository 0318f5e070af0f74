"""The floor plan holds: imports go one way, folders and functions are small, standard terms are used."""

from __future__ import annotations

import ast
import pydoc
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from tests.harness.feature_names import FEATURES, RECORD, defined, files_that_name, identifiers, recorded, sources
from tests.harness.parsed import nodes, parsed
from tests.harness.private_names import private_torch_names

ROOT = Path(__file__).parents[1]
PACKAGES = ("passes", "spmd")

# What a file imports stands in its own line or further up. Folders are named with a slash; files stand for themselves.
ORDER = {
    "passes": """
        _torch errors unexpected_errors
        runtime/
        ir/
        analysis/
        base
        cleanup/
        communication/
        update/
        memory/
        schedule/
        regions/
        page/
        measured report_changes
        default_passes runner trace report
        defer fit_memory
        __init__
    """,
    "spmd": """
        version _torch placements
        interpreter/
        memo unexpected_errors
        failed_ops
        answers/ watching/
        annotations/ ranks/
        call/
        python_state/
        rules/
        capture/
        guards/
        partitioner/
        micro_batches/
        stages/
        modes/
        state/
        lowering/
        override dump progress compile_phases edited_programs
        deferral/
        options
        running/
        shared_captures unsharded initialized mesh_picture profile recorder
        cache/
        checkpoints/
        next_capture
        dispatch
        capture_call
        step_compiler
        failed_calls
        step_runner
        step
        decorator
        verification/
        checking/ fuzzing/ generation/ integrations/ planning/ publishing/
        cli/
        public
        __init__ __main__
    """,
}
MOST_FILES = 30

# Private words that standard terms have replaced, with what to write.
REPLACED = {
    r"lodgers?": "buffer",
    r"neighbou?rs?": "local peers, local ranks",
    r"surveyed": "with storage facts",
    r"introduced?": "connect local ranks",
    r"knock|door": "connect, listener",
    r"told|said": "describe, message, report",
    r"follow_split": "rebind replaced parameters",
    r"out[ _]forms?": "out variant",
    r"taken[ _]apart": "decomposed",
    r"alike": "structurally equal, memo key",
    r"what is meant": "collective semantics",
    r"what performs (?:it|them)": "implementation",
    r"(?:reads?|reading|see) each other's memory": "through shared memory",
}
# Docstrings that open with a clause, and the folders that have them; the number may only fall.
CLAUSES_LEFT_IN = ("passes.ir.", "spmd.capture.", "spmd.lowering.", "spmd.running.")
CLAUSES_LEFT = 47
LATER = ("verification", "planning", "fuzzing", "checkpoints", "integrations", "cli", "public")
# In the names of files, classes and functions also words that prose may use.
REPLACED_IN_NAMES = {
    "meet meets met meeting": "barrier, rendezvous",
    "came come comes": "arrive",
    "post posts posted": "publish",
    "tell tells": "describe, message, report",
    "want wants wanted": "materialize, hinted",
    "ahead": "lookahead",
    "told said door knock introduce lodger alike": "the term of REPLACED",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def imported(module: str, at_import: bool = False) -> Iterator[str]:
    """The modules of this project that a module imports, at any depth of its code; or those that its import needs."""
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in parsed(path).body if at_import else nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                found = next((name for name in (f"{source}.{alias.name}", source) if name in FILES), None)
                if found is not None:
                    yield found


def line_in_order(module: str) -> int:
    """The line of ``ORDER`` that a module stands in."""
    package, *rest = module.split(".")
    is_folder = len(rest) > 1 or (rest and FILES[module].name == "__init__.py")
    name = f"{rest[0]}/" if is_folder else (rest[0] if rest else "__init__")
    lines = [line.split() for line in ORDER[package].strip().splitlines()]
    return next(k for k, line in enumerate(lines) if name in line)


def test_imports_go_one_way() -> None:
    arrows = [(module, other) for module in FILES for other in imported(module)]
    assert arrows
    for module, other in arrows:
        if other.split(".")[0] != module.split(".")[0]:
            assert other.startswith("passes"), f"{module} imports {other}: passes never imports spmd"
        else:
            assert line_in_order(other) <= line_in_order(module), f"{module} imports {other}, which stands below it"


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module: [other for other in imported(module) if other not in PACKAGES] for module in FILES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_compile_is_there_before_what_checks_plans_and_saves_is_imported() -> None:
    needed, left = set[str](), ["spmd.decorator"]
    while left:
        needed.add(module := left.pop())
        left += set(imported(module, at_import=True)) - needed
    assert len(needed) > 100
    assert not {module.split(".")[1] for module in needed if "." in module} & set(LATER)
    imports = [line for module in needed for line in parsed(FILES[module]).body if isinstance(line, ast.Import)]
    assert not [alias.name for line in imports for alias in line.names if alias.name.startswith("networkx")]


def test_no_name_of_the_package_hides_a_module() -> None:
    """``spmd.partition`` is a function; a module or folder of that name could not be reached."""
    hidden = [name for package in PACKAGES for name in _public(package) if f"{package}.{name}" in FILES]
    assert hidden == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_there(package: str) -> None:
    names = _public(package)
    assert len(names) == len(set(names))
    assert all(hasattr(import_module(package), name) for name in names)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_python_shows_of_a_package_are_its_public_names(package: str) -> None:
    """By ``dir``, and on the one screen of ``help``, where ``pydoc`` would list all files."""
    module, shown = import_module(package), pydoc.plaintext.document(import_module(package))
    assert dir(module) == sorted(_public(package)) and [*module.__path__] == [str(ROOT / package)]
    assert set(_public(package)) <= {*re.findall(r"\w+", shown)} and len(shown.splitlines()) < 40
    assert "PACKAGE CONTENTS" not in shown and "Method" not in shown


def _public(package: str) -> list[str]:
    names: list[str] = import_module(package).__all__
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_private_torch_names_are_in_one_file(package: str) -> None:
    """They are behind accessors in its ``_torch.py``, each with the reason for it and the versions it was seen in."""
    names = private_torch_names(ROOT / package)
    assert [
        each for each in names if not each.startswith("integrations/")
    ] == []  # which extend other libraries' classes


def test_passes_and_stages_ask_for_strides_in_one_file() -> None:
    """Elsewhere a decision by this rank's strides would be another one on the next rank."""
    no_decision = {
        "arena.py",  # makes tensors
        "fold_layout_copies.py",  # of what is the same on all ranks
        "buffers.py",  # counts bytes
        "reuse_memory.py",  # says where they lie, which may differ
        "grouped_products.py",  # the result that kernels give for them
        "message_collectives.py",  # runs
        "saved_program.py",  # writes down what they are
        "host_memory.py",  # lays out copies as what they copy
    }
    asking = {
        path.name
        for path in [*(ROOT / "passes").rglob("*.py"), *(ROOT / "spmd/stages").glob("*.py")]
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in ("is_contiguous", "stride")
        if not ast.unparse(node.value).endswith(("layouts", "agreed"))
    }
    assert asking - no_decision == {"strides.py", "agreed.py"}


def test_what_refers_to_live_objects_is_compared_by_identity() -> None:
    """Equality by fields would compare the tensors that they hold; it is meant where only structures are."""
    by_value = {"_Structure", "Record"}
    live = re.compile(r"\b(Any|Tensor|ReadSite|Reference)\b")
    found = [
        f"{module}.{node.name}"
        for module, path in FILES.items()
        if module.startswith(("spmd.call.", "spmd.python_state."))
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and node.name not in by_value
        for decorator in map(ast.unparse, node.decorator_list)
        if decorator.startswith("dataclass") and "eq=False" not in decorator
        if any(isinstance(field, ast.AnnAssign) and live.search(ast.unparse(field.annotation)) for field in node.body)
    ]
    assert found == []


@cache
def named() -> dict[str, set[str]]:
    """The identifiers that each file of both packages reads or imports."""
    return {path: identifiers(path, found) for path, found in sources()}


@cache
def names_defined() -> set[str]:
    return set().union(*(defined(found) for _, found in sources()))


@pytest.mark.parametrize("feature", FEATURES)
def test_no_further_file_names_a_feature(feature: str) -> None:
    """A feature is to be one folder. What else it is named in, ``RECORD`` lists, which may only become shorter."""
    found, known = files_that_name(FEATURES[feature], named()), recorded(feature)
    print(f"{feature} is named in {len(found)} files outside of {', '.join(FEATURES[feature].inside)}")
    assert not set(found) - set(known), "these begin to name the feature: put the code into its folder"
    assert not set(known) - set(found), f"these no longer name the feature: take them out of {RECORD.name}"


@pytest.mark.parametrize("feature", FEATURES)
def test_features_own_what_is_defined(feature: str) -> None:
    """A name leaves ``OWNS`` when nothing defines it any more, and not before."""
    there = names_defined()
    assert not [name for name in FEATURES[feature].owns if name.rpartition(".")[2] not in there]


def test_folders_are_small() -> None:
    parts = [ROOT / part for part in (*PACKAGES, "tests", "docs")]
    folders = [*parts, *(path for part in parts for path in part.rglob("*") if path.is_dir())]
    written = [folder for folder in folders if folder.name != "__pycache__"]
    crowded = [folder for folder in written if len([p for p in folder.glob("*.*") if p.is_file()]) > MOST_FILES]
    assert crowded == []


@pytest.mark.parametrize("word", REPLACED)
def test_standard_terms_are_used(word: str) -> None:
    pattern = re.compile(rf"(?<![a-zA-Z])(?:{word})(?![a-zA-Z])", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _texts()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, f"write {REPLACED[word]!r} instead:\n" + "\n".join(found)


@pytest.mark.parametrize("words", REPLACED_IN_NAMES)
def test_names_are_standard_terms(words: str) -> None:
    replaced = set(words.split())
    found = [
        f"{module}: {name}"
        for module, path in FILES.items()
        for name in (path.stem, *_defined(path))
        if replaced & {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
        if not name.startswith("__")
    ]
    assert not found, f"write {REPLACED_IN_NAMES[words]!r} instead:\n" + "\n".join(found)


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    """Their first line could stand in a manual; what is left opens with a clause, or refers to what stands nowhere."""
    opening = re.compile(r"(What|How|Where|Who|Whose|Whom|Which|Of the|Those of|As)\b")
    left = [module for module, path in FILES.items() for text in _docstrings(path) if opening.match(text)]
    to_do = [module for module in left if module.startswith(CLAUSES_LEFT_IN)]
    assert sorted(set(left) - set(to_do)) == []
    assert len(to_do) <= CLAUSES_LEFT, f"write a noun or a verb; lower the number with each that goes: {to_do}"


def _docstrings(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


@cache
def _defined(path: Path) -> list[str]:
    """The names of the classes and functions of a file."""
    return [node.name for node in nodes(path) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]


def _texts() -> Iterator[Path]:
    """All code and prose, but for the decisions, which quote, and this file."""
    for part in (*PACKAGES, "tests", "benchmarks", "examples"):
        yield from (path for path in sorted((ROOT / part).rglob("*.py")) if path != Path(__file__))
    yield from (path for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]) if path.name != "decisions.md")
