"""`room-storage` for blocks of pages, without the second that its imports take each time.

A server has imported everything. The program `room-storage`, first on the path of a page, passes it
its arguments, folder, environment and streams. The server forks, runs the command in the fork as
the real program does, and returns the exit code. If the program gets a signal or ends, so does the
command.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.cli.running import PRELOADED

PROGRAM: Final = """#!{python} -SE
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
given = [sys.argv[1:], os.getcwd(), dict(os.environ)]
socket.send_fds(server, [b"streams"], [0, 1, 2])
server.sendall(json.dumps(given).encode() + b"\\n")
answers = server.makefile()
command = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(command, number))
code = int(answers.readline() or 1)
sys.exit(code)
"""


@contextlib.contextmanager
def quick_command(folder: Path) -> Iterator[Path]:
    """Run the server; yield a folder with the program."""
    address = folder / "commands"
    program = folder / "bin" / "room-storage"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen()
        server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listening.fileno())],
            pass_fds=[listening.fileno()],
            cwd=Path(__file__).resolve().parents[2],
        )
    try:
        yield program.parent
    finally:
        server.terminate()
        server.wait()


def serve(listening: socket.socket) -> None:
    """Fork for each program that connects."""
    for module in (*PRELOADED, "asyncpg", "uvloop"):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        program, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(handle(program))
        program.close()


def handle(program: socket.socket) -> int:
    """Run one command in a fork, for as long as the program lives; send the exit code."""
    _, streams, _, _ = socket.recv_fds(program, 7, 3)
    lines = program.makefile("rw")
    arguments, folder, environment = json.loads(lines.readline())
    command = os.fork()
    if command == 0:
        program.close()
        run(arguments, folder, environment, streams)
    for stream in streams:
        os.close(stream)
    print(command, file=lines, flush=True)
    ended = os.pidfd_open(command)
    ready, _, _ = select.select([ended, program.fileno()], [], [])
    if ended not in ready:
        os.kill(command, signal.SIGTERM)
    _, status = os.waitpid(command, 0)
    with contextlib.suppress(BrokenPipeError):
        print(os.waitstatus_to_exitcode(status) % 256, file=lines, flush=True)
    return 0


def run(arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> None:
    """Become the command."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, max(streams) + 1)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["room-storage", *arguments]
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    from storage.cli import main  # noqa: PLC0415

    code = 1
    try:
        code = main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
