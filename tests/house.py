"""Counts of how the code is built: `python -m tests.house [ROOT ...] [--places]` prints a table of checkouts.

`test_house.py` holds the limits. Everything is read from the syntax trees of the three packages, so a
checkout of any age can be counted without installing it.
"""

import argparse
import ast
import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

FOLDERS = ("laminar_py", "laminar_lab", "laminar_contrib")
MOST_POSITIONAL, MOST_FIELDS = 7, 4
SMALL_FILE = 70  # lines
SHAPE_LINES = 6  # shorter functions are alike by chance
STAND_INS = r"(?:that|those|which|who|whose)"  # of a noun that the sentence does not repeat
ARTICLE = r"(?:(?:the|an?|its|their|each|all|this) )?"
PATTERNS = {  # names as docs/style.md has them, which says how to write instead
    "continue": r"\b(?:go|goes|going|went|gone) on\b",
    "tell": r"\b(?:is|are|was|were|be|been|being|gets?) (?:told|said)\b",
    "what": r"\bwhat (?!.*\?)(?:is|are|was|were|has|had|have|it|they|comes?|came|goes|went|waits?|runs?|ran"
    r"|stands?|lies|lay|lives?|died|dies|remains|belongs|needs?|can|may|must|will|would)\b",
    "whoever": r"\bwho(?:so)?ever\b|\b(?:and|by|to|of|for) who (?:has|had|is|was|asks|reads|goes|takes|gets)\b",
    "whatever": r"\bwhatever (?:is|are|was|it|they|comes|came|has|had|ends|takes)\b",
    "those": r"\bthose (?:that|which|who|of|whose)\b",
    "that of": r"\bthat of (?:the|an?|its|their|any|each|every|another|this)\b",
    "one that": rf"\b(?<!no )one {STAND_INS}\b",
    "all that": r"\b(?:all|much|little|nothing|everything|something|anything) (?:that|which) "
    r"(?:is|are|was|were|has|had|it|they)\b",
    "start": r"(?:(?<=[.:;] )|(?<=\"\"\")|^)(?-i:What|Those|Whoever)\b(?!.*\?)",
    "chain": rf"(?<!instead )(?<!out )(?<!because )\bof {ARTICLE}"
    rf"(?!(?:one|each|some|any|all|most|many|out)\b)[a-z]+ of {ARTICLE}(?!(?:which|what|whom|another)\b)[a-z]+",
    "is to be": r"\b(?:is|are|was|were) to (?:be|have)\b",
    "anew": r"\banew\b",
    "hears of": r"\bhears? of\b|\bheard of\b",
}
BANNED = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS.values()), re.IGNORECASE)
MOST_LINES, MOST_FUNCTION_LINES, MOST_CONSTRUCTOR_LINES = 600, 50, 40

Function = ast.FunctionDef | ast.AsyncFunctionDef
Places = dict[str, list[str]]  # by row of the table: where it was found


class Checkout:
    """The modules of a checkout by path, e.g. `Checkout(Path("."))`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
        self.texts = {path.relative_to(root): path.read_text() for path in paths}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}
        self._walked = [(path, node) for path, tree in self.trees.items() for node in ast.walk(tree)]

    def nodes(self, *kinds) -> Iterator[tuple[Path, ast.AST]]:
        """Syntax nodes of these kinds in all modules."""
        return (found for found in self._walked if isinstance(found[1], kinds))


def count(root: Path) -> dict[str, int]:
    """The table of a checkout."""
    code = Checkout(root)
    sizes = {row: len(found) for row, found in places(code).items()}
    constructors = [size for _, node in code.nodes(Function) if node.name == "__init__" and (size := lines(node))]
    return {
        **sizes,
        "longest constructor, lines": max(constructors),
        "lines": sum(text.count("\n") for text in code.texts.values()),
    }


def sizes(root: Path) -> dict[str, int]:
    """How large a checkout is: lines by package, rooms, files, classes, short functions, banned words."""
    code = Checkout(root)
    core = [path for path in code.texts if path.parts[0] == FOLDERS[0]]
    functions = [node for _, node in code.nodes(Function)]
    bodies = [
        [item for item in node.body if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))]
        for node in functions
    ]
    return {
        **{f"lines of {name}": num_lines(root, name) for name in (*FOLDERS, "tests", "experiments")},
        "rooms of the core": len({path.parts[1] for path in core if len(path.parts) > 2}),
        "files": len(code.texts),
        f"files below {SMALL_FILE} lines": sum(0 < text.count("\n") < SMALL_FILE for text in code.texts.values()),
        "classes": len(list(code.nodes(ast.ClassDef))),
        "functions": len(functions),
        "functions of one statement": sum(len(body) == 1 for body in bodies),
        "settings": len(settings(code)),
        "functions of one shape with another": len(same_shape(code)),
        "banned words in docstrings and comments": len(banned(code)),
        "banned words in messages": len(banned_in_messages(code)),
        "banned words in pages": len(banned_in_pages(root)),
    }


def same_shape(code: Checkout) -> list[str]:
    """Functions of at least `SHAPE_LINES` lines whose syntax equals an earlier function's but for all names."""
    seen: dict[str, str] = {}
    found = []
    for path, node in code.nodes(Function):
        body = node.body[1:] if ast.get_docstring(node) else node.body
        if lines(node) < SHAPE_LINES or not body or isinstance(body[0], ast.Expr):  # `...` of a protocol
            continue
        shape = re.sub(r"'[^']*'", "''", ast.dump(ast.Module(body, []), annotate_fields=False))
        if shape in seen:
            found.append(f"{place(path, node)} {node.name} is {seen[shape]}")
        seen.setdefault(shape, f"{place(path, node)} {node.name}")
    return found


def num_lines(root: Path, folder: str) -> int:
    """Lines of the Python files below a folder; none where it is not there."""
    return sum(path.read_text().count("\n") for path in (root / folder).rglob("*.py"))


def banned(code: Checkout) -> list[str]:
    """Lines of docstrings and comments with a banned word."""
    found = []
    for path, text in code.texts.items():
        docstrings = {
            number
            for node in ast.walk(code.trees[path])
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        for number, line in enumerate(text.splitlines(), 1):
            prose = line if number in docstrings else line.partition("# ")[2]
            found += [f"{path}:{number} {hit}: {line.strip()}" for hit in BANNED.findall(prose)]
    return found


def banned_in_messages(code: Checkout) -> list[str]:
    """Strings in `raise` statements with a banned pattern, as `laminar_py/a.py:7 what is: the string`."""
    return [
        f"{path}:{text.lineno} {hit}: {text.value}"
        for path, node in code.nodes(ast.Raise)
        for text in ast.walk(node)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        for hit in BANNED.findall(text.value)
    ]


def banned_in_pages(root: Path) -> list[str]:
    """Lines of README, docs and experiments with a banned pattern, as `docs/data.md:7 what came: the line`.

    Blocks, generated parts, code in backticks and questions do not count. `config.md` is generated from
    docstrings, `style.md` is made of examples.
    """
    found = []
    folders = [root / name for name in ("docs", "experiments", "environments")]
    for path in (root / "README.md", *sorted(page for folder in folders for page in folder.rglob("*.md"))):
        if path.name in ("config.md", "style.md") or not path.is_file():
            continue
        skipped = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            skipped ^= line.startswith(("```", "<!-- generated", "<!-- end"))
            if not skipped:
                hits = BANNED.findall(re.sub("`[^`]*`", "`", line))
                found += [f"{path.relative_to(root)}:{number} {hit}: {line.strip()}" for hit in hits]
    return found


def places(code: Checkout) -> Places:
    """Where each row of the table finds something."""
    return {
        "calls with eight or more positional arguments": positional(code),
        "settings": settings(code),
        "files above 600 lines": long_files(code),
        "functions above 50 lines": long_functions(code, MOST_FUNCTION_LINES),
        "constructors above 40 lines": long_functions(code, MOST_CONSTRUCTOR_LINES, named="__init__"),
        "import cycles between rooms": room_cycles(code),
        "records of more than four fields that are not keyword-only": positional_records(code),
        "examples that give keyword-only fields by their place": positional_examples(code),
        "calls of setattr": [
            place(path, node) for path, node in code.nodes(ast.Call) if called(node) == "setattr"
        ],
        "docstrings that state an invariant without its test or law": untested_invariants(code),
    }


def positional(code: Checkout) -> list[str]:
    """Calls whose arguments only their order tells apart."""
    return [place(path, node) for path, node in code.nodes(ast.Call) if len(node.args) > MOST_POSITIONAL]


def settings(code: Checkout) -> list[str]:
    """Leaves of a run's configuration: fields of sections that are no sections themselves.

    Counted are `RunConfig`, the sections of backends and algorithms, and what these name; profiles and fleet files
    are sections too, but no settings.
    """
    sections = {node.name: (path, node) for path, node in section_classes(code)}
    reached, ahead = set(), ["RunConfig"]
    ahead += [name for name in sections if name.endswith(("Config", "Settings"))]
    found = []
    while ahead:
        name = ahead.pop()
        if name in reached or name not in sections:
            continue
        reached.add(name)
        path, node = sections[name]
        ahead += [base.id for base in node.bases if isinstance(base, ast.Name)]
        for field in fields(node):
            inner = {
                part.id for part in ast.walk(field.annotation) if isinstance(part, ast.Name)
            } & sections.keys()
            ahead += inner
            if not inner:
                found.append(f"{place(path, field)} {name}.{ast.unparse(field.target)}")
    return sorted(found)


def section_classes(code: Checkout) -> Iterator[tuple[Path, ast.ClassDef]]:
    """Classes that derive from `Section`, directly or not."""
    classes = list(code.nodes(ast.ClassDef))
    known = {"Section"}
    grown = True
    while grown:
        more = {n.name for _, n in classes if any(isinstance(b, ast.Name) and b.id in known for b in n.bases)}
        grown = not more <= known
        known |= more
    return ((path, node) for path, node in classes if node.name in known)


def long_files(code: Checkout) -> list[str]:
    """Modules of more than 600 lines."""
    sizes = {path: text.count("\n") for path, text in code.texts.items()}
    return [f"{path} {size}" for path, size in sizes.items() if size > MOST_LINES]


def long_functions(code: Checkout, most: int, *, named: str = "") -> list[str]:
    """Functions of more than `most` lines, the signature included; of that name alone, if one is given."""
    found = [(path, node) for path, node in code.nodes(Function) if not named or node.name == named]
    return [f"{place(path, node)} {node.name} {lines(node)}" for path, node in found if lines(node) > most]


def room_cycles(code: Checkout) -> list[str]:
    """Rings of rooms, which are the folders of the package, that import each other."""
    uses: dict[str, set[str]] = defaultdict(set)
    for path, node in code.nodes(ast.ImportFrom, ast.Import):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
        for name in names:
            parts = name.split(".")
            if path.parts[0] == parts[0] == FOLDERS[0] and len(parts) > 1:
                uses[room(path)].add(parts[1])
    found = []
    while True:
        try:
            TopologicalSorter({own: others - {own} for own, others in uses.items()}).prepare()
            return found
        except CycleError as error:
            ring = error.args[1]
            found.append(" <-> ".join(ring[1:]))
            uses[ring[1]].discard(ring[0])


def positional_records(code: Checkout) -> list[str]:
    """Structs and dataclasses that a long row of values can make; those made from rows of SQL are exempt."""
    starred = {
        called(node) for _, node in code.nodes(ast.Call) if node.args and isinstance(node.args[0], ast.Starred)
    }
    found = []
    for path, node in code.nodes(ast.ClassDef):
        number = len([field for field in fields(node) if "ClassVar" not in ast.unparse(field.annotation)])
        if number > MOST_FIELDS and is_positional(node) and node.name not in starred:
            found.append(f"{place(path, node)} {node.name} {number}")
    return found


def positional_examples(code: Checkout) -> list[str]:
    """Calls in docstrings that no keyword-only record takes; what is no whole expression is no example.

    One that adds to the fields of a positional record takes those by their place.
    """
    classes = [node for _, node in code.nodes(ast.ClassDef)]
    positional = {node.name for node in classes if is_positional(node)}
    records = {
        node.name
        for node in classes
        if is_keyword_only(node) and positional.isdisjoint(map(ast.unparse, node.bases))
    }
    found = []
    for path, node in code.nodes(Function, ast.ClassDef):
        for text in re.findall("`([^`]+)`", ast.get_docstring(node) or ""):
            with contextlib.suppress(SyntaxError):
                tree = ast.parse(" ".join(text.split()))
                calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and call.args]
                found += [f"{place(path, node)} {text}" for call in calls if called(call) in records]
    return found


def untested_invariants(code: Checkout) -> list[str]:
    """Docstrings that say `Invariant` and name neither a test nor the number of a law."""
    found = [
        (path, node, ast.get_docstring(node) or "")
        for path, node in code.nodes(ast.Module, ast.ClassDef, Function)
    ]
    return [
        f"{path}:{getattr(node, 'lineno', 1)}"
        for path, node, text in found
        if "nvariant" in text and not re.search(r"test_|\b[Ll]aws? \d", text)
    ]


def is_positional(node: ast.ClassDef) -> bool:
    """True for a struct or dataclass without `kw_only=True`."""
    decorators = [one for one in node.decorator_list if "dataclass" in ast.unparse(one)]
    if not decorators and not any(
        ast.unparse(base) in ("msgspec.Struct", "Struct", "Event") for base in node.bases
    ):
        return False
    return not is_keyword_only(node)


def is_keyword_only(node: ast.ClassDef) -> bool:
    """True for a class that says `kw_only=True`, in its own line or in a decorator's."""
    options = node.keywords + [
        option for one in node.decorator_list if isinstance(one, ast.Call) for option in one.keywords
    ]
    return any(option.arg == "kw_only" and ast.unparse(option.value) == "True" for option in options)


def fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """Annotated names of a class body."""
    return [item for item in node.body if isinstance(item, ast.AnnAssign)]


def called(node: ast.Call) -> str:
    """The name of a function that is called by name, else nothing."""
    return node.func.id if isinstance(node.func, ast.Name) else ""


def lines(node: Function) -> int:
    """Lines from `def` to the end."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def room(path: Path) -> str:
    """The folder of a module in the package, or the module itself where it stands in none."""
    return path.parts[1].removesuffix(".py")


def place(path: Path, node: ast.stmt | ast.expr) -> str:
    """File and line."""
    return f"{path}:{node.lineno}"


def main() -> None:
    """Print a column for each checkout, and with `--places` where the rows of the last one come from."""
    parser = argparse.ArgumentParser(description="How the code of checkouts is built, in numbers.")
    parser.add_argument("roots", nargs="*", type=Path, default=[Path(".")])
    parser.add_argument("--places", action="store_true", help="list where each row finds something")
    options = parser.parse_args()
    tables = [sizes(root) | count(root) for root in options.roots]
    for row in tables[-1]:
        print(*(f"{table[row]:>9,}" for table in tables), "", row)  # noqa: T201
    if options.places:
        root = options.roots[-1]
        words = {
            "banned words": [*banned(Checkout(root)), *banned_in_messages(Checkout(root)), *banned_in_pages(root)]
        }
        for row, found in (places(Checkout(root)) | words).items():
            if row != "settings":
                print(f"\n{row}", *found, sep="\n  ")  # noqa: T201


if __name__ == "__main__":
    main()
