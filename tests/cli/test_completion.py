"""Shell completion: what a shell asks the command while somebody types."""

import pytest

from tests.cli.running import room_storage

ASKED = {
    "bash": lambda words: {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)},
    "zsh": lambda words: {"_TYPER_COMPLETE_ARGS": words},
    "fish": lambda words: {
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    },
}


@pytest.mark.parametrize("shell", ASKED)
def test_a_shell_gets_commands_options_and_queries(shell: str) -> None:
    for words, offered in (
        ("room-storage ver", {"verify"}),
        ("room-storage purge --re", {"--retention", "--resume"}),
        ("room-storage spark st", {"statistics", "stream"}),
        ("room-storage explain mes", {"messages"}),
    ):
        done = room_storage(_ROOM_STORAGE_COMPLETE=f"complete_{shell}", **ASKED[shell](words))
        assert done.stderr == ""
        assert all(one in done.stdout for one in offered), done.stdout
        assert "migrate" not in done.stdout


@pytest.mark.parametrize("shell", ASKED)
def test_the_script_of_a_shell_calls_the_command(shell: str) -> None:
    done = room_storage(_ROOM_STORAGE_COMPLETE=f"source_{shell}")
    assert done.returncode == 0
    assert f"_ROOM_STORAGE_COMPLETE=complete_{shell}" in done.stdout
