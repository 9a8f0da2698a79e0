"""Settings are declared once: the docs show what the code has."""

import re
from pathlib import Path

import pytest

from isobit import settings

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
TABLES = {"server": (settings.SERVER, True), "request": (settings.REQUEST, False)}


def with_current_tables(page: str) -> str:
    """The page with each table between its markers written anew."""
    for name, (listed, as_flags) in TABLES.items():
        table = settings.markdown_table(listed, as_flags)
        page, found = re.subn(
            rf"<!-- settings: {name} -->\n.*?<!-- end -->",
            lambda _, name=name, table=table: f"<!-- settings: {name} -->\n{table}\n<!-- end -->",
            page,
            flags=re.DOTALL,
        )
        assert found == 1, f"docs/serving.md has no place for the {name} settings"
    return page


def test_the_page_shows_the_settings():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_current_tables(page), "write the tables anew: python -m tests.test_settings"


@pytest.mark.parametrize("setting", [*settings.SERVER, *settings.REQUEST], ids=lambda setting: setting.name)
def test_a_default_is_allowed_and_explained(setting):
    assert setting.default_text
    assert setting.help.endswith(".")
    if setting.default is not None:
        assert isinstance(setting.default, setting.kind)
        assert setting.allows(setting.default)


def test_bounds_are_inclusive_and_not_a_number_is_outside():
    allowed = {value: settings.TEMPERATURE.allows(value) for value in (-0.1, 0, 2, 2.1, float("nan"))}
    assert list(allowed.values()) == [False, True, True, False, False]
    assert [settings.MEMORY_GIB.allows(value) for value in (0, 0.1, float("inf"))] == [False, True, False]
    assert settings.MEMORY_GIB.bounds == "above 0, at most 65,536"
    assert [settings.PREFILL.allows(value) for value in ("deep", "fast")] == [True, False]


@pytest.mark.parametrize("setting", [s for s in settings.SERVER if s.name.endswith("_gib")], ids=lambda s: s.name)
def test_an_amount_of_memory_is_one_that_bytes_can_count(setting):
    assert setting.allows(setting.maximum)
    assert not any(map(setting.allows, (setting.maximum * 1.01, 1e300, float("inf"))))


if __name__ == "__main__":
    PAGE.write_text(with_current_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
