"""Print what is bound where on the recorded machines: `python -m tests.machines`."""

from __future__ import annotations

import sys

from swapkit._runtime.affinity.places import format_cpus
from swapkit.reporting.text import format_table
from tests.machines.recorded import NAMES, RecordedSystem


def list_rows(name: str, **variables: str) -> list[tuple[str, str, str, str]]:
    """Return a row for each device of a machine."""
    rows = []
    for index in range(RecordedSystem(name).count):
        system = RecordedSystem(name, variables)
        place, choice = system.place(index), system.choose(index)
        node = "unknown" if place.node is None else str(place.node)
        why = place.why or choice.text.removeprefix(str(place)).lstrip(",; ")
        bound = f"- ({why})" if choice.cpus is None else format_cpus(choice.cpus)
        rows.append((place.device, place.address or "unknown", node, bound))
    return rows


def format_machines() -> str:
    """Return a table for each machine."""
    header = ("device", "address", "node", "CPUs")
    tables = []
    for name in NAMES:
        title = f"{RecordedSystem(name).facts['title']} ({name}.txt)"
        tables.append(f"{title}\n{format_table(header, list_rows(name))}")
    return "\n\n".join(tables)


if __name__ == "__main__":
    sys.stdout.write(f"{format_machines()}\n")
