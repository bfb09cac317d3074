"""README, docs/design.md, docs/map.md, docs/tour.md and docs/rooms: their size, their files, their links."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
ROOMS = sorted((DOCS / "rooms").glob("*.md"))
OF_CODE = [*ROOMS, DOCS / "design.md", DOCS / "map.md", DOCS / "tour.md", DOCS / "laws.md", DOCS / "extending.md"]
MOST_LINES = {"README.md": 150, "docs/design.md": 150, **{f"docs/rooms/{page.name}": 140 for page in ROOMS}}
MOST_FILES_OF_TOUR = 40


def files_in(page):
    """Files and folders that a page names in backticks, outside of blocks, as they stand there."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    named = re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)*(?:/|\.(?:py|sql)))`", text)
    return {name for name in named if "/" in name}


def generated_map():
    spec = importlib.util.spec_from_file_location("generate_map", DOCS / "generate_map.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", OF_CODE, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    places = [ROOT, ROOT / "laminar_py", *(ROOT / "laminar_py" / part for part in (page.stem, "runtime"))]
    assert [name for name in files_in(page) if not any((place / name).exists() for place in places)] == []


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_page_is_short(name):
    assert len((ROOT / name).read_text().splitlines()) <= MOST_LINES[name]


def test_the_tour_names_few_files():
    files = {name for name in files_in(DOCS / "tour.md") if name.endswith(".py")}
    assert 20 <= len(files) <= MOST_FILES_OF_TOUR


def test_every_room_and_satellite_has_its_page():
    assert {page.stem for page in ROOMS} == {*generated_map().rooms_of(ROOT / "laminar_py"), "lab", "contrib"}


def test_the_map_is_that_of_the_code():
    module = generated_map()
    page = module.PAGE.read_text()
    assert set(module.ROOMS) == set(module.rooms_of(ROOT / "laminar_py"))
    assert all((ROOT / "laminar_py" / first).is_file() for _, first in module.ROOMS.values())
    assert page == module.replaced(page, module.generate()), "run python docs/generate_map.py"


def test_an_arrow_that_follows_from_others_is_left_out():
    uses = {
        "cli": {"a"},
        "a": {"b", "c", "config"},
        "b": {"c"},
        "c": {"records"},
        "config": set(),
        "records": set(),
    }
    assert generated_map().arrows(uses) == [("a", "b"), ("b", "c")]


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    pictures = [(name, "") for name in re.findall(r'<img src="([^"]+)"', text)]
    for target, anchor in [*re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text), *pictures]:
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{target}#{anchor}"
