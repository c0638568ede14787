"""Which modules a command line loads."""

from __future__ import annotations

import pytest
import typer

from envforge.cli.app import COMMANDS, application, needed


@pytest.mark.parametrize("module", COMMANDS)
def test_each_module_adds_the_commands_that_lead_to_it(module: str) -> None:
    group = typer.main.get_group(application(module))
    assert tuple(group.commands) == COMMANDS[module]


def test_a_line_that_does_not_start_with_a_command_gets_them_all() -> None:
    assert needed(["resolve", "torch"]) == ("resolve",)
    assert needed(["diff", "--help"]) == ("project",)
    for line in ([], ["--help"], ["reslove"], ["--debug", "resolve"]):
        assert needed(line) == ()
    names = {name for names in COMMANDS.values() for name in names}
    assert set(typer.main.get_group(application()).commands) == names
