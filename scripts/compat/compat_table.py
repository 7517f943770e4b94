"""The table of docs/compatibility.md: reads the rows between its two markers, writes them again with new results.

``run_all.py`` calls it. Text around the markers is left as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from compat.client_check import Outcome

BEGIN = "<!-- compatibility table: written by scripts/compat/run_all.py -->"
END = "<!-- end of the compatibility table -->"
HEADERS = ("client", "version", "what was run", "result", "date", "notes")


class TableError(Exception):
    """The page cannot take a table; the message is one line."""


@dataclass(frozen=True)
class Row:
    """One line of the table, cells in the order of ``HEADERS``."""

    client: str
    version: str
    ran: str
    result: str
    date: str
    notes: str

    def cells(self) -> tuple[str, ...]:
        """The cells, escaped for Markdown."""
        fields = (self.client, self.version, self.ran, self.result, self.date, self.notes)
        return tuple(" ".join(text.split()).replace("|", "\\|") for text in fields)


def rows_of(outcomes: Sequence[Outcome], day: date) -> list[Row]:
    """The rows for results of ``day``."""
    return [Row(o.client, o.version, o.ran, o.result, day.isoformat(), o.notes) for o in outcomes]


def render(rows: Sequence[Row]) -> str:
    """The Markdown table."""
    lines = [f"| {' | '.join(HEADERS)} |", f"|{'---|' * len(HEADERS)}"]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    return "\n".join(lines)


def read_rows(page: str) -> list[Row]:
    """The rows between the markers of ``page``. Raises ``TableError`` when a marker or a cell is missing."""
    rows = []
    for line in _between(page)[1].strip().splitlines()[2:]:
        cells = line.strip().strip("|").replace("\\|", "\0").split("|")
        if len(cells) != len(HEADERS):
            raise TableError(f"a row of the table has {len(cells)} cells, expected {len(HEADERS)}: {line}")
        rows.append(Row(*(cell.replace("\0", "|").strip() for cell in cells)))
    return rows


def _between(page: str) -> tuple[str, str, str]:
    before, begin, rest = page.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not (begin and end):
        raise TableError(f"the page needs the two lines {BEGIN} and {END}")
    return before, table, after


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """``old`` with the rows of the same client and run replaced in place, and the others of ``new`` added."""
    fresh = {(row.client, row.ran): row for row in new}
    merged = [fresh.pop((row.client, row.ran), row) for row in old]
    return [*merged, *fresh.values()]


def update_page(path: Path, new: Sequence[Row], keep_old: bool) -> None:
    """Write ``new`` into the page at ``path``; with ``keep_old`` rows that were not run again stay. ``TableError``."""
    page = path.read_text(encoding="utf-8")
    before, _, after = _between(page)
    rows = merge(read_rows(page), new) if keep_old else list(new)
    path.write_text(f"{before}{BEGIN}\n\n{render(rows)}\n\n{END}{after}", encoding="utf-8")
