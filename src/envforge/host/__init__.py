"""Detection of this machine, and reading what a probe saw on another one.

Every way ends in a record (name of a file -> its text, see `record`), and one pure function, `interpret`, turns that
into facts. So a folder from a node without Python and this machine are understood by the same code.
"""

from __future__ import annotations

from envforge.host.facts import SCHEMA, Engine, GpuFacts, HostFacts, Problem, Process, Record, to_json
from envforge.host.live import gather
from envforge.host.reading import Override, apply_override, interpret
from envforge.host.record import check_new_folder, read_record, write_record
from envforge.host.script import probe_script

__all__ = [
    "SCHEMA",
    "Engine",
    "GpuFacts",
    "HostFacts",
    "Override",
    "Problem",
    "Process",
    "Record",
    "apply_override",
    "check_new_folder",
    "gather",
    "interpret",
    "probe_script",
    "read_record",
    "to_json",
    "write_record",
]
