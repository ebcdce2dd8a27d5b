"""Machines as recorded in the text files of this folder. `README.md` says where each comes from."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from swapkit._runtime.affinity.devices import choose_cpus
from swapkit._runtime.affinity.places import find_place, format_cpus, parse_cpus
from swapkit._runtime.affinity.system import CommandHung, CommandMissing, System
from swapkit.config.environment import read_cpu_affinity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swapkit._runtime.affinity.devices import CpuChoice
    from swapkit._runtime.affinity.places import Place

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(file.stem for file in FOLDER.glob("*.txt")))
SIBLINGS = "/topology/thread_siblings_list"


class RecordedSystem(System):
    """A machine of this folder, instead of the one that runs the tests."""

    def __init__(self, name: str, variables: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.name = name
        self.variables = dict(variables or {})
        self.asked: list[str] = []  # the commands that were run
        self.facts: dict[str, str] = {}
        self.sections: dict[str, str] = {}
        head, *sections = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").split("\n## ")
        for line in head.splitlines():
            key, _, value = line.partition(": ")
            self.facts[key] = value
        for section in sections:
            key, _, text = section.partition("\n")
            self.sections[key] = text

    @property
    def environment(self) -> Mapping[str, str]:
        return self.variables

    @property
    def kind(self) -> str:
        return self.facts["devices"].split()[0]

    @property
    def count(self) -> int:
        return int(self.facts["devices"].split()[1])

    def read(self, path: str) -> str | None:
        if path.endswith(SIBLINGS) and "siblings" in self.facts:
            step = int(self.facts["siblings"])
            core = int(path.removesuffix(SIBLINGS).rpartition("cpu")[2]) % step
            return f"{core},{core + step}"
        text = self.sections.get(f"file {path}")
        return None if text is None else text.strip()

    def list(self, path: str) -> list[str]:
        start = f"file {path}/"
        below = [key.removeprefix(start) for key in self.sections if key.startswith(start)]
        return sorted({name.partition("/")[0] for name in below})

    def run_again(self, *command: str) -> str:
        self.asked.append(" ".join(command))
        if f"missing {command[0]}" in self.sections:
            raise CommandMissing(command[0])
        if f"hung {command[0]}" in self.sections:
            raise CommandHung(command[0])
        return self.sections.get(f"command {' '.join(command)}", "")

    def allowed_cpus(self) -> frozenset[int]:
        if "allowed" in self.facts:
            return parse_cpus(self.facts["allowed"])
        return frozenset(range(512))

    def nvidia_cpus(self, address: str) -> frozenset[int]:
        return parse_cpus(self.sections.get(f"near {address}", ""))

    def place(self, index: int) -> Place:
        return find_place(self, self.kind, index, self.properties(index))

    def properties(self, index: int) -> SimpleNamespace | None:
        """Return a GPU's properties as torch reports them; None: it is an NPU."""
        text = self.sections.get(f"address {self.kind}:{index}")
        if text is None:
            return None
        domain, bus, device = re.split("[:.]", text.strip())[:3]
        return SimpleNamespace(
            pci_domain_id=int(domain, 16), pci_bus_id=int(bus, 16), pci_device_id=int(device, 16)
        )

    def choose(self, index: int) -> CpuChoice:
        asked = read_cpu_affinity(self.variables)
        visible = (self.place(each) for each in range(self.count))
        return choose_cpus(self, self.place(index), asked, visible=visible)

    def cpus(self, index: int) -> str:
        """Return the CPUs that a device's threads are bound to, as a list; empty: not bound."""
        return format_cpus(self.choose(index).cpus or ())
